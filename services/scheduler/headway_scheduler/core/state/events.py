"""What the core reports after each call: admissions, tokens, ends.

Owns: these events. Must not know: gateways or frames.
"""

import msgspec

from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.step import RowLogprobs
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.request import FinishReason


class AdmittedEvent(msgspec.Struct, frozen=True):
    """A request started for the first time. Times in seconds."""

    origin: Origin
    num_cached_tokens: int
    num_prompt_tokens: int
    tenant: str
    arrival_time: float
    scheduled_time: float


class FirstTokenEvent(msgspec.Struct, frozen=True):
    """A request has its first token. Times in seconds."""

    arrival_time: float
    scheduled_time: float


class FinishedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A request ended. Times in seconds, None if that never came.

    ``num_output_tokens`` includes ``num_held_tokens``. ``num_predicted_tokens``: the output expected at its first
    start.
    """

    origin: Origin
    reason: FinishReason
    num_output_tokens: int
    arrival_time: float
    scheduled_time: float | None
    first_token_time: float | None
    num_preemptions: int
    num_prompt_tokens: int
    num_held_tokens: int
    tenant: str
    device_us: tuple[int, int] = (0, 0)
    """Device time, in microseconds, of the steps from its start to its first token, and of those after."""
    num_predicted_tokens: int | None = None
    stop_token_id: int = -1
    error: str = ""


class LogprobsEvent(msgspec.Struct, frozen=True):
    """Log probabilities of output token ``index``."""

    origin: Origin
    index: int
    values: RowLogprobs


class PromptLogprobsEvent(msgspec.Struct, frozen=True):
    """Log probabilities of prompt tokens, each reported once."""

    origin: Origin
    values: PromptLogprobColumns


class VectorEvent(msgspec.Struct, frozen=True):
    """The vector of a pooled request, a float32 column, which the core passes on unread."""

    origin: Origin
    values: bytes


class StepEvents(msgspec.Struct, frozen=True, kw_only=True):
    """``owners``, ``handles``, ``indices``, ``token_ids``: one entry per new token.

    ``resumed_gaps_s``: seconds between tokens of requests that lost their row in between. ``left``: requests that were
    to leave this core and are now to be released.
    """

    admitted: tuple[AdmittedEvent, ...] = ()
    owners: Int32Array = EMPTY_COLUMN
    handles: Int32Array = EMPTY_COLUMN
    indices: Int32Array = EMPTY_COLUMN
    token_ids: Int32Array = EMPTY_COLUMN
    logprobs: tuple[LogprobsEvent, ...] = ()
    finished: tuple[FinishedEvent, ...] = ()
    first_tokens: tuple[FirstTokenEvent, ...] = ()
    resumed_gaps_s: tuple[float, ...] = ()
    prompt_logprobs: tuple[PromptLogprobsEvent, ...] = ()
    left: tuple[Origin, ...] = ()
    vectors: tuple[VectorEvent, ...] = ()
