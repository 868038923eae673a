"""What ranks send each other beside steps, whichever way it goes.

Owns: the calls that each way has. Must not know: what is sent.
"""

from typing import Protocol

from torch import Tensor


class Sending(Protocol):
    """A message on its way."""

    def is_completed(self) -> bool:
        """Whether its tensor may change."""
        ...

    def wait(self) -> object:
        """Return once it may. Raises ``RuntimeError``: the message was lost."""
        ...


class Exchange(Protocol):
    """Messages among some ranks, who know their sizes beforehand. A rank is its place among them.

    All make the same calls of ``gather``, ``add_up`` and ``most`` in the same order. All tensors contiguous, on the CPU.
    Each call raises ``RuntimeError`` if another rank is gone or does something else.
    """

    def gather(self, own: Tensor) -> list[Tensor]:
        """Return ``own`` of each rank; all have one shape."""
        ...

    def add_up(self, own: Tensor) -> Tensor:
        """Return the sum of ``own`` over the ranks, the same in each; a new tensor."""
        ...

    def most(self, own: Tensor) -> Tensor:
        """Return the largest of each element over the ranks; a new tensor."""
        ...

    def send(self, message: Tensor, other: int, tag: int) -> Sending:
        """Begin to send; ``message`` must not change before that is completed. Messages of one ``tag`` keep their order."""
        ...

    def receive(self, message: Tensor, other: int, tag: int) -> None:
        """Wait for the next message of ``other`` with this tag, and fill ``message``."""
        ...


class Meeting(Protocol):
    """All ranks of an executor, met."""

    def all_ranks(self) -> Exchange:
        """Among all of them."""
        ...

    def stage(self) -> Exchange:
        """Among those of this rank's stage, by tensor rank."""
        ...

    def close(self) -> None:
        """Part. May be called twice."""
        ...
