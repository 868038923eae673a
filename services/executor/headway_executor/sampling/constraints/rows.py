"""The constrained rows of a backend: their matchers, and the masks that the sampler applies.

Owns: compiling constraints, masks, failing single rows. Must not know: logits, requests.

Threads work during the forward pass; the sampler waits for the rest.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from headway_executor.sampling.constraints.lanes import Lane, Task
from headway_proto.columns import Int32Array
from headway_proto.grammars import ConstraintError, Grammar, GrammarCompiler, Mask, Matcher, TokenizerUnusableError
from headway_proto.sampling import Constraint

PATIENCE_S = 2.0
"""Processor time for one grammar or mask, both bounded by counts far below this, before the row fails."""

_MOST_GRAMMARS = 256
_MOST_CHARACTERS = 1 << 24
"""Of the texts of all grammars: a compiled one takes some forty bytes for each."""

_MOST_ABANDONED = 8
_TOKENIZER_FILE = "tokenizer.json"
_TOO_SLOW = "its constraint took too long"
_UNSUPPORTED = "this executor cannot follow a constraint"
_WORN_OUT = "too many constraints would not end; this executor follows no more of them"


class _Row:
    def __init__(self, words: Mask) -> None:
        self.words = words
        self.only = -1
        self.matcher: Matcher | None = None
        self.failure = ""
        self.lane: Lane | None = None
        self.task: Task | None = None
        self.place = 0

    def await_task(self, lane: Lane, task: Task, place: int) -> None:
        self.lane, self.task, self.place = lane, task, place

    def attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except ConstraintError as error:
            self.fail(str(error))
        except BaseException as error:  # noqa: BLE001 (a panic of the library is no Exception; this thread has more rows)
            self.fail(f"its constraint failed: {type(error).__name__}")

    def fail(self, reason: str) -> None:
        self.failure, self.matcher = self.failure or reason, None

    def begin(self, grammar: Callable[[], Grammar], output: Sequence[int]) -> None:
        matcher = grammar().matcher()
        if output:
            matcher.accept(output)
        self.matcher = matcher
        self._fill()

    def advance(self, token_id: int) -> None:
        if self.matcher is not None:
            self.matcher.accept((token_id,))
            self._fill()

    def _fill(self) -> None:
        assert self.matcher is not None
        self.only = self.matcher.fill_mask(self.words)


class StepMasks:
    """The masks of a step's constrained rows.

    ``places`` int64, ``[c]``, ascending: their places among the sampling rows. ``words`` int32, ``[c, words]``: see
    ``Matcher.fill_mask``. ``only`` int64, ``[c]``: the single allowed token, else -1. ``failures``: reasons of rows
    that cannot go on.
    """

    def __init__(
        self,
        lane: Lane | None = None,
        rows: Sequence[_Row] = (),
        places: Sequence[int] = (),
        failures: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._lane = lane
        self._rows = rows
        self.places = np.array(places, dtype=np.int64)
        self.words = np.stack([row.words for row in rows]) if rows else _NO_WORDS
        self.only = np.array([row.only for row in rows], dtype=np.int64)
        self.failures = failures

    def __len__(self) -> int:
        return len(self._rows)

    def advance(self, token_ids: Int32Array) -> None:
        """Record a token per sampling row, below 0 if none was drawn."""
        if self._lane is None or not self._rows:
            return
        drawn = zip(self._rows, token_ids[self.places].tolist(), strict=True)
        moved = [(row, token_id) for row, token_id in drawn if token_id >= 0]
        task = Task([partial(row.attempt, partial(row.advance, token_id)) for row, token_id in moved])
        for place, (row, _) in enumerate(moved):
            row.await_task(self._lane, task, place)
        self._lane.put(task)


_NO_WORDS = np.zeros((0, 0), dtype=np.int32)
_NO_MASKS = StepMasks()


class ConstrainedRows:
    """Without a ``compiler``, every constraint fails."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._compiler = compiler
        self._rows: dict[int, _Row] = {}
        self._grammars: OrderedDict[Constraint, Grammar | str] = OrderedDict()
        self._num_characters = 0
        self._compiling: Lane | None = None
        self._matching: Lane | None = None

    @property
    def is_supported(self) -> bool:
        """Whether a row may have a constraint."""
        return self._compiler is not None

    def add(self, row: int, constraint: Constraint | None, output: Int32Array) -> None:
        """Add a row with its ``output`` so far (int32)."""
        self._rows.pop(row, None)
        if constraint is None:
            return
        constrained = self._rows[row] = _Row(_NO_WORDS if self._compiler is None else self._compiler.new_mask())
        if self._compiler is None:
            constrained.fail(_UNSUPPORTED)
            return
        if self._compiling is None or self._matching is None:
            self._compiling, self._matching = Lane("compile-grammars"), Lane("fill-masks")
        if self._compiling.num_abandoned + self._matching.num_abandoned > _MOST_ABANDONED:
            constrained.fail(_WORN_OUT)
            return
        grammar = partial(self._grammar, self._compiler, constraint)
        begin = partial(constrained.begin, grammar, tuple(output.tolist()))
        task = Task([partial(constrained.attempt, begin)])
        constrained.await_task(self._compiling, task, 0)
        self._compiling.put(task)

    def forget(self, rows: Int32Array) -> None:
        """Forget finished ``rows``."""
        if self._rows:
            for row in rows.tolist():
                self._rows.pop(row, None)

    def are_any(self) -> bool:
        """Whether some row has a constraint."""
        return bool(self._rows)

    def masks(self, rows: Int32Array) -> StepMasks:
        """Return the masks of sampling rows, once they are ready."""
        if not self._rows:
            return _NO_MASKS
        live, places, failures = [], [], {}
        for place, number in enumerate(rows.tolist()):
            row = self._rows.get(number)
            if row is None:
                continue
            self._wait_for(row)
            if row.failure:
                failures[number] = row.failure
            else:
                live.append(row)
                places.append(place)
        return StepMasks(self._matching, live, places, failures)

    def close(self) -> None:
        """End the threads."""
        for lane in (self._compiling, self._matching):
            if lane is not None:
                lane.close()
        self._compiling = self._matching = None
        self._rows.clear()

    def _wait_for(self, row: _Row) -> None:
        while row.lane is not None and row.task is not None and not row.task.is_over and not row.failure:
            if row.lane.wait(row.task, PATIENCE_S):
                row.task = None
            else:
                self._leave_behind(row.lane)

    def _leave_behind(self, lane: Lane) -> None:
        stuck = lane.current
        if stuck is None:
            return
        num_over = stuck.num_made + 1
        rest = Task(stuck.steps[num_over:])
        for row in self._rows.values():
            if row.task is stuck and row.place == stuck.num_made:
                row.fail(_TOO_SLOW)
            elif row.task is stuck and row.place > stuck.num_made:
                row.await_task(lane, rest, row.place - num_over)
            elif row.task is stuck:
                row.task = None
        lane.abandon(rest if rest.steps else None)

    def _grammar(self, compiler: GrammarCompiler, constraint: Constraint) -> Grammar:
        known = self._grammars.pop(constraint, None)
        if known is not None:
            self._num_characters -= len(constraint.text)
        else:
            try:
                known = compiler.compile(constraint)
            except ConstraintError as error:
                known = str(error)
        self._grammars[constraint] = known
        self._num_characters += len(constraint.text)
        while len(self._grammars) > _MOST_GRAMMARS or self._num_characters > _MOST_CHARACTERS:
            oldest, _ = self._grammars.popitem(last=False)
            self._num_characters -= len(oldest.text)
        if isinstance(known, str):
            raise ConstraintError(known)
        return known


def compiler_for(directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler | None:
    """Return the directory's compiler, or None if its tokenizer cannot be matched."""
    try:
        text = (directory / _TOKENIZER_FILE).read_text(encoding="utf-8")
        return GrammarCompiler(text, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    except (OSError, UnicodeDecodeError, TokenizerUnusableError):
        return None
