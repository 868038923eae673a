"""A process of the simulated world: one life, with a mailbox and an alarm.

Owns: what it is to be dead, to be stalled, and to be woken. Must not know: what the process does.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

START_S = 100.0
"""When time begins."""

if TYPE_CHECKING:
    from simulation.fault_world import FaultWorld


class Process(ABC):
    """One life of a process. Frames wait in ``inbox`` while it is stalled."""

    def __init__(self, world: "FaultWorld", life: int) -> None:
        self.world = world
        self.life = life
        self.is_dead = False
        self.stalled_until = 0.0
        self.inbox: list[tuple[bytes, bytes]] = []
        self._armed_at = float("inf")

    @property
    def is_stalled(self) -> bool:
        return self.world.now < self.stalled_until

    def deliver(self, peer: bytes, data: bytes) -> None:
        if self.is_dead:
            return
        if self.is_stalled:
            self.inbox.append((peer, data))
        else:
            self.work([(peer, data)])

    def wake(self) -> None:
        """Let it do what is due, and what waits."""
        if not self.is_dead and not self.is_stalled:
            frames, self.inbox = self.inbox, []
            self.work(frames)

    @abstractmethod
    def work(self, frames: list[tuple[bytes, bytes]]) -> None:
        """Take in ``frames``, and do what is due."""

    def wake_at(self, at: float) -> None:
        """Wake by then at the latest."""
        at = max(at, self.world.now + 1e-6)
        if at < self._armed_at:
            self._armed_at = at
            self.world.at(at, self._on_alarm)

    def _on_alarm(self) -> None:
        if self.world.now >= self._armed_at:
            self._armed_at = float("inf")
            self.wake()
