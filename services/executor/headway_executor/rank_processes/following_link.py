"""The link of any rank but rank 0, without sockets and clocks: rank 0's steps come in, digests and signs of life go out.

Owns: hello, the order of frames, silence of rank 0. Must not know: sockets, the scheduler's protocol beyond its
frames, rows, backends.

This rank decides nothing. It takes every step that is relayed, also behind one that failed here: rank 0 has run it.
"""

from collections.abc import Collection

from headway_executor.backend import StepResult
from headway_executor.block_store.puller import FetchedBlocks
from headway_executor.block_store.transfers import StepNumber
from headway_executor.links.step_link import (
    AdapterAsked,
    EpochBegan,
    LinkOutcome,
    MustEnd,
    ProposalsAccepted,
    StepReady,
)
from headway_executor.rank_place import RankPlace
from headway_executor.rank_processes.agreed_store import AgreedStore
from headway_executor.rank_processes.leading_link import checksum_of
from headway_executor.rank_processes.messages import (
    OWN_CHANGE,
    SIGN_INTERVAL_S,
    Accepted,
    AdapterDropped,
    BlocksAgreed,
    GroupBreaks,
    GroupEnds,
    OfRank,
    RankChangedAdapter,
    RankDigest,
    RankFailed,
    RankFetched,
    RankHello,
    RankLeaves,
    RankLives,
    RankOpened,
    RankRefuses,
    Relayed,
    group_frame_reader,
    rank_frame_writer,
)
from headway_executor.rank_processes.silence import Silence
from headway_executor.rank_processes.watched_backend import WatchedBackend
from headway_proto.adapters import AdapterChange, AdapterChanged
from headway_proto.columns import EMPTY_COLUMN, Int32Array, decode_column, decode_columns, encode_column
from headway_proto.framing import FramingError
from headway_proto.step import BackendInfo, NewEpoch, SchedulerOutput, executor_frame_reader

_RANK_0 = 0


