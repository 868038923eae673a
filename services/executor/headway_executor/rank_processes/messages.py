"""What the ranks of a group say to each other.

Owns: the messages and their encoding. Must not know: sockets, when anything is said.

Rank 0 speaks to all others at once, so its frames have one numbering. Each of the others numbers its own. A gap in a
numbering ends the group.
"""

from typing import TypeAlias

import msgspec

from headway_proto.adapters import AdapterChanged
from headway_proto.framing import FrameReader, FrameWriter
from headway_proto.step import BackendInfo

SIGN_INTERVAL_S = 0.25
"""A rank that has nothing to say gives a sign of life so often."""


OWN_CHANGE = 0
"""The number of a change of an adapter that the group makes by itself; the scheduler counts from 1."""


class RankHello(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of a rank, again until rank 0 is heard. Both sides must have the same degrees."""

    rank: int
    tensor_parallel: int
    pipeline_parallel: int


class RankOpened(msgspec.Struct, frozen=True, array_like=True):
    """The backend is open; ``info`` with this rank's own host pool."""

    rank: int
    info: BackendInfo


class RankRefuses(msgspec.Struct, frozen=True, array_like=True):
    """A setting or the model cannot be used: the line for the user, and the exit code."""

    rank: int
    exit_code: int
    line: str


class RankLives(msgspec.Struct, frozen=True, array_like=True):
    """A sign of life; steps begun so far."""

    rank: int
    num_steps: int


class RankFetched(msgspec.Struct, frozen=True, array_like=True):
    """The pulls of the group's ``number``-th step with pulls have ended here; ``missing`` device blocks, a column."""

    rank: int
    number: int
    missing: bytes


class RankDigest(msgspec.Struct, frozen=True, array_like=True):
    """State after a step, and a checksum of all tokens drawn in the epoch up to its end; None: this rank draws none."""

    rank: int
    epoch: int
    step: int
    state: int
    tokens: int | None


class RankFailed(msgspec.Struct, frozen=True, array_like=True):
    """The backend's ``number``-th step failed, which is no harm if it failed on all ranks."""

    rank: int
    number: int
    error: str


class RankChangedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a relayed change of an adapter; a rank answers in the order of the changes."""

    rank: int
    answer: AdapterChanged


class RankLeaves(msgspec.Struct, frozen=True, array_like=True):
    """This process ends."""

    rank: int
    reason: str


class Relayed(msgspec.Struct, frozen=True, array_like=True):
    """A frame of the step link, as the scheduler sent it, which takes effect now."""

    frame: bytes


class BlocksAgreed(msgspec.Struct, frozen=True, array_like=True):
    """The ``number``-th step with pulls goes on; ``missing``: device blocks that any rank lacks, a column."""

    number: int
    missing: bytes


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """The proposals that rank 0 accepted in a step: columns as of ``StepResult.accepted_tokens``."""

    epoch: int
    columns: bytes


class AdapterDropped(msgspec.Struct, frozen=True, array_like=True):
    """Some rank could not load the adapter, so none keeps it. Nobody waits for an answer."""

    name: str


class GroupLives(msgspec.Struct, frozen=True, array_like=True):
    """A sign of life of rank 0."""


class GroupEnds(msgspec.Struct, frozen=True, array_like=True):
    """An orderly end."""


class GroupBreaks(msgspec.Struct, frozen=True, array_like=True):
    """All ranks end, with this exit code and for this reason."""

    reason: str
    exit_code: int


OfRank: TypeAlias = (
    RankHello
    | RankOpened
    | RankRefuses
    | RankLives
    | RankFetched
    | RankDigest
    | RankFailed
    | RankLeaves
    | RankChangedAdapter
)
OfGroup: TypeAlias = Relayed | BlocksAgreed | Accepted | AdapterDropped | GroupLives | GroupEnds | GroupBreaks

_OF_RANK: dict[type[msgspec.Struct], int] = {
    RankHello: 64,
    RankOpened: 65,
    RankRefuses: 66,
    RankLives: 67,
    RankFetched: 68,
    RankDigest: 69,
    RankFailed: 70,
    RankLeaves: 71,
    RankChangedAdapter: 72,
}
_OF_GROUP: dict[type[msgspec.Struct], int] = {
    Relayed: 80,
    BlocksAgreed: 81,
    GroupLives: 82,
    GroupEnds: 83,
    GroupBreaks: 84,
    Accepted: 85,
    AdapterDropped: 86,
}


def rank_frame_writer() -> FrameWriter:
    """For ranks but rank 0."""
    return FrameWriter(_OF_RANK)


def rank_frame_reader() -> FrameReader:
    """For rank 0."""
    return FrameReader({kind: body for body, kind in _OF_RANK.items()})


def group_frame_writer() -> FrameWriter:
    """For rank 0."""
    return FrameWriter(_OF_GROUP)


def group_frame_reader() -> FrameReader:
    """For the other ranks."""
    return FrameReader({kind: body for body, kind in _OF_GROUP.items()})
