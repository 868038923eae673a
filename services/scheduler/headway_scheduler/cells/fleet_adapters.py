"""The adapters that requests may name: every executor is to have all of them.

Owns: which these are, and what executors are asked to load and unload. Must not know: who asks, frames, or decisions.

An executor announces the adapters that it has. Those of a new executor that is alone join the set, and what one has that
comes from an earlier life of the scheduler. What any other has beside them cannot be named. One that joins others is asked
for what it lacks, before its first step. A change goes to all executors at once, and is answered when all have answered. It
goes again to one that begins an epoch meanwhile, since to load what is loaded changes nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headway_proto.adapters import (
    ADAPTER_NAME_FORM,
    MAX_DIRECTORY_CHARACTERS,
    AdapterChange,
    AdapterChanged,
    LoadedAdapter,
    is_adapter_name,
)
from headway_proto.wording import shown
from headway_scheduler.cells.cell import Cell
from headway_scheduler.cells.notices import Notices

NOT_FOUND = "not found"

Answer: TypeAlias = Callable[[str], None]
"""Takes the error in one line, or "" once a change is complete."""


@dataclass
class _Change:
    """``asked``: the cells that have not answered. ``answer``: None if it concerns one executor that joins."""

    wanted: AdapterChange
    answer: Answer | None
    asked: set[int] = field(default_factory=set)
    loaded: list[LoadedAdapter] = field(default_factory=list)
    error: str = ""


class FleetAdapters:
    """``cells``: all, in order. ``on_change``: there are other adapters now."""

    def __init__(self, cells: Sequence[Cell], notices: Notices, on_change: Callable[[], None]) -> None:
        self._cells = cells
        self._notices = notices
        self._on_change = on_change
        self._known: dict[str, LoadedAdapter] = {}
        self._changes: dict[int, _Change] = {}
        self._num_changes = 0
        self._executors: dict[int, int] = {}
        """The incarnation of each cell's newest executor."""

    def all(self) -> tuple[LoadedAdapter, ...]:
        """By name."""
        return tuple(self._known[name] for name in sorted(self._known))

    def identity_of(self, name: str) -> str | None:
        """See ``headway_proto.adapters``; None if there is no such adapter."""
        known = self._known.get(name)
        return None if known is None else known.identity

    def why_unknown(self, name: str) -> str:
        """One line about a name without an adapter."""
        return f"{shown(name)} is not loaded; loaded: {', '.join(sorted(self._known)) or 'none'}"

    # -------------------------------------------------------------------------------------------------------- changes

    def load(self, name: str, directory: str, answer: Answer) -> None:
        """Let all executors load the adapter in ``directory``, as they see it."""
        if not is_adapter_name(name):
            answer(f"name: {shown(name)} is not allowed; allowed: {ADAPTER_NAME_FORM}")
        elif not 1 <= len(directory) <= MAX_DIRECTORY_CHARACTERS:
            answer(f"directory: {len(directory)} characters; allowed: 1 to {MAX_DIRECTORY_CHARACTERS}")
        elif name in self._known:
            answer(f"name: {shown(name)} is loaded from {shown(self._known[name].directory)}; unload it first")
        else:
            self._ask_all(name, directory, answer)

    def unload(self, name: str, num_requests: int, answer: Answer) -> None:
        """Let all executors forget an adapter. ``num_requests``: those that have not ended and use it."""
        if name not in self._known:
            answer(NOT_FOUND)
        elif num_requests:
            answer(f"name: {num_requests} requests with {shown(name)} have not ended; allowed: when none is left")
        else:
            del self._known[name]
            self._on_change()
            self._ask_all(name, "", answer)

    def _ask_all(self, name: str, directory: str, answer: Answer) -> None:
        cells = [cell for cell in self._cells if cell.is_open]
        if self._is_changing(name):
            answer(f"name: {shown(name)} is being loaded or unloaded; allowed: when that is done")
        elif not cells:
            answer("no executor is connected")
        else:
            self._ask(cells, name, directory, answer=answer)

    def _ask(
        self, cells: Sequence[Cell], name: str, directory: str, fingerprint: str = "", answer: Answer | None = None
    ) -> None:
        self._num_changes += 1
        wanted = AdapterChange(self._num_changes, name, directory, fingerprint)
        change = self._changes[wanted.number] = _Change(wanted, answer)
        for cell in cells:
            change.asked.add(cell.number)
            cell.link.send_change(wanted)

    # ------------------------------------------------------------------------------------------------------ executors

    def cell_opened(self, cell: Cell) -> None:
        """An executor began an epoch: what it had been asked for may be lost."""
        assert cell.info is not None
        others = [other for other in self._cells if other.is_open and other is not cell]
        if self._executors.get(cell.number) != cell.link.executor:
            self._executors[cell.number] = cell.link.executor
            if not others:
                self._known |= {adapter.name: adapter for adapter in cell.info.adapters}
            elif cell.link.served_another_life:
                self._learn_from(cell, others)
        for number, change in list(self._changes.items()):
            if change.answer is not None:
                change.asked.add(cell.number)
                cell.link.send_change(change.wanted)
            elif cell.number in change.asked:
                del self._changes[number]  # it is asked anew
        has = {adapter.identity for adapter in cell.info.adapters}
        self._ask_for(cell, [known for known in self.all() if known.identity not in has])

    def _learn_from(self, cell: Cell, others: Sequence[Cell]) -> None:
        """The others are to have what this executor brings from an earlier life of the scheduler."""
        assert cell.info is not None
        announced = cell.info.adapters
        new = [one for one in announced if one.name not in self._known and not self._is_changing(one.name)]
        self._known |= {adapter.name: adapter for adapter in new}
        for other in others:
            self._ask_for(other, new)

    def _ask_for(self, cell: Cell, adapters: Iterable[LoadedAdapter]) -> None:
        assert cell.info is not None
        if cell.info.supports_adapters:
            for known in adapters:
                self._ask([cell], known.name, known.directory, known.fingerprint)

    def _is_changing(self, name: str) -> bool:
        return any(change.answer is not None and change.wanted.name == name for change in self._changes.values())

    def cell_lost(self, cell: Cell) -> None:
        """An executor is gone. The next one is asked for what it lacks."""
        for number, change in list(self._changes.items()):
            if cell.number in change.asked:
                change.asked.discard(cell.number)
                self._end(number, change)

    def answered(self, cell: Cell, answer: AdapterChanged) -> None:
        """An executor has done, or could not do, what it was asked for."""
        change = self._changes.get(answer.number)
        if change is None or cell.number not in change.asked:
            return
        change.asked.discard(cell.number)
        if answer.error:
            where = f"executor {cell.number}: " if len(self._cells) > 1 else ""
            change.error = change.error or f"{where}{answer.error}"
        elif answer.adapter is not None:
            change.loaded.append(answer.adapter)
        self._end(answer.number, change)

    def _end(self, number: int, change: _Change) -> None:
        if change.asked:
            return
        del self._changes[number]
        wanted = change.wanted
        if change.answer is None:
            if change.error and self._known.pop(wanted.name, None) is not None:
                self._notices.add("adapter dropped", adapter=wanted.name, reason=change.error)
                self._on_change()
            return
        if wanted.directory and not change.error:
            change.error = self._take_in(wanted.name, change.loaded)
        if wanted.directory and change.error and change.loaded:
            self._ask([cell for cell in self._cells if cell.is_open], wanted.name, "")
        what = "adapter loaded" if wanted.directory else "adapter unloaded"
        self._notices.add("adapter not changed" if change.error else what, adapter=wanted.name, error=change.error)
        change.answer(change.error)

    def _take_in(self, name: str, loaded: list[LoadedAdapter]) -> str:
        """Let requests name it. Return what is wrong, or ""."""
        fingerprints = sorted({adapter.fingerprint for adapter in loaded})
        if not loaded:
            return "the executor was lost meanwhile"
        if len(fingerprints) > 1:
            return f"directory: executors found different files there, with fingerprints {', '.join(fingerprints)}"
        self._known[name] = loaded[0]
        self._on_change()
        return ""
