"""The records of the flight log: one per call of the core, in order.

Owns: the records. Must not know: files, threads, what a call does.
The core is deterministic, so a log holds whole calls, but of a decision only enough to detect another. Times are the
scheduler's monotonic clock in seconds. A new field goes to the end of its record, with a default.
"""

from typing import TypeAlias

import msgspec

from headway_proto.checksum import crc32
from headway_proto.framing import HEADER_BYTES
from headway_proto.pooling import NO_POOLING
from headway_proto.sampling import SamplingParams
from headway_proto.step import ExecutorOutput
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

LOG_VERSION = 1
WHOLE_DECISION_BYTES = 64
"""Decisions up to this size are kept whole, to show differences."""


class Header(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A segment's first record. ``life`` counts recordings in a directory; ``missing`` says what is before one that went on."""

    version: int
    headway_version: str
    life: int
    segment: int
    limits: SchedulerLimits
    missing: str = ""


class EpochBegan(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The core is new, or began an epoch with an executor without state."""

    now: float
    epoch: int
    capacity: ExecutorCapacity
    same_model: bool
    model: str
    reason: str


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag=2, kw_only=True):
    """``token_ids``: int32 column; stop tokens ascend."""

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
    adapter: str = ""
    pooling: int = NO_POOLING


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The core did not change."""

    now: float
    request_id: str
    index: int
    tenant: str
    num_tokens: int
    reason: str
    message: str


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """With an ``error``, the request was guilty."""

    now: float
    origin: Origin
    why: str
    error: str = ""


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """A sent step; ``message`` if it is short."""

    num_bytes: int
    checksum: int
    message: bytes = b""


class Turn(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The core scheduled these steps; ``num_shed`` late requests ended."""

    now: float
    decisions: tuple[Decision, ...] = ()
    num_shed: int = 0


class End(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended with an answer."""

    origin: Origin
    reason: str
    num_output_tokens: int


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """An answer and the requests that it ended. ``mismatch``: why the core refused it."""

    now: float
    output: ExecutorOutput
    ends: tuple[End, ...] = ()
    mismatch: str = ""


class RanAlone(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Only this request runs, until it has ``num_tokens`` tokens; None: all run."""

    origin: Origin | None
    num_tokens: int = 0


class Paused(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Admission was paused or resumed."""

    is_paused: bool


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """``token_ids`` is an int32 column."""

    name: str
    tenant: str
    token_ids: bytes


class Unpinned(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A pin was removed."""

    name: str


class ExecutorGone(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """No executor until the next epoch; only for readers."""

    now: float
    reason: str


class StartedSlowly(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Requests of lost steps start a few at a time."""

    origins: tuple[Origin, ...]


class CacheDropped(msgspec.Struct, frozen=True, array_like=True, tag=13):
    """Unused cached blocks were dropped."""


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
    """The core took over a request that placement had; the queue there may have changed its rank and lane.

    ``has_blocks``: if blocks of it are stored, they can be reached. ``spares``: see ``Moving.adopt``; earlier versions never
    spared.
    """

    origin: Origin
    arrival: int
    rank: int
    lane: int
    is_leaving: bool = False
    has_blocks: bool = True
    spares: bool = False


class LetLeave(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """The core was asked to let a running request leave."""

    origin: Origin
    must_leave: bool


class LeaseReturned(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Nobody needs these host blocks (an int32 column) of this pool any more, which ``step`` of ``epoch`` wrote."""

    pool: str
    host_blocks: bytes
    epoch: int = 0
    step: int = 0


class Distrusted(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """The core was told that an executor was found in another state in this epoch, here or elsewhere."""

    epoch: int


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
    | LetLeave
    | LeaseReturned
    | Distrusted
)


def decision_of(message: bytes | memoryview) -> Decision:
    """Record an encoded ``SchedulerOutput``."""
    num_bytes = len(message)
    whole = bytes(message) if num_bytes <= WHOLE_DECISION_BYTES else b""
    return Decision(num_bytes, crc32(message), whole)


def decision_in_frame(frame: bytes) -> Decision:
    """Record a framed step."""
    return decision_of(memoryview(frame)[HEADER_BYTES:])
