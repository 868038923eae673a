"""Rank 0's side of the step link: the scheduler sees one executor, and the other ranks see its steps.

Owns: when a frame is relayed, which answers wait for other ranks. Must not know: sockets, clocks, backends.

A step is relayed when rank 0 begins it, and never otherwise: so all ranks make the same calls in the same order. An
answer whose digest is due waits until all ranks have given theirs, and later answers wait behind it. A change of an
adapter is relayed as it comes, and answered once all ranks have answered. No step with a new row of this adapter begins
before that, so all ranks have it then, or none.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from headway_executor.backend import StepResult
from headway_executor.block_store.puller import FetchedBlocks
from headway_executor.block_store.transfers import StepNumber
from headway_executor.links.step_link import (
    AdapterAsked,
    EpochBegan,
    LinkEvent,
    LinkOutcome,
    MustEnd,
    StepLink,
    StepReady,
)
from headway_executor.rank_processes.agreed_store import AgreedStore
from headway_executor.rank_processes.followers import Followers
from headway_executor.rank_processes.messages import OWN_CHANGE
from headway_executor.rank_processes.watched_backend import WatchedBackend
from headway_proto.adapters import AdapterChange, AdapterChanged
from headway_proto.checksum import crc32
from headway_proto.columns import EMPTY_COLUMN, Int32Array, encode_column


def checksum_of(result: StepResult, tokens: int) -> int:
    """Continue a checksum of drawn tokens."""
    return crc32(encode_column(result.sampled_token_ids), tokens)


class _Answer(NamedTuple):
    epoch: int
    step: int
    result: StepResult
    state_digest: int | None
    stale_rows: Int32Array
    tokens: int


def _agreed(own: AdapterChanged, others: Mapping[int, AdapterChanged]) -> AdapterChanged:
    """The answer of a group."""
    for rank, other in others.items():
        if own.error:
            break
        if other != own:
            error = other.error or "other files than rank 0"
            return AdapterChanged(own.number, error=f"rank {rank}: {error}")
    return own


class LeadingLink:
    """See ``seams.Link`` and ``seams.Ranks``."""

    decides = True

    def __init__(self, link: StepLink, followers: Followers, store: AgreedStore, backend: WatchedBackend) -> None:
        self._link = link
        self._followers = followers
        self._store = store
        self._backend = backend
        self._frames: dict[tuple[int, int], bytes] = {}
        """Of steps that have not begun."""
        self._answers: deque[_Answer] = deque()
        self._changes: deque[tuple[AdapterChange, AdapterChanged]] = deque()
        """Of adapters, with rank 0's own answers."""
        self._tokens = 0
        self._own_report: tuple[int, Int32Array] | None = None
        self._number = 0

    @property
    def num_damaged_frames(self) -> int:
        """See ``Link``."""
        return self._link.num_damaged_frames

    @property
    def next_deadline(self) -> float:
        """See ``Link``."""
        return min(self._link.next_deadline, self._followers.next_deadline)

    def receive(self, data: bytes, now: float) -> LinkOutcome:
        """See ``Link``."""
        outcome = self._link.receive(data, now)
        for event in outcome.events:
            if isinstance(event, StepReady):
                self._frames[event.output.epoch, event.output.step] = data
            elif isinstance(event, EpochBegan):
                self._frames.clear()
                self._answers.clear()
                self._tokens = 0
                self._followers.begin_epoch()
                self._followers.relay(data)
            elif isinstance(event, AdapterAsked):
                self._followers.relay(data)
        return outcome

    def tick(self, now: float) -> LinkOutcome:
        """See ``Link``."""
        while (failure := self._backend.take_failure()) is not None:
            self._followers.note_failure(failure[0], now)
        self._followers.look(now)
        self._settle()
        answers, events = self._answer_changes()
        frames = self._release() + answers
        outcome = self._link.tick(now)
        events += outcome.events
        if self._followers.broken:
            events = [*events, MustEnd(self._followers.broken, self._followers.has_come_apart)]
        return LinkOutcome(frames + outcome.frames, events)

    def result(
        self,
        *,
        epoch: int,
        step: int,
        result: StepResult,
        state_digest: int | None,
        stale_rows: Int32Array = EMPTY_COLUMN,
    ) -> list[bytes]:
        """See ``Link``."""
        if not self._link.running or epoch != self._link.epoch:
            return []
        self._tokens = checksum_of(result, self._tokens)
        if result.accepted_tokens is not None:
            self._followers.accept(epoch, result.accepted_tokens)
        self._answers.append(_Answer(epoch, step, result, state_digest, stale_rows, self._tokens))
        return self._release()

    def lose_epoch(
        self, epoch: int, reason: str, now: float, *, failed_step: int = -1, max_num_batched_tokens: int = 0
    ) -> LinkOutcome:
        """See ``Link``. Where the backend failed, the other ranks must have failed too: ``Followers.note_failure``."""
        return self._link.lose_epoch(
            epoch, reason, now, failed_step=failed_step, max_num_batched_tokens=max_num_batched_tokens
        )

    def leave(self, reason: str, *, is_in_another_state: bool = False) -> list[bytes]:
        """See ``Link``."""
        return self._link.leave(reason, is_in_another_state=is_in_another_state)

    def answer_adapter(self, change: AdapterChange, answer: AdapterChanged) -> list[bytes]:
        """See ``Link``: the scheduler hears it once all ranks have answered."""
        if change.number != OWN_CHANGE:
            self._changes.append((change, answer))
        return []

    @property
    def changing_adapters(self) -> Collection[str]:
        """See ``Ranks``."""
        return {change.name for change, _ in self._changes}

    def begin(self, number: StepNumber) -> None:
        """See ``Ranks``."""
        self._followers.relay(self._frames.pop(number))

    def go_on(self, fetched: FetchedBlocks) -> None:
        """See ``Ranks``."""
        self._followers.agree(self._number, fetched.missing)

    def _settle(self) -> None:
        """End a fetch when all ranks have ended theirs."""
        report = self._store.take_report()
        if report is not None:
            self._own_report = report
        if self._own_report is None:
            return
        number, missing = self._own_report
        others = self._followers.fetched_by_all(number)
        if others is not None:
            self._own_report, self._number = None, number
            union = np.unique(np.concatenate([missing, *others])).astype(np.int32)
            self._store.settle(number, union)

    def _answer_changes(self) -> tuple[list[bytes], list[LinkEvent]]:
        """If one rank could not load an adapter, none keeps it."""
        frames: list[bytes] = []
        events: list[LinkEvent] = []
        while self._changes and (others := self._followers.take_changed()) is not None:
            change, own = self._changes.popleft()
            answer = _agreed(own, others)
            if answer.error and change.directory:
                self._followers.drop_adapter(change.name)
                events.append(AdapterAsked(AdapterChange(OWN_CHANGE, change.name)))
            frames += self._link.answer_adapter(change, answer)
        return frames, events

    def _release(self) -> list[bytes]:
        frames: list[bytes] = []
        while self._answers and self._is_agreed(self._answers[0]):
            answer = self._answers.popleft()
            frames += self._link.result(
                epoch=answer.epoch,
                step=answer.step,
                result=answer.result,
                state_digest=answer.state_digest,
                stale_rows=answer.stale_rows,
            )
        return frames

    def _is_agreed(self, answer: _Answer) -> bool:
        if answer.state_digest is None:
            return True
        return self._followers.agrees_on(answer.epoch, answer.step, state=answer.state_digest, tokens=answer.tokens)
