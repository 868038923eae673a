"""Log probabilities of prompts, for backends with a ``ForwardPass``.

Owns: which tokens give them. Must not know: a pass, sampling.

These tokens run **ahead of the step**, in passes of their own.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
from torch import Tensor

from headway_executor.backend import StepBatch
from headway_executor.models.forward import ForwardPass, Int64Array, StepRows
from headway_proto.columns import encode_column, encode_floats
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import NO_LOGPROBS
from headway_proto.step import RowPromptLogprobs

MOST_LOGITS_BYTES = 64 << 20
"""The most float32 logits of prompts in one pass; one token may have more."""


class WantedPrompt(msgspec.Struct, frozen=True):
    """A row whose prompt is reported."""

    num_prompt_tokens: int
    num_alternatives: int


class PromptReports:
    """The rows that report their prompts."""

    def __init__(self) -> None:
        self._wanted: dict[int, WantedPrompt] = {}

    def begin_step(self, batch: StepBatch) -> None:
        """Record new and finished rows."""
        if self._wanted:
            for row in batch.finished_rows.tolist():
                self._wanted.pop(row, None)
        for new in batch.new_rows:
            self._wanted.pop(new.row, None)
            if new.sampling.prompt_logprobs != NO_LOGPROBS:
                self._wanted[new.row] = WantedPrompt(new.num_prompt_tokens, new.sampling.prompt_logprobs)

    def chunks(self, batch: StepBatch) -> tuple["PromptChunk", ...]:
        """The chunks that give log probabilities, rows ascending."""
        if not self._wanted:
            return ()
        found = []
        for place, row in enumerate(batch.rows.tolist()):
            wanted = self._wanted.get(row)
            if wanted is None:
                continue
            start = int(batch.num_computed_tokens[place])
            end = min(start + int(batch.num_scheduled_tokens[place]), wanted.num_prompt_tokens - 1)
            if end > start:
                found.append(PromptChunk(row, place, start, end, wanted.num_alternatives))
        return tuple(found)


class PromptChunk(msgspec.Struct, frozen=True):
    """Tokens ``start`` to ``end - 1``; they give the positions up to ``end``."""

    row: int
    place: int
    start: int
    end: int
    num_alternatives: int


def run_ahead(
    forward: ForwardPass,
    rows: StepRows,
    token_ids: Tensor,
    chunks: Sequence[PromptChunk],
    *,
    vocab_size: int,
) -> tuple[StepRows, tuple[RowPromptLogprobs, ...]]:
    """Run the tokens of ``chunks``; return the rest of the step, and the reports, rows ascending."""
    parts: dict[int, list[PromptLogprobColumns]] = {}
    for piece in _pieces(chunks, vocab_size):
        logits = forward.run(_rows_of(piece, rows), token_ids).float()
        for chunk, values in zip(piece, _reports(logits, token_ids, piece), strict=True):
            parts.setdefault(chunk.row, []).append(values)
    return _without(rows, chunks), tuple(RowPromptLogprobs(row, _joined(columns)) for row, columns in parts.items())


def run_ahead_unreported(
    forward: ForwardPass, rows: StepRows, token_ids: Tensor, chunks: Sequence[PromptChunk], *, vocab_size: int
) -> StepRows:
    """The same passes, where another rank has the logits; return the rest of the step."""
    for piece in _pieces(chunks, vocab_size):
        forward.run(_rows_of(piece, rows), token_ids)
    return _without(rows, chunks)


def _pieces(chunks: Iterable[PromptChunk], vocab_size: int) -> Iterable[list[PromptChunk]]:
    most_tokens = max(1, MOST_LOGITS_BYTES // (4 * vocab_size))
    piece: list[PromptChunk] = []
    room = most_tokens
    for chunk in chunks:
        start = chunk.start
        while start < chunk.end:
            end = min(chunk.end, start + room)
            piece.append(msgspec.structs.replace(chunk, start=start, end=end))
            room -= end - start
            start = end
            if not room:
                yield piece
                piece, room = [], most_tokens
    if piece:
        yield piece


def _rows_of(piece: list[PromptChunk], rows: StepRows) -> StepRows:
    places = np.array([chunk.place for chunk in piece], dtype=np.int64)
    num_new = np.array([chunk.end - chunk.start for chunk in piece], dtype=np.int64)
    return StepRows(
        numbers=rows.numbers[places],
        num_new=num_new,
        num_computed=np.array([chunk.start for chunk in piece], dtype=np.int64),
        tables=rows.tables[places],
        wanted=np.arange(num_new.sum()),
    )


def _reports(logits: Tensor, token_ids: Tensor, piece: list[PromptChunk]) -> Iterable[PromptLogprobColumns]:
    ends = np.cumsum([chunk.end - chunk.start for chunk in piece])
    normalisers = logits.logsumexp(-1, keepdim=True)
    most = max(chunk.num_alternatives for chunk in piece)
    best = logits.topk(min(most, logits.shape[-1]), dim=-1)
    top_ids, top_values = best.indices.cpu().numpy(), (best.values - normalisers).cpu().numpy()
    for chunk, end in zip(piece, ends.tolist(), strict=True):
        own = slice(end - (chunk.end - chunk.start), end)
        targets = token_ids[chunk.row, chunk.start + 1 : chunk.end + 1].long()
        yield PromptLogprobColumns(
            chunk.start + 1,
            encode_floats((logits[own].gather(1, targets[:, None]) - normalisers[own]).squeeze(1).cpu().numpy()),
            encode_column(top_ids[own, : chunk.num_alternatives]),
            encode_floats(top_values[own, : chunk.num_alternatives]),
        )


def _without(rows: StepRows, chunks: Sequence[PromptChunk]) -> StepRows:
    num_ahead: Int64Array = np.zeros_like(rows.num_new)
    for chunk in chunks:
        num_ahead[chunk.place] = chunk.end - chunk.start
    stays = num_ahead < rows.num_new
    starts = np.cumsum(rows.num_new) - rows.num_new
    # A token moves forward by the number of removed tokens before it, in its row and in earlier rows.
    place_of = np.searchsorted(starts, rows.wanted, side="right") - 1
    return StepRows(
        numbers=rows.numbers[stays],
        num_new=(rows.num_new - num_ahead)[stays],
        num_computed=(rows.num_computed + num_ahead)[stays],
        tables=rows.tables[stays],
        wanted=rows.wanted - np.cumsum(num_ahead)[place_of],
    )


def _joined(columns: list[PromptLogprobColumns]) -> PromptLogprobColumns:
    return PromptLogprobColumns(
        columns[0].first_position,
        b"".join(part.logprobs for part in columns),
        b"".join(part.top_token_ids for part in columns),
        b"".join(part.top_logprobs for part in columns),
    )
