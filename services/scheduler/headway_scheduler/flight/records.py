"""The records of the flight log: one per call of the core, in order.

Owns: the records, and how decisions are compared. Must not know: files, threads, or what a call does.

The core is deterministic, so a log holds every call whole, and of each decision enough to detect another one. Times are
the scheduler's monotonic clock in seconds. A new field goes to the end of its record, with a default.
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
"""A smaller decision is kept whole, so that a difference can be shown."""


class Header(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first record of a segment. ``life`` counts the processes that wrote into a directory."""

    version: int
    headway_version: str
    life: int
    segment: int
    limits: SchedulerLimits


class EpochBegan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The core was made, or began an epoch with an executor that knows nothing."""

    now: float
    epoch: int
    capacity: ExecutorCapacity
    same_model: bool
    model: str
    reason: str


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=2, kw_only=True):
    """The core took a request. ``token_ids`` is an int32 column; stop tokens ascend."""

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
    """A request was refused; the core did not change."""

    now: float
    request_id: str
    index: int
    tenant: str
    num_tokens: int
    reason: str
    message: str


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A request was aborted or, with an ``error``, found guilty."""

    now: float
    origin: Origin
    why: str
    error: str = ""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Size and checksum of a sent step; the message itself if it is short."""

    num_bytes: int
    checksum: int
    message: bytes = b""


class Turn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The core scheduled these steps and had no more; ``num_shed`` requests were too late and ended."""

    now: float
    decisions: tuple[Decision, ...] = ()
    num_shed: int = 0


class End(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended with an answer."""

    origin: Origin
    reason: str
    num_output_tokens: int


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """An answer and the requests that ended with it. ``mismatch`` says why the core refused it."""

    now: float
    output: ExecutorOutput
    ends: tuple[End, ...] = ()
    mismatch: str = ""


class RanAlone(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Only this request may run, until it has so many tokens; None: all may run."""

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
    """There is no executor until the next epoch; only for readers of the log."""

    now: float
    reason: str


class StartedSlowly(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """These were in lost steps and start again a few at a time."""

    origins: tuple[Origin, ...]


class CacheDropped(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """The cached blocks that no request held were dropped."""


class InCell(msgspec.Struct, frozen=True, array_like=True, tag=14):
    """The records that follow are of this cell; -1 stands for placement. A segment begins with cell 0."""

    number: int


class Released(msgspec.Struct, frozen=True, array_like=True, tag=15):
    """The core was asked to release a request; it may have refused as yet."""

    origin: Origin


class ReleasedWaiting(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """The core released what waited."""


class ReleasedAll(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """The core released every request."""


class Adopted(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """The core took over a request that placement had; the queue there may have changed its rank and lane."""

    origin: Origin
    arrival: int
    rank: int
    lane: int


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
    | InCell
    | Released
    | ReleasedWaiting
    | ReleasedAll
    | Adopted
)


def decision_of(message: bytes | memoryview) -> Decision:
    """The record of an encoded ``SchedulerOutput``."""
    num_bytes = len(message)
    whole = bytes(message) if num_bytes <= WHOLE_DECISION_BYTES else b""
    return Decision(num_bytes, zlib.crc32(message), whole)


def decision_in_frame(frame: bytes) -> Decision:
    """The record of a step in a frame."""
    return decision_of(memoryview(frame)[HEADER_BYTES:])
