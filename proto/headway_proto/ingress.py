"""The ingress protocol between gateway and scheduler: token ids in, tokens out.

Owns: the messages and the order in which they may come.
Must not know: text, blocks, rows, or how either side keeps its state.

A gateway names each of its live sequences by a **handle**, an integer that it never uses twice in one life. One client
request is ``n`` sequences, so it may be several handles.

Links and lives:

1. A gateway says ``GatewayHello`` (epoch 0 frames) until the scheduler answers ``SchedulerHello``, whose frame opens
   the link: its frame epoch is a number the scheduler draws for this link, and both sides number their frames from 0
   under it, without gaps. Anything of another epoch is ignored.
2. Either side that sees a damaged frame or a gap drops the link: the gateway says hello again with ``link`` + 1, the
   scheduler answers with a new epoch. On a new link the gateway submits again every sequence it still wants; the
   scheduler forgets the sequences of the old link and frees their blocks. A resubmitted sequence is prompt + tokens
   received so far, with ``num_prompt_tokens`` telling where the output begins. So nothing is lost and nothing repeats,
   and a restarted scheduler (another ``incarnation``) needs no case of its own.
3. The scheduler answers each ``Submit`` with its tokens or with one ``Rejected``. A sequence ends with one
   ``Finished``, which the gateway need not acknowledge; after ``Abort`` the gateway ignores what still arrives.
4. Flow control: ``GatewayHeartbeat.received`` acknowledges frames; when ``MAX_UNACKNOWLEDGED_FRAMES`` are outstanding,
   the scheduler sends no more tokens to that gateway until some are acknowledged, and then catches up.
   A gateway may have ``SchedulerHello.submit_credits`` sequences unfinished; more are ``Rejected``.
"""

import msgspec

from headway_proto.framing import FrameReader, FrameWriter
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams

MAX_REQUEST_TOKENS = 4_000_000
"""Prompt and output of a sequence: what a scheduler takes in one frame, with room for the rest of the message."""
MAX_FLIGHT_LOG_PIECE_BYTES = 1 << 17
"""Of a flight log in one answer: the scheduler reads them between two steps."""
MAX_UNACKNOWLEDGED_FRAMES = 4096
ACKNOWLEDGE_EVERY_FRAMES = 256
HEARTBEAT_INTERVAL_S = 0.25

PRIORITY_REALTIME = 1
PRIORITY_HIGH = 2
PRIORITY_NORMAL = 3
PRIORITY_LOW = 4

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_ABORT = "abort"
FINISH_ERROR = "error"

REJECT_INVALID = "invalid"
REJECT_OUT_OF_RANGE = "out_of_range"
REJECT_ALREADY_EXISTS = "already_exists"
REJECT_OVERLOADED = "overloaded"
REJECT_UNAVAILABLE = "unavailable"
REJECT_UNSUPPORTED = "unsupported"


class GatewayHello(msgspec.Struct, frozen=True, array_like=True):
    """Opens or reopens a link. ``incarnation`` is random, one per gateway life; ``link`` counts links within it."""

    incarnation: int
    link: int


class Submit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to generate.

    ``token_ids`` (int32 column): prompt, then output the gateway already holds; the first ``num_prompt_tokens`` are
    prompt. ``max_tokens`` counts output tokens, those already held included. ``sampling.stop_token_ids`` and, unless
    ``ignore_eos``, the model's own end-of-sequence ids end the sequence; the one that did is its last token.
    ``request_id`` is the public one; ``index`` tells the continuations of a request apart. ``traceparent`` (W3C) is empty
    where nobody traces the request. ``has_run``: it started on a link that is gone, so that it is owed its end, and it is no
    longer ended because its first token is late. ``num_prompt_logprobs``: of how many prompt tokens, from the second on, the
    gateway holds what ``sampling.prompt_logprobs`` asks for; the others are owed.
    """

    handle: int
    request_id: str
    index: int
    token_ids: bytes
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    ignore_eos: bool = False
    priority: int = PRIORITY_NORMAL
    tenant: str = ""
    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0
    traceparent: str = ""
    has_run: bool = False
    num_prompt_logprobs: int = 0


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """Sequences nobody wants any more. ``handles`` is an int32 column; unknown ones are ignored."""

    handles: bytes


class GatewayHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Sign of life; ``received`` frames of this link have been taken in."""

    received: int


