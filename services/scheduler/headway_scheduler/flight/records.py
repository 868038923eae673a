"""What the flight log is made of: one record per call of the core, in order.

Owns: the records and how a decision is compared. Must not know: files, threads, or what the core does with a call.

The core is deterministic: made with the same limits and told the same things at the same times, it decides the same. So
a log holds what it was told, whole, and of what it decided as much as tells whether a replay decided otherwise. Times
are the scheduler's monotonic clock in seconds, to the last bit.

Records travel as arrays: a field is added at the end of its record, with a default.
"""

import zlib
from typing import TypeAlias

import msgspec

from headway_proto.framing import HEADER_BYTES
from headway_proto.sampling import SamplingParams
from headway_proto.step import ExecutorOutput
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

LOG_VERSION = 1
WHOLE_DECISION_BYTES = 64
"""A decision of at most so many bytes is kept whole, so that a difference can be told and not only found."""


class Header(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first record of a segment. ``life`` counts the processes that wrote into a directory, ``segment`` from 0."""

    version: int
    headway_version: str
    life: int
    segment: int
    limits: SchedulerLimits


class EpochBegan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An executor that knows nothing is there: the core is made, or begins an epoch."""

    now: float
    epoch: int
    capacity: ExecutorCapacity
    same_model: bool
    model: str
    reason: str


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=2, kw_only=True):
    """A request that the core took. ``token_ids`` is an int32 column; stop tokens ascend."""

    now: float
    origin: Origin
    request_id: str
    index: int
    token_ids: bytes
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    priority: int
    tenant: str
    ttft_slo_ms: int
    itl_slo_ms: int
    has_run: bool = False
    num_prompt_logprobs: int = 0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A request that was not taken, and why; the core is as it was before."""

    now: float
    request_id: str
    index: int
    tenant: str
    num_tokens: int
    reason: str
    message: str


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request that nobody wants any more, or, with an ``error``, one that is to blame for it."""

    now: float
    origin: Origin
    why: str
    error: str = ""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """A step as it was sent: its size and checksum, and the message itself if it is short."""

    num_bytes: int
    checksum: int
    message: bytes = b""


class Turn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The core was asked for steps until it had no more; ``num_shed`` requests were ended because they were too late."""

    now: float
    decisions: tuple[Decision, ...] = ()
    num_shed: int = 0


class End(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended with an answer."""

    origin: Origin
    reason: str
    num_output_tokens: int


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """An answer to a step, and who ended with it. ``mismatch`` says why the core did not take it, if it did not."""

    now: float
    output: ExecutorOutput
    ends: tuple[End, ...] = ()
    mismatch: str = ""


class RanAlone(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Nobody but this request may run, until it comes to so many tokens; None: everybody may again."""

    origin: Origin | None
    num_tokens: int = 0


class Paused(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Admission was paused or resumed."""

    is_paused: bool


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A prefix was pinned; ``token_ids`` is an int32 column."""

    name: str
    tenant: str
    token_ids: bytes


class Unpinned(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A prefix was unpinned."""

    name: str


class ExecutorGone(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """There is no executor until the next epoch; for whoever reads the log."""

    now: float
    reason: str


class StartedSlowly(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """These were in steps that were lost, and come back a few at a time."""

    origins: tuple[Origin, ...]


class CacheDropped(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Cached blocks that nobody held were let go of."""


Record: TypeAlias = (
    Header
    | EpochBegan
    | Arrived
    | Refused
    | Aborted
    | Turn
    | Answered
    | RanAlone
    | Paused
    | Pinned
    | Unpinned
    | ExecutorGone
    | StartedSlowly
    | CacheDropped
)


def decision_of(message: bytes | memoryview) -> Decision:
    """What is kept of an encoded ``SchedulerOutput``."""
    num_bytes = len(message)
    whole = bytes(message) if num_bytes <= WHOLE_DECISION_BYTES else b""
    return Decision(num_bytes, zlib.crc32(message), whole)


def decision_in_frame(frame: bytes) -> Decision:
    """What is kept of a step that was sent in this frame."""
    return decision_of(memoryview(frame)[HEADER_BYTES:])