class FollowingLink:
    """See ``seams.Link`` and ``seams.Ranks``. Until ``attach``, the backend is being opened."""

    decides = False
    changing_adapters: Collection[str] = ()
    """Rank 0 begins no step before all ranks agree."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._reader = group_frame_reader()
        self._step_reader = executor_frame_reader()
        self._writer = rank_frame_writer()
        self._silence = Silence()
        self._next_sign = float("-inf")
        self._sequence: int | None = None
        self._epoch = 0
        self._next_step = 0
        self._num_steps = 0
        self._tokens = 0
        self._store: AgreedStore | None = None
        self._backend: WatchedBackend | None = None
        self.broken = ""
        """Why this rank cannot go on, in one line."""
        self.num_damaged_frames = 0
        self.has_ended = False
        """Whether rank 0 has ended in good order."""
        self.exit_code = 0
        """What rank 0 said, if it has given up."""

    @property
    def was_heard(self) -> bool:
        """Whether rank 0 has said anything."""
        return self._sequence is not None

    @property
    def next_deadline(self) -> float:
        """See ``Link``."""
        return float("-inf") if self.broken else min(self._next_sign, self._silence.next_look)

    def attach(self, store: AgreedStore, backend: WatchedBackend, info: BackendInfo) -> list[bytes]:
        """Note what runs the steps; return the frames that announce it."""
        self._store, self._backend = store, backend
        return [self._frame(RankOpened(self._place.rank, info))]

    def refuse(self, line: str, exit_code: int) -> list[bytes]:
        """The last frames of a rank that cannot begin."""
        return [self._frame(RankRefuses(self._place.rank, exit_code, line))]

    def receive(self, data: bytes, now: float) -> LinkOutcome:
        """See ``Link``."""
        del now
        outcome = LinkOutcome([], [])
        try:
            frame = self._reader.decode(data)
            if self._sequence is not None and frame.sequence != self._sequence:
                raise FramingError(f"frame {frame.sequence} where {self._sequence} was expected")
            self._sequence = frame.sequence + 1
            self._silence.heard(_RANK_0)
            match frame.body:
                case Relayed():
                    self._take(frame.body.frame, outcome)
                case BlocksAgreed():
                    assert self._store is not None
                    self._store.settle(frame.body.number, decode_column(frame.body.missing))
                case Accepted() if frame.body.epoch == self._epoch:
                    outcome.events.append(ProposalsAccepted(decode_columns(frame.body.columns, 3)))
                case AdapterDropped():
                    outcome.events.append(AdapterAsked(AdapterChange(OWN_CHANGE, frame.body.name)))
                case GroupEnds():
                    self.has_ended = True
                case GroupBreaks():
                    self.exit_code = frame.body.exit_code
                    self.broken = self.broken or frame.body.reason
        except FramingError as error:
            self.num_damaged_frames += 1
            self.broken = self.broken or f"a damaged frame of rank 0: {error}"
        return outcome

    def tick(self, now: float) -> LinkOutcome:
        """See ``Link``."""
        frames: list[bytes] = []
        if self._backend is not None and self._store is not None:
            while (failure := self._backend.take_failure()) is not None:
                frames.append(self._frame(RankFailed(self._place.rank, *failure)))
            if (report := self._store.take_report()) is not None:
                frames.append(self._frame(RankFetched(self._place.rank, report[0], encode_column(report[1]))))
        if self._silence.look(now) is not None:
            self.broken = self.broken or "rank 0 gives no sign of life"
        if now >= self._next_sign:
            self._next_sign = now + SIGN_INTERVAL_S
            frames.append(self._sign())
        return LinkOutcome(frames, [MustEnd(self.broken)] if self.broken else [])

    def result(
        self,
        *,
        epoch: int,
        step: int,
        result: StepResult,
        state_digest: int | None,
        stale_rows: Int32Array = EMPTY_COLUMN,
    ) -> list[bytes]:
        """See ``Link``: the answers are rank 0's."""
        del stale_rows
        if epoch != self._epoch:
            return []
        self._tokens = checksum_of(result, self._tokens)
        if state_digest is None:
            return []
        tokens = self._tokens if self._backend is not None and self._backend.draws else None
        return [self._frame(RankDigest(self._place.rank, epoch, step, state_digest, tokens))]

    def lose_epoch(
        self, epoch: int, reason: str, now: float, *, failed_step: int = -1, max_num_batched_tokens: int = 0
    ) -> LinkOutcome:
        """See ``Link``. Rank 0 applied an impossible step, so this rank is apart; of failed ones, ``tick`` tells."""
        del epoch, now, max_num_batched_tokens
        if failed_step < 0:
            self.broken = self.broken or reason
        return LinkOutcome([], [])

    def leave(self, reason: str, *, is_in_another_state: bool = False) -> list[bytes]:
        """See ``Link``: in what state it is, rank 0 finds by its digests."""
        del is_in_another_state
        return [self._frame(RankLeaves(self._place.rank, reason))]

    def answer_adapter(self, change: AdapterChange, answer: AdapterChanged) -> list[bytes]:
        """See ``Link``: rank 0 answers for all."""
        return [] if change.number == OWN_CHANGE else [self._frame(RankChangedAdapter(self._place.rank, answer))]

    def begin(self, number: StepNumber) -> None:
        """See ``Ranks``: rank 0 has begun it."""

    def go_on(self, fetched: FetchedBlocks) -> None:
        """See ``Ranks``: rank 0 has gone on."""

    def _take(self, data: bytes, outcome: LinkOutcome) -> None:
        self._silence.begin()
        body = self._step_reader.decode(data).body
        if isinstance(body, NewEpoch):
            self._epoch, self._next_step, self._tokens = body.epoch, 0, 0
            outcome.events.append(EpochBegan(body.epoch, body.scheduler_incarnation))
        elif isinstance(body, SchedulerOutput):
            if (body.epoch, body.step) != (self._epoch, self._next_step):
                raise FramingError(f"step {body.step} of epoch {body.epoch}, not {self._next_step} of {self._epoch}")
            self._next_step += 1
            self._num_steps += 1
            outcome.events.append(StepReady(body))
        elif isinstance(body, AdapterChange):
            outcome.events.append(AdapterAsked(body))

    def _sign(self) -> bytes:
        if self.was_heard:
            return self._frame(RankLives(self._place.rank, self._num_steps))
        place = self._place
        self._writer.begin_epoch(0)
        return self._frame(RankHello(place.rank, place.tensor_parallel, place.pipeline_parallel))

    def _frame(self, body: OfRank) -> bytes:
        return self._writer.encode(body)
