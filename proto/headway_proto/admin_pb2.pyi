from headway_proto import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("scheduler_state", "executor_state", "epoch", "step", "num_running", "num_waiting", "num_preempted", "num_total_blocks", "num_free_blocks", "num_cached_blocks", "num_steps", "num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_finished", "num_prefix_query_tokens", "num_prefix_hit_tokens", "max_num_batched_tokens", "max_num_seqs", "num_gateways", "num_prefix_queries", "num_prefix_hits", "num_prefix_resumed_tokens", "num_evicted_blocks", "num_reused_blocks", "num_pinned_blocks", "recent_prefix_hit_rate", "tenants", "steps_until_shortage", "num_swapped_out_blocks", "num_host_blocks", "num_free_host_blocks", "uptime_s", "num_epochs", "num_executor_losses", "num_in_flight_steps", "max_steps_in_flight", "num_waiting_tokens", "num_budget_tokens", "budget_margin", "prompt_tokens_per_s", "output_tokens_per_s", "ttft", "itl", "queue", "e2e", "preemptions", "wasted_tokens", "ends", "step_time_model", "prediction_error", "executor", "policies", "tenant_services", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "executors", "num_unplaced", "num_moved", "num_offloaded_blocks", "num_restored_tokens", "num_exported_blocks", "num_pulled_tokens", "num_stale_pulls")
    SCHEDULER_STATE_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    NUM_GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_REUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECENT_PREFIX_HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_UNTIL_SHORTAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXECUTOR_LOSSES_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_STEPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_MARGIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    E2E_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    WASTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_MODEL_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    TENANT_SERVICES_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNPLACED_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    NUM_OFFLOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPORTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_PULLS_FIELD_NUMBER: _ClassVar[int]
    scheduler_state: str
    executor_state: str
    epoch: int
    step: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_finished: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_gateways: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_prefix_resumed_tokens: int
    num_evicted_blocks: int
    num_reused_blocks: int
    num_pinned_blocks: int
    recent_prefix_hit_rate: float
    tenants: _containers.RepeatedCompositeFieldContainer[TenantPrefixUse]
    steps_until_shortage: int
    num_swapped_out_blocks: int
    num_host_blocks: int
    num_free_host_blocks: int
    uptime_s: float
    num_epochs: int
    num_executor_losses: int
    num_in_flight_steps: int
    max_steps_in_flight: int
    num_waiting_tokens: int
    num_budget_tokens: int
    budget_margin: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: RecentPercentiles
    itl: RecentPercentiles
    queue: RecentPercentiles
    e2e: RecentPercentiles
    preemptions: _containers.RepeatedCompositeFieldContainer[PreemptionCount]
    wasted_tokens: _containers.RepeatedCompositeFieldContainer[WastedTokens]
    ends: _containers.RepeatedCompositeFieldContainer[EndCount]
    step_time_model: StepTimeModelState
    prediction_error: PredictionErrorState
    executor: ExecutorState
    policies: PolicyNames
    tenant_services: _containers.RepeatedCompositeFieldContainer[TenantServiceState]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    executors: _containers.RepeatedCompositeFieldContainer[ExecutorStatus]
    num_unplaced: int
    num_moved: int
    num_offloaded_blocks: int
    num_restored_tokens: int
    num_exported_blocks: int
    num_pulled_tokens: int
    num_stale_pulls: int
    def __init__(self, scheduler_state: _Optional[str] = ..., executor_state: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_preempted: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_finished: _Optional[int] = ..., num_prefix_query_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., num_gateways: _Optional[int] = ..., num_prefix_queries: _Optional[int] = ..., num_prefix_hits: _Optional[int] = ..., num_prefix_resumed_tokens: _Optional[int] = ..., num_evicted_blocks: _Optional[int] = ..., num_reused_blocks: _Optional[int] = ..., num_pinned_blocks: _Optional[int] = ..., recent_prefix_hit_rate: _Optional[float] = ..., tenants: _Optional[_Iterable[_Union[TenantPrefixUse, _Mapping]]] = ..., steps_until_shortage: _Optional[int] = ..., num_swapped_out_blocks: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_free_host_blocks: _Optional[int] = ..., uptime_s: _Optional[float] = ..., num_epochs: _Optional[int] = ..., num_executor_losses: _Optional[int] = ..., num_in_flight_steps: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., num_waiting_tokens: _Optional[int] = ..., num_budget_tokens: _Optional[int] = ..., budget_margin: _Optional[float] = ..., prompt_tokens_per_s: _Optional[float] = ..., output_tokens_per_s: _Optional[float] = ..., ttft: _Optional[_Union[RecentPercentiles, _Mapping]] = ..., itl: _Optional[_Union[RecentPercentiles, _Mapping]] = ..., queue: _Optional[_Union[RecentPercentiles, _Mapping]] = ..., e2e: _Optional[_Union[RecentPercentiles, _Mapping]] = ..., preemptions: _Optional[_Iterable[_Union[PreemptionCount, _Mapping]]] = ..., wasted_tokens: _Optional[_Iterable[_Union[WastedTokens, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[EndCount, _Mapping]]] = ..., step_time_model: _Optional[_Union[StepTimeModelState, _Mapping]] = ..., prediction_error: _Optional[_Union[PredictionErrorState, _Mapping]] = ..., executor: _Optional[_Union[ExecutorState, _Mapping]] = ..., policies: _Optional[_Union[PolicyNames, _Mapping]] = ..., tenant_services: _Optional[_Iterable[_Union[TenantServiceState, _Mapping]]] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., executors: _Optional[_Iterable[_Union[ExecutorStatus, _Mapping]]] = ..., num_unplaced: _Optional[int] = ..., num_moved: _Optional[int] = ..., num_offloaded_blocks: _Optional[int] = ..., num_restored_tokens: _Optional[int] = ..., num_exported_blocks: _Optional[int] = ..., num_pulled_tokens: _Optional[int] = ..., num_stale_pulls: _Optional[int] = ...) -> None: ...

class RecentPercentiles(_message.Message):
    __slots__ = ("count", "p50_ms", "p90_ms", "p99_ms")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    P50_MS_FIELD_NUMBER: _ClassVar[int]
    P90_MS_FIELD_NUMBER: _ClassVar[int]
    P99_MS_FIELD_NUMBER: _ClassVar[int]
    count: int
    p50_ms: float
    p90_ms: float
    p99_ms: float
    def __init__(self, count: _Optional[int] = ..., p50_ms: _Optional[float] = ..., p90_ms: _Optional[float] = ..., p99_ms: _Optional[float] = ...) -> None: ...

class PreemptionCount(_message.Message):
    __slots__ = ("mode", "reason", "count")
    MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    mode: str
    reason: str
    count: int
    def __init__(self, mode: _Optional[str] = ..., reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class WastedTokens(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class EndCount(_message.Message):
    __slots__ = ("reason", "count")
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    reason: str
    count: int
    def __init__(self, reason: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StepTimeModelState(_message.Message):
    __slots__ = ("num_observed", "num_shifts", "relative_error", "constant_s", "row_s", "token_s", "token_beyond_128_s", "token_beyond_256_s", "context_token_s", "prefill_pair_s")
    NUM_OBSERVED_FIELD_NUMBER: _ClassVar[int]
    NUM_SHIFTS_FIELD_NUMBER: _ClassVar[int]
    RELATIVE_ERROR_FIELD_NUMBER: _ClassVar[int]
    CONSTANT_S_FIELD_NUMBER: _ClassVar[int]
    ROW_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEYOND_128_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BEYOND_256_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    num_observed: int
    num_shifts: int
    relative_error: float
    constant_s: float
    row_s: float
    token_s: float
    token_beyond_128_s: float
    token_beyond_256_s: float
    context_token_s: float
    prefill_pair_s: float
    def __init__(self, num_observed: _Optional[int] = ..., num_shifts: _Optional[int] = ..., relative_error: _Optional[float] = ..., constant_s: _Optional[float] = ..., row_s: _Optional[float] = ..., token_s: _Optional[float] = ..., token_beyond_128_s: _Optional[float] = ..., token_beyond_256_s: _Optional[float] = ..., context_token_s: _Optional[float] = ..., prefill_pair_s: _Optional[float] = ...) -> None: ...

class PredictionErrorState(_message.Message):
    __slots__ = ("count", "sum_absolute", "sum_signed", "sum_actual")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_ABSOLUTE_FIELD_NUMBER: _ClassVar[int]
    SUM_SIGNED_FIELD_NUMBER: _ClassVar[int]
    SUM_ACTUAL_FIELD_NUMBER: _ClassVar[int]
    count: int
    sum_absolute: int
    sum_signed: int
    sum_actual: int
    def __init__(self, count: _Optional[int] = ..., sum_absolute: _Optional[int] = ..., sum_signed: _Optional[int] = ..., sum_actual: _Optional[int] = ...) -> None: ...

class ExecutorState(_message.Message):
    __slots__ = ("backend", "model_name", "device", "dtype", "age_s", "last_step_us", "last_step_age_s")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_US_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    backend: str
    model_name: str
    device: str
    dtype: str
    age_s: float
    last_step_us: int
    last_step_age_s: float
    def __init__(self, backend: _Optional[str] = ..., model_name: _Optional[str] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., age_s: _Optional[float] = ..., last_step_us: _Optional[int] = ..., last_step_age_s: _Optional[float] = ...) -> None: ...

class ExecutorStatus(_message.Message):
    __slots__ = ("number", "state", "epoch", "is_draining", "details", "num_running", "num_waiting", "num_total_blocks", "num_free_blocks", "num_cached_blocks", "kv_usage", "num_steps", "role")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    number: int
    state: str
    epoch: int
    is_draining: bool
    details: ExecutorState
    num_running: int
    num_waiting: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    kv_usage: float
    num_steps: int
    role: str
    def __init__(self, number: _Optional[int] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., is_draining: _Optional[bool] = ..., details: _Optional[_Union[ExecutorState, _Mapping]] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_total_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., kv_usage: _Optional[float] = ..., num_steps: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class PolicyNames(_message.Message):
    __slots__ = ("order", "batching", "budget", "preemption", "placement")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    BATCHING_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    order: str
    batching: str
    budget: str
    preemption: str
    placement: str
    def __init__(self, order: _Optional[str] = ..., batching: _Optional[str] = ..., budget: _Optional[str] = ..., preemption: _Optional[str] = ..., placement: _Optional[str] = ...) -> None: ...

class TenantServiceState(_message.Message):
    __slots__ = ("tenant", "num_running", "num_waiting", "num_prompt_tokens", "num_output_tokens", "counter")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    counter: float
    def __init__(self, tenant: _Optional[str] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., counter: _Optional[float] = ...) -> None: ...

class TenantPrefixUse(_message.Message):
    __slots__ = ("tenant", "num_query_tokens", "num_hit_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    num_query_tokens: int
    num_hit_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., num_query_tokens: _Optional[int] = ..., num_hit_tokens: _Optional[int] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequestState(_message.Message):
    __slots__ = ("request_id", "state", "priority", "tenant", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens", "num_blocks", "num_preemptions", "age_ms", "executor")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    state: str
    priority: int
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    age_ms: float
    executor: int
    def __init__(self, request_id: _Optional[str] = ..., state: _Optional[str] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., age_ms: _Optional[float] = ..., executor: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestState]
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestState, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("request", "explanation")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    request: RequestState
    explanation: str
    def __init__(self, request: _Optional[_Union[RequestState, _Mapping]] = ..., explanation: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainExecutorRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: int
    def __init__(self, executor: _Optional[int] = ...) -> None: ...

class DrainExecutorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainExecutorRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: int
    def __init__(self, executor: _Optional[int] = ...) -> None: ...

class UndrainExecutorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetExecutorRoleRequest(_message.Message):
    __slots__ = ("executor", "role")
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    executor: int
    role: str
    def __init__(self, executor: _Optional[int] = ..., role: _Optional[str] = ...) -> None: ...

class SetExecutorRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "directory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[LoadedAdapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[LoadedAdapter, _Mapping]]] = ...) -> None: ...

class LoadedAdapter(_message.Message):
    __slots__ = ("name", "directory", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    directory: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., directory: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("name", "text", "token_ids", "chat", "tenant")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    name: str
    text: str
    token_ids: _generation_pb2.TokenIds
    chat: _generation_pb2.Chat
    tenant: str
    def __init__(self, name: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_generation_pb2.Chat, _Mapping]] = ..., tenant: _Optional[str] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("pinned",)
    PINNED_FIELD_NUMBER: _ClassVar[int]
    pinned: PinnedPrefix
    def __init__(self, pinned: _Optional[_Union[PinnedPrefix, _Mapping]] = ...) -> None: ...

class PinnedPrefix(_message.Message):
    __slots__ = ("name", "tenant", "num_tokens", "num_blocks", "num_resident_blocks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESIDENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    tenant: str
    num_tokens: int
    num_blocks: int
    num_resident_blocks: int
    def __init__(self, name: _Optional[str] = ..., tenant: _Optional[str] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_resident_blocks: _Optional[int] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListPinnedPrefixesRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: int
    def __init__(self, executor: _Optional[int] = ...) -> None: ...

class ListPinnedPrefixesResponse(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[PinnedPrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[PinnedPrefix, _Mapping]]] = ...) -> None: ...

class ReadFlightLogRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadFlightLogResponse(_message.Message):
    __slots__ = ("life", "segment", "is_checkpoint", "offset", "num_bytes", "num_log_bytes", "data")
    LIFE_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    IS_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    life: int
    segment: int
    is_checkpoint: bool
    offset: int
    num_bytes: int
    num_log_bytes: int
    data: bytes
    def __init__(self, life: _Optional[int] = ..., segment: _Optional[int] = ..., is_checkpoint: _Optional[bool] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_log_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
