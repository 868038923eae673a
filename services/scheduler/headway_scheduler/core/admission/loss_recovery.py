"""Recovery after lost steps: one request runs alone, few start at a time, and who comes from elsewhere spares the others.

Owns: the request that runs alone, and who came from a lost executor. Must not know: why steps were lost.
"""

from collections.abc import Iterable

from headway_scheduler.core.admission.start_window import StartWindow
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.request import Request, RequestStatus


class LossRecovery:
    """Restricts starts after a loss, while ``is_active``."""

    def __init__(self) -> None:
        self.alone: Request | None = None
        """While it is set, no other request runs."""
        self.num_tokens_alone = 0
        """Once ``alone`` has so many tokens in flight or returned, no step is sent until they have returned."""
        self.window = StartWindow()
        self._newcomers: dict[Origin, Request] = {}
        """Requests that ran elsewhere and are computed again here, until the last of them has been."""

    @property
    def is_active(self) -> bool:
        """Whether it restricts starts."""
        return self.alone is not None or self.window.is_narrow

    def run_alone(self, request: Request | None, num_tokens: int) -> None:
        """Run only this request; None lifts the restriction."""
        self.alone = request
        self.num_tokens_alone = num_tokens

    def has_done_its_trial(self, rows: RowTable) -> bool:
        """Whether all wanted tokens of ``alone`` are in flight."""
        if self.alone is None or self.alone.row < 0:
            return False
        num_coming = int(rows.num_computed_tokens[self.alone.row]) + 1
        return rows.num_tokens_of(self.alone) < self.num_tokens_alone <= num_coming

    def start_slowly(self, requests: Iterable[Request], rows: RowTable, num_steps: int) -> None:
        """Let few of these run at once until each has ``num_steps`` more tokens."""
        self.window.narrow((request, rows.num_tokens_of(request) + num_steps) for request in requests)

    def come(self, request: Request) -> None:
        """A request comes from another core. Without its blocks, what it had computed there is computed again."""
        if request.status is RequestStatus.PREEMPTED and not request.num_swapped_tokens:
            self._newcomers[request.new.origin] = request

    def disturbs(self, epoch: Epoch) -> bool:
        """Whether requests that came are to be computed again beside rows that were here; O(running) after a loss."""
        newcomers = self._newcomers.values()
        if not any(request.row < 0 or request.row in epoch.prefilling for request in newcomers):
            self._newcomers.clear()
            return False
        came = {request.row for request in newcomers}
        return any(row not in came for row in epoch.decoding.indices().tolist())

    def begin_step(self, rows: RowTable) -> None:
        """Release requests with progress; O(window)."""
        for request in self.window.unproven():
            self.window.record_tokens(request, rows.num_tokens_of(request))
        self.window.begin_step()

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        if request is self.alone:
            self.alone = None
        if self.window.is_narrow:
            self.window.forget(request)
        if self._newcomers:
            self._newcomers.pop(request.new.origin, None)
