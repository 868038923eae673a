"""The seams of the step cycle: where its steps come from, and the ranks that do the same.

Owns: these two protocols. Must not know: who is behind them.
"""

from collections.abc import Collection
from typing import Protocol

from headway_executor.backend import StepResult
from headway_executor.block_store.puller import FetchedBlocks
from headway_executor.block_store.transfers import StepNumber
from headway_executor.links.step_link import LinkOutcome
from headway_proto.adapters import AdapterChange, AdapterChanged
from headway_proto.columns import EMPTY_COLUMN, Int32Array


class Link(Protocol):
    """Where steps come from and answers go, as ``StepLink``."""

    @property
    def num_damaged_frames(self) -> int:
        """Frames that could not be used."""
        ...

    @property
    def next_deadline(self) -> float:
        """See ``StepLink``."""
        ...

    def receive(self, data: bytes, now: float) -> LinkOutcome:
        """See ``StepLink``."""
        ...

    def tick(self, now: float) -> LinkOutcome:
        """See ``StepLink``."""
        ...

    def result(
        self,
        *,
        epoch: int,
        step: int,
        result: StepResult,
        state_digest: int | None,
        stale_rows: Int32Array = EMPTY_COLUMN,
    ) -> list[bytes]:
        """See ``StepLink``."""
        ...

    def lose_epoch(
        self, epoch: int, reason: str, now: float, *, failed_step: int = -1, max_num_batched_tokens: int = 0
    ) -> LinkOutcome:
        """See ``StepLink``."""
        ...

    def leave(self, reason: str, *, is_in_another_state: bool = False) -> list[bytes]:
        """See ``StepLink``."""
        ...

    def answer_adapter(self, change: AdapterChange, answer: AdapterChanged) -> list[bytes]:
        """See ``StepLink``."""
        ...


class Ranks(Protocol):
    """The other ranks, which do what this one does."""

    @property
    def decides(self) -> bool:
        """Whether this rank's answers count. If not, ``ProposalsAccepted`` says what was accepted."""
        ...

    @property
    def changing_adapters(self) -> Collection[str]:
        """The names of adapters that this rank has changed, and that others may not have."""
        ...

    def begin(self, number: StepNumber) -> None:
        """This rank begins a step."""
        ...

    def go_on(self, fetched: FetchedBlocks) -> None:
        """This rank goes on with the step whose blocks have come."""
        ...


class NoRanks:
    """One rank is the whole executor."""

    decides = True
    changing_adapters: Collection[str] = ()

    def begin(self, number: StepNumber) -> None:
        """See ``Ranks``."""

    def go_on(self, fetched: FetchedBlocks) -> None:
        """See ``Ranks``."""
