"""The ingress protocol between gateway and scheduler: token ids in, tokens out.

Owns: its messages and their order. Must not know: text, blocks, rows, state.

A gateway names each live sequence by a **handle**, used once. A request is ``n`` sequences.

1. A gateway sends ``GatewayHello`` (epoch 0) until ``SchedulerHello`` answers. That frame's epoch, drawn by the
   scheduler, is the link's; both sides number their frames from 0 in it and ignore other epochs.
2. A damaged frame or a gap ends the link: the gateway says hello with ``link`` + 1, gets a new epoch, and submits its
   live sequences again as prompt + received tokens. The scheduler forgets the old link's sequences. So nothing is lost
   or repeated, and a restarted scheduler needs no special case.
3. Each ``Submit`` is answered with tokens or one ``Rejected``. A sequence ends with one ``Finished``. After ``Abort``
   the gateway ignores what still arrives.
4. ``GatewayHeartbeat.received`` acknowledges frames. With ``MAX_UNACKNOWLEDGED_FRAMES`` outstanding, the scheduler
   holds tokens back. It rejects more than ``SchedulerHello.submit_credits`` unfinished sequences.

``operations`` travel in the same frames.
"""

import msgspec

from headway_proto.framing import FrameReader, FrameWriter
from headway_proto.operations import AdminCall, AdminReply
from headway_proto.pooling import NO_POOLING, POOL_LAST
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams

MAX_REQUEST_TOKENS = 4_000_000
"""Prompt and output of a sequence; fits into one frame."""
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
REJECT_NOT_FOUND = "not_found"


class GatewayHello(msgspec.Struct, frozen=True, array_like=True):
    """Opens a link. ``incarnation``: random per process; ``link`` counts its links."""

    incarnation: int
    link: int


class Submit(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to generate.

    ``token_ids`` (int32 column): prompt, then received output; ``num_prompt_tokens`` divides them. ``max_tokens`` counts
    all output. ``sampling.stop_token_ids``, and the model's unless ``ignore_eos``, end the sequence. ``index`` numbers
    the continuations of ``request_id``. ``traceparent``: W3C or empty. ``has_run``: it started on an earlier link, so it
    must get an end, and its objective no longer ends it. ``num_prompt_logprobs``: prompt tokens from the second on whose
    log probabilities have arrived. ``adapter``: its name, or "" for the model as it is.
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
    adapter: str = ""


class SubmitPooled(Submit, frozen=True, array_like=True, kw_only=True):
    """One input to make a vector of; its one token means nothing. ``pooling``: see ``headway_proto.pooling``.

    A message of its own, so that other submissions stay as they are.
    """

    pooling: int = POOL_LAST


class Abort(msgspec.Struct, frozen=True, array_like=True):
    """``handles``: int32 column; unknown ones are ignored."""

    handles: bytes


class GatewayHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """``received`` counts this link's frames."""

    received: int


class ModelInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The executor's model, and the names of its adapters."""

    name: str
    fingerprint: str
    backend: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_request_tokens: int
    """The most tokens (prompt + output) that fit the KV pool."""
    supports_prompt_logprobs: bool = False
    supports_constraints: bool = False
    adapters: tuple[str, ...] = ()
    embedding_size: int = 0
    default_pooling: int = NO_POOLING
    generates: bool = True
    """These three: see ``BackendInfo``."""


class SchedulerHello(msgspec.Struct, frozen=True, array_like=True):
    """Opens a link; ``gateway_incarnation`` and ``link`` repeat the gateway's."""

    incarnation: int
    gateway_incarnation: int
    link: int
    submit_credits: int
    model: ModelInfo | None
    state: str


class SchedulerLoad(msgspec.Struct, frozen=True, array_like=True):
    """``kv_cache_usage``: share of blocks in use, 0 to 1; ``max_running``: rows."""

    num_running: int = 0
    num_waiting: int = 0
    max_running: int = 0
    kv_cache_usage: float = 0.0


class SchedulerStatus(msgspec.Struct, frozen=True, array_like=True):
    """Heartbeat and news. ``model``: None before the first executor. ``state``: one of ``STATE_*``. ``num_steps`` shows
    progress.
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
    """A sequence starts; ``num_cached_tokens`` come from the prefix cache."""

    handle: int
    num_cached_tokens: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of output token ``index``, with the best alternatives."""

    handle: int
    index: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of prompt tokens."""

    handle: int
    values: PromptLogprobColumns


class Finished(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence ended. Times in milliseconds since it reached the scheduler.

    ``stop_token_id`` ended it, or -1. ``num_output_tokens`` counts all output. ``ttft_ms``: 0 without a token.
    ``*_device_ms``: device time of the steps up to its first token, and after it.
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
    """One step's news for one gateway: admissions, tokens, ends, in this order.

    ``columns``: a group (handle, index, token id), indices of a handle ascending. ``prompt_logprobs`` come by position,
    once per link, at the latest with the first token.
    """

    admitted: tuple[Admitted, ...] = ()
    columns: bytes = b""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finished: tuple[Finished, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """A pooled input's vector: a float32 column."""

    handle: int
    values: bytes


class TokensAndVectors(Tokens, frozen=True, array_like=True, kw_only=True):
    """The news of a step in which pooled inputs ended. A vector comes with its sequence's end."""

    vectors: tuple[Vector, ...] = ()


class Rejected(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``retry_after_ms`` is 0 if a retry is useless."""

    handle: int
    reason: str
    field: str = ""
    message: str = ""
    retry_after_ms: int = 0


_TO_SCHEDULER: dict[type[msgspec.Struct], int] = {
    GatewayHello: 32,
    Submit: 33,
    Abort: 34,
    GatewayHeartbeat: 35,
    AdminCall: 36,
    SubmitPooled: 37,
}
_TO_GATEWAY: dict[type[msgspec.Struct], int] = {
    SchedulerHello: 48,
    SchedulerStatus: 49,
    Tokens: 50,
    Rejected: 51,
    AdminReply: 52,
    TokensAndVectors: 53,
}


def gateway_frame_writer() -> FrameWriter:
    """Make a writer."""
    return FrameWriter(_TO_SCHEDULER)


def gateway_frame_reader() -> FrameReader:
    """Make a reader."""
    return FrameReader({kind: body for body, kind in _TO_GATEWAY.items()})


def scheduler_frame_writer() -> FrameWriter:
    """Make a writer."""
    return FrameWriter(_TO_GATEWAY)


def scheduler_frame_reader() -> FrameReader:
    """Make a reader."""
    return FrameReader({kind: body for body, kind in _TO_SCHEDULER.items()})
