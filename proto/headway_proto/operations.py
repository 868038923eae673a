"""Operators' calls to the scheduler and its answers.

Owns: these messages, passed on by gateways. Must not know: how answers are made.
"""

import msgspec

from headway_proto.adapters import LoadedAdapter

EXECUTOR_ROLES = ("prefill", "decode", "both")
"""What an executor may be for."""

MAX_FLIGHT_LOG_PIECE_BYTES = 1 << 17
"""Limits reads between two steps."""


class PrefixToPin(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``token_ids``: int32 column. ``tenant``: if tenants are separate."""

    name: str
    tenant: str = ""
    token_ids: bytes = b""


class CachePosition(msgspec.Struct, frozen=True, array_like=True):
    """Entry ``index`` in the log of a cache's ``life``."""

    life: int
    index: int


class FlightLogPlace(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What to read of the flight log.

    ``life`` 0: write everything so far, and return its ``mark``. ``mark`` above 0: list the files once so much is
    written. Otherwise: a piece of a file from byte ``offset``.
    """

    life: int = 0
    mark: int = 0
    segment: int = 0
    is_checkpoint: bool = False
    offset: int = 0


class AdapterToLoad(msgspec.Struct, frozen=True, array_like=True):
    """``directory``: where each executor finds its files; "" to unload."""

    name: str
    directory: str = ""


class AdminCall(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``method``: status, list, explain, cancel, pause, resume, drain, drain_executor, undrain_executor,
    set_executor_role, pin, unpin, pins, flush, cache, flight_log, load_adapter, unload_adapter, adapters.

    ``adapter`` is for load_adapter and unload_adapter, ``prefix`` for pins, ``position`` for cache, ``place`` for flight_log, ``role`` for set_executor_role.
    ``executor``: the number of the one that drain_executor, undrain_executor, set_executor_role, pins and cache are
    about. Whoever sends the call numbers it.
    """

    call_id: int = 0
    method: str
    request_id: str = ""
    prefix: PrefixToPin | None = None
    position: CachePosition | None = None
    place: FlightLogPlace | None = None
    executor: int = 0
    role: str = ""
    adapter: AdapterToLoad | None = None


class RecentPercentiles(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of the last minute's ``count`` values."""

    count: int = 0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0


class PreemptionCount(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``mode``: recompute or swap."""

    mode: str
    reason: str
    count: int


class WastedTokens(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``reason``: recompute, new_epoch, surplus."""

    reason: str
    count: int


class EndCount(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Ended requests."""

    reason: str
    count: int


class StepTimeModelState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Learned step times, in seconds per unit; ``relative_error``: recent mean."""

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


class PredictionErrorState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Predicted minus actual output tokens, summed over ``count`` ended requests."""

    count: int
    sum_absolute: int
    sum_signed: int
    sum_actual: int


class ExecutorState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``last_step_age_s`` is -1 before the first answer."""

    backend: str
    model_name: str
    device: str
    dtype: str
    age_s: float
    last_step_us: int
    last_step_age_s: float


class ExecutorStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One executor of several, or the only one. ``state``: absent, ready or silent; ``details``: None while absent.

    ``role`` is one of ``EXECUTOR_ROLES``.
    """

    number: int
    state: str
    epoch: int
    is_draining: bool
    details: ExecutorState | None
    num_running: int
    num_waiting: int
    num_total_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    kv_usage: float
    num_steps: int
    role: str = ""


class PolicyNames(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Policies in use."""

    order: str
    batching: str
    budget: str
    preemption: str
    placement: str = ""


class TenantServiceState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Requests now, tokens so far. ``counter``: only with order ``fair``."""

    tenant: str
    num_running: int
    num_waiting: int
    num_prompt_tokens: int
    num_output_tokens: int
    counter: float | None = None


class Status(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The figures of ``GetStatus``."""

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
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prefix_resumed_tokens: int = 0
    num_evicted_blocks: int = 0
    num_reused_blocks: int = 0
    num_pinned_blocks: int = 0
    recent_prefix_hit_rate: float = 0.0
    steps_until_shortage: int | None = None
    num_swapped_out_blocks: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    uptime_s: float = 0.0
    num_epochs: int = 0
    num_executor_losses: int = 0
    num_in_flight_steps: int = 0
    max_steps_in_flight: int = 0
    num_waiting_tokens: int = 0
    num_budget_tokens: int = 0
    budget_margin: float = 1.0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    ttft: RecentPercentiles = RecentPercentiles()
    itl: RecentPercentiles = RecentPercentiles()
    queue: RecentPercentiles = RecentPercentiles()
    e2e: RecentPercentiles = RecentPercentiles()
    preemptions: tuple[PreemptionCount, ...] = ()
    wasted_tokens: tuple[WastedTokens, ...] = ()
    ends: tuple[EndCount, ...] = ()
    step_time_model: StepTimeModelState | None = None
    prediction_error: PredictionErrorState | None = None
    executor: ExecutorState | None = None
    policies: PolicyNames | None = None
    tenant_services: tuple[TenantServiceState, ...] = ()
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    executors: tuple[ExecutorStatus, ...] = ()
    num_unplaced: int = 0
    num_moved: int = 0
    num_offloaded_blocks: int = 0
    num_restored_tokens: int = 0
    num_exported_blocks: int = 0
    num_pulled_tokens: int = 0
    num_stale_pulls: int = 0


class TenantPrefixUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Prompt tokens, and how many were cached."""

    tenant: str
    num_query_tokens: int
    num_hit_tokens: int


class PinnedPrefix(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``num_blocks`` in all (0 while the executor is too small), ``num_resident_blocks`` cached now."""

    name: str
    tenant: str
    num_tokens: int
    num_blocks: int
    num_resident_blocks: int


class SequenceState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``state``: waiting, running or preempted. ``executor``: -1 while it waits for one."""

    request_id: str
    index: int
    state: str
    priority: int
    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    age_ms: float
    executor: int = -1


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    """``num_blocks`` blocks, numbered from ``first``, were stored or removed; 0: all were removed.

    Stored blocks hold ``token_ids`` (int32 column) behind block ``parent`` (0: at the start of prompts of ``scope``);
    removed ones have none. Numbers are unique in a cache's life.
    """

    first: int
    num_blocks: int
    parent: int
    token_ids: bytes
    scope: str


class CacheChanges(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Changes in order; continue at ``position``, at once if ``more``."""

    position: CachePosition
    block_size: int
    changes: tuple[CacheChange, ...]
    more: bool


class FlightLogFile(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A segment or its checkpoint."""

    segment: int
    is_checkpoint: bool
    num_bytes: int


class FlightLogPart(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``files`` is empty until ``mark`` is written. ``is_gone``: the file or the life no longer exists."""

    life: int
    mark: int = 0
    files: tuple[FlightLogFile, ...] = ()
    data: bytes = b""
    is_gone: bool = False


class AdminReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer, or ``error``."""

    call_id: int
    status: Status | None = None
    sequences: tuple[SequenceState, ...] = ()
    explanation: str = ""
    error: str = ""
    tenants: tuple[TenantPrefixUse, ...] = ()
    pinned_prefixes: tuple[PinnedPrefix, ...] = ()
    cache: CacheChanges | None = None
    flight_log: FlightLogPart | None = None
    adapters: tuple[LoadedAdapter, ...] = ()
