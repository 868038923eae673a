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
from headway_proto.operations import AdminCall, AdminReply
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams

MAX_REQUEST_TOKENS = 4_000_000
"""Prompt and output of a sequence: what a scheduler takes in one frame, with room for the rest of the message."""
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
