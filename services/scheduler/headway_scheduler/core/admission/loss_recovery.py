"""Recovery after steps were lost: one request may have to run alone, or a few may start at a time.

Owns: the request that runs alone, and the start window. Must not know: why steps were lost, or whom the caller suspects.
"""

from collections.abc import Iterable

from headway_scheduler.core.admission.start_window import StartWindow
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.request import Request


class LossRecovery:
    """Says who may start; ``is_active`` only after a loss, and everybody may start otherwise."""

    def __init__(self) -> None:
        self.alone: Request | None = None
        """While it is set, nobody else runs."""
        self.num_tokens_alone = 0
        """Once so many tokens of ``alone`` are under way, nothing more is sent before they are back."""
        self.window = StartWindow()

    @property
    def is_active(self) -> bool:
        """Whether it restricts anything."""
        return self.alone is not None or self.window.is_narrow

    def run_alone(self, request: Request | None, num_tokens: int) -> None:
        """Let nobody but this request run; None: everybody may again."""
        self.alone = request
        self.num_tokens_alone = num_tokens

    def has_done_its_trial(self, rows: RowTable) -> bool:
        """Whether all tokens that are wanted of ``alone`` are under way."""
        if self.alone is None or self.alone.row < 0:
            return False
        num_coming = int(rows.num_computed_tokens[self.alone.row]) + 1
        return rows.num_tokens_of(self.alone) < self.num_tokens_alone <= num_coming

    def start_slowly(self, requests: Iterable[Request], rows: RowTable, num_steps: int) -> None:
        """Let few of these run at once until each has ``num_steps`` more tokens."""
        self.window.narrow((request, rows.num_tokens_of(request) + num_steps) for request in requests)

    def begin_step(self, rows: RowTable) -> None:
        """Let those out of the window that have come far enough; O(those in it)."""
        for request in self.window.unproven():
            self.window.note_tokens(request, rows.num_tokens_of(request))
        self.window.begin_step()

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if request is self.alone:
            self.alone = None
        self.window.forget(request)
