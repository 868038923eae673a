"""Checks an answer before anything of it counts.

Owns: which answers are impossible. Must not know: what happens to the tokens.
"""

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import Int32Array, decode_column
from headway_proto.step import ExecutorOutput, PooledOutput, RowPromptLogprobs, RowVector
from headway_proto.wording import shown
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.step_plan import InFlightStep
from headway_scheduler.core.state.stop_tokens import StopTokens
from headway_scheduler.core.step.accepted_tokens import AcceptedTokens, split_tokens


class StateMismatch(Exception):  # noqa: N818 - named for what was found
    """An answer that cannot follow from the steps sent; only a new epoch helps."""


_UNSIGNED, _PLACE = np.dtype(np.uint32), np.dtype(np.intp)

Answer: TypeAlias = tuple[InFlightStep, Int32Array, NDArray[np.bool_], list[AcceptedTokens]]
"""The step, a token per sampling row, whether a running request stops at it, and accepted proposals."""


class AnswerChecks:
    """Takes the oldest step out of those in flight."""

    def __init__(self, epoch: Epoch, stop_tokens: StopTokens) -> None:
        self._in_flight = epoch.in_flight
        self._max_rows = epoch.rows.max_rows
        self._ends_some = stop_tokens.ends_some

    def take(self, output: ExecutorOutput) -> Answer:
        """The checked answer.

        Raises:
            StateMismatch: it does not fit; the step stays in flight.
        """
        if not self._in_flight or output.step != self._in_flight[0].step:
            raise StateMismatch(f"an answer to step {output.step}, which is not the oldest in flight")
        step = self._in_flight[0]
        self._require_rows(step, output)
        accepted: list[AcceptedTokens] = []
        if step.speculating:
            try:
                token_ids, accepted = split_tokens(output, step.sampling_rows, step.speculating)
            except ValueError as problem:
                raise StateMismatch(f"step {step.step}: {problem}") from None
        else:
            token_ids = decode_column(output.sampled_token_ids)
        if len(token_ids) != len(step.sampling_rows):
            raise StateMismatch(f"{len(token_ids)} sampled tokens in step {step.step}, not {len(step.sampling_rows)}")
        if step.digest is not None and output.state_digest != step.digest:
            raise StateMismatch(f"state digest {output.state_digest} in step {step.step}, not {step.digest}")
        stale = self._stale_rows(step, output)
        if output.errors or stale:
            token_ids = _without_tokens_of((*stale, *(error.row for error in output.errors)), step, token_ids)
        try:
            stops_some = self._ends_some[_as_places(token_ids)]
            for entry in accepted:
                self._ends_some[_as_places(np.asarray(entry.token_ids, dtype=np.int32))]
        except IndexError:
            raise StateMismatch(f"a sampled token in step {step.step} is outside the vocabulary") from None
        self._in_flight.popleft()
        return step, token_ids, stops_some, accepted

    def _stale_rows(self, step: InFlightStep, output: ExecutorOutput) -> list[int]:
        if not output.stale_rows:
            return []
        stale: list[int] = decode_column(output.stale_rows).tolist()
        pulling = set() if step.transfers is None else {fetched.row for fetched in step.transfers.fetched}
        if not pulling.issuperset(stale):
            raise StateMismatch(f"stale rows {shown(stale)} in step {step.step}, not all of which pulled blocks")
        return stale

    def _require_rows(self, step: InFlightStep, output: ExecutorOutput) -> None:
        """A wrong row number would hit another request or end this process."""
        for error in output.errors:
            if not 0 <= error.row < self._max_rows:
                raise StateMismatch(f"an error of row {error.row}, which does not exist, in step {step.step}")
        for values in output.logprobs:
            if not 0 <= values.row < self._max_rows or not step.samples(values.row):
                raise StateMismatch(f"log probabilities of row {values.row} in step {step.step}, which sampled nothing")
        if output.prompt_logprobs:
            _require_prompts(step, output.prompt_logprobs)
        if isinstance(output, PooledOutput):
            _require_vectors(step, output.vectors)


def _without_tokens_of(rows: Iterable[int], step: InFlightStep, token_ids: Int32Array) -> Int32Array:
    """What these rows got is dropped later; until then it is valid."""
    token_ids = token_ids.copy()
    for row in rows:
        place = step.place_of(row)
        if place >= 0:
            token_ids[place] = 0
    return token_ids


def _as_places(token_ids: Int32Array) -> NDArray[np.intp]:
    """As unsigned, a negative id is outside the vocabulary too."""
    return token_ids.view(_UNSIGNED).astype(_PLACE)


def _require_prompts(step: InFlightStep, reported: Iterable[RowPromptLogprobs]) -> None:
    """Reports must cover exactly the prompt tokens computed."""
    chunks = {chunk.row: chunk for chunk in step.chunks}
    for row, values in ((entry.row, entry.values) for entry in reported):
        chunk = chunks.pop(row, None)
        if chunk is None:
            raise StateMismatch(f"log probabilities of row {row}'s prompt in step {step.step}, which ran none of it")
        problem = values.problem()
        computed = chunk.start + 1, chunk.end_of_prompt_logprobs
        if problem is None and (values.first_position, values.end) != computed:
            problem = f"positions {values.first_position} to {values.end - 1} follow from no tokens of it"
        if problem is not None:
            raise StateMismatch(f"log probabilities of row {row}'s prompt in step {step.step}: {problem}")


def _require_vectors(step: InFlightStep, vectors: Iterable[RowVector]) -> None:
    """Each is of a row that is pooled and whose prompt ended in this step."""
    pooled = {chunk.row for chunk in step.chunks if chunk.completes and chunk.request.new.pooling}
    for entry in vectors:
        if entry.row not in pooled:
            raise StateMismatch(f"a vector of row {entry.row} in step {step.step}, which ended no prompt to pool")
        pooled.remove(entry.row)