class PrefixToPin(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A prefix that shall stay cached: ``token_ids`` (int32 column), for requests of ``tenant`` where tenants are apart."""

    name: str
    tenant: str = ""
    token_ids: bytes = b""


class CachePosition(msgspec.Struct, frozen=True, array_like=True):
    """How far a reader has come: entry ``index`` of the log of one cache's ``life``."""

    life: int
    index: int


class FlightLogPlace(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What to read of the flight log.

    ``life`` 0: what has happened so far is to be written, and how much that is to be told. ``mark`` above 0: which files
    there are, once so much is written. Otherwise a piece of a file, from byte ``offset`` on.
    """

    life: int = 0
    mark: int = 0
    segment: int = 0
    is_checkpoint: bool = False
    offset: int = 0


class AdminCall(msgspec.Struct, frozen=True, array_like=True):
    """An operator's call.

    ``method`` is one of status, list, explain, cancel, pause, resume, drain, pin, unpin, pins, flush, cache, flight_log.
    ``prefix`` is what to pin; for unpin its name suffices. ``position`` is where to go on reading the changes of the cache,
    ``place`` where to read the flight log.
    """

    call_id: int
    method: str
    request_id: str = ""
    prefix: PrefixToPin | None = None
    position: CachePosition | None = None
    place: FlightLogPlace | None = None


class ModelInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the connected executor serves and what fits into it."""

    name: str
    fingerprint: str
    backend: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_request_tokens: int
    """The most tokens (prompt + output) that fit the KV pool, at most ``max_model_len``."""
    supports_prompt_logprobs: bool = False
    """Whether it reports log probabilities of prompts."""
    supports_constraints: bool = False
    """Whether outputs may be constrained."""


class SchedulerHello(msgspec.Struct, frozen=True, array_like=True):
    """Opens a link (see above); ``gateway_incarnation`` and ``link`` repeat what is answered."""

    incarnation: int
    gateway_incarnation: int
    link: int
    submit_credits: int
    model: ModelInfo | None
    state: str


class SchedulerLoad(msgspec.Struct, frozen=True, array_like=True):
    """How busy the scheduler is. ``kv_cache_usage``: share of the blocks in use, 0 to 1; ``max_running`` rows at most."""

    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    kv_cache_usage: float = 0.0


class SchedulerStatus(msgspec.Struct, frozen=True, array_like=True):
    """Heartbeat of the scheduler, and news: ``model`` is None until an executor has been seen.

    ``state`` is one of ``STATE_*``. ``num_steps`` grows while work is done, so that health can be judged by progress;
    ``num_unfinished`` sequences are waiting or running.
    """

    model: ModelInfo | None
    state: str
    num_steps: int
    num_unfinished: int
    load: SchedulerLoad = SchedulerLoad()


STATE_WAITING_FOR_EXECUTOR = "waiting for executor"
STATE_SERVING = "serving"
STATE_PAUSED = "paused"
STATE_DRAINING = "draining"


class Admitted(msgspec.Struct, frozen=True, array_like=True):
    """A sequence runs for the first time; ``num_cached_tokens`` of it came from the prefix cache."""

    handle: int
    num_cached_tokens: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of output token ``index`` of a sequence, and the most likely alternatives, best first."""

    handle: int
    index: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of tokens of a sequence's prompt."""

    handle: int
    values: PromptLogprobColumns


class Finished(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence ended. Times in milliseconds, counted from the sequence's arrival at the scheduler.

    ``stop_token_id`` is the token that ended it, -1 if none did. ``num_output_tokens`` includes tokens held at submit.
    ``ttft_ms`` is 0 where there was no token. ``total_ms`` until its end. ``*_device_ms``: what the steps took on the device
    between its first step, its first token and its end; all steps, whoever else was in them.
    """

    handle: int
    reason: str
    num_output_tokens: int
    stop_token_id: int = -1
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    num_preemptions: int = 0
    error: str = ""
    total_ms: float = 0.0
    prefill_device_ms: float = 0.0
    decode_device_ms: float = 0.0


class Tokens(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """All that one step brought one gateway, in this order: admissions, tokens, ends.

    ``columns`` is a column group (handle, index, token id): output token ``index`` of sequence ``handle``. A handle
    may occur several times, its indices ascending. ``prompt_logprobs`` come before the tokens: of each sequence all, in order
    of position and none twice on one link, with its first token at the latest.
    """

    admitted: tuple[Admitted, ...] = ()
    columns: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: tuple[Finished, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Rejected(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence that was not taken. ``retry_after_ms`` is 0 where trying again does not help."""

    handle: int
    reason: str
    field: str = ""
    message: str = ""
    retry_after_ms: int = 0


class RecentPercentiles(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Of the ``count`` values of the last minute, in milliseconds; 0 where there are none."""

    count: int = 0
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0


class PreemptionCount(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How often requests lost their row for ``reason``; ``mode`` is recompute or swap."""

    mode: str
    reason: str
    count: int


class WastedTokens(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Tokens that were computed for nothing, by reason: recompute, new_epoch or surplus."""

    reason: str
    count: int


class EndCount(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How many requests ended for ``reason``."""

    reason: str
    count: int


class StepTimeModelState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What has been learned of step times; ``relative_error`` is the mean of the latest steps. Seconds, per unit."""

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
    """Predicted less actual output tokens, as sums over ``count`` ended requests."""

    count: int
    sum_absolute: int
    sum_signed: int
    sum_actual: int


class ExecutorState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The connected executor. ``age_s`` since it joined; ``last_step_age_s`` is -1 before its first answer."""

    backend: str
    model_name: str
    device: str
    dtype: str
    age_s: float
    last_step_us: int
    last_step_age_s: float


class PolicyNames(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Which policies are in force."""

    order: str
    batching: str
    budget: str
    preemption: str


class TenantServiceState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a tenant has now and has got since it was first heard of. ``counter``: under the order ``fair``."""

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


class TenantPrefixUse(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Tokens that a tenant's requests brought, and those of them that were cached."""

    tenant: str
    num_query_tokens: int
    num_hit_tokens: int


class PinnedPrefix(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A pin. ``num_blocks`` blocks hold it when it is cached whole, ``num_resident_blocks`` do now.

    ``num_blocks`` is 0 while the executor is too small for the pin.
    """

    name: str
    tenant: str
    num_tokens: int
    num_blocks: int
    num_resident_blocks: int


class SequenceState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One live sequence, for operators. ``state`` is waiting, running or preempted."""

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


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    """``num_blocks`` blocks, numbered from ``first`` on, were stored or removed; without any, all are gone.

    Stored ones hold ``token_ids`` (int32 column) behind block ``parent`` (0: they begin prompts of ``scope``); removed ones
    name none. A block's number is never used again in one life of the cache.
    """

    first: int
    num_blocks: int
    parent: int
    token_ids: bytes
    scope: str


class CacheChanges(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Changes in order; ``position`` is where to go on, at once if there are ``more``."""

    position: CachePosition
    block_size: int
    changes: tuple[CacheChange, ...]
    more: bool


class FlightLogFile(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A segment, or the checkpoint in which it begins, and its size."""

    segment: int
    is_checkpoint: bool
    num_bytes: int


class FlightLogPart(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What was asked for by a ``FlightLogPlace``.

    ``files`` is empty while less than ``mark`` is written. ``is_gone``: the file, or the whole life, is no longer there.
    """

    life: int
    mark: int = 0
    files: tuple[FlightLogFile, ...] = ()
    data: bytes = b""
    is_gone: bool = False


class AdminReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer to an ``AdminCall``: what was asked for, or ``error`` ("not found")."""

    call_id: int
    status: Status | None = None
    sequences: tuple[SequenceState, ...] = ()
    explanation: str = ""
    error: str = ""
    tenants: tuple[TenantPrefixUse, ...] = ()
    pinned_prefixes: tuple[PinnedPrefix, ...] = ()
    cache: CacheChanges | None = None
    flight_log: FlightLogPart | None = None


_TO_SCHEDULER: dict[type[msgspec.Struct], int] = {
    GatewayHello: 32,
    Submit: 33,
    Abort: 34,
    GatewayHeartbeat: 35,
    AdminCall: 36,
}
_TO_GATEWAY: dict[type[msgspec.Struct], int] = {
    SchedulerHello: 48,
    SchedulerStatus: 49,
    Tokens: 50,
    Rejected: 51,
    AdminReply: 52,
}


def gateway_frame_writer() -> FrameWriter:
    """A writer of what a gateway sends."""
    return FrameWriter(_TO_SCHEDULER)


def gateway_frame_reader() -> FrameReader:
    """A reader of what a gateway receives."""
    return FrameReader({kind: body for body, kind in _TO_GATEWAY.items()})


def scheduler_frame_writer() -> FrameWriter:
    """A writer of what a scheduler sends to one gateway."""
    return FrameWriter(_TO_GATEWAY)


def scheduler_frame_reader() -> FrameReader:
    """A reader of what a scheduler receives from gateways."""
    return FrameReader({kind: body for body, kind in _TO_SCHEDULER.items()})
