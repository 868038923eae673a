"""Log probabilities of prompts on the device, from the hidden states of a step.

Owns: pieces of logits. Must not know: graphs, sampling, blocks.

The head takes a chunk in pieces, before the step samples.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.gpu.runtime import Runtime, fetched
from headway_executor.sampling.prompt_logprobs import MOST_LOGITS_BYTES, PromptChunk
from headway_proto.columns import Int32Array, encode_column, encode_floats
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import MAX_LOGPROBS
from headway_proto.step import RowPromptLogprobs


class HeadOverTokens(Protocol):
    """The decoder, as this module needs it."""

    def logits_of(self, first: int, count: int) -> Tensor:
        """See ``Decoder.logits_of``."""
        ...


class _Piece(NamedTuple):
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class PromptReader:
    """The decoder gives ``max_num_rows`` rows of logits at a time."""

    def __init__(self, runtime: Runtime, *, vocab_size: int, max_num_rows: int) -> None:
        self._runtime = runtime
        self._most_tokens = max(1, min(max_num_rows, MOST_LOGITS_BYTES // (4 * vocab_size)))

    def launch(
        self,
        head: HeadOverTokens,
        token_store: Tensor,
        chunks: Sequence[PromptChunk],
        num_scheduled_tokens: Int32Array,
    ) -> Callable[[], tuple[RowPromptLogprobs, ...]]:
        """Launch the reports; the returned function builds them afterwards."""
        starts: NDArray[np.integer] = np.cumsum(num_scheduled_tokens) - num_scheduled_tokens
        under_way = []
        for chunk in chunks:
            first = int(starts[chunk.place])
            pieces = []
            for start in range(chunk.start, chunk.end, self._most_tokens):
                end = min(start + self._most_tokens, chunk.end)
                targets = token_store[chunk.row, start + 1 : end + 1]
                logits = head.logits_of(first + start - chunk.start, end - start)
                pieces.append(self._piece(logits, targets, chunk.num_alternatives))
            under_way.append((chunk, pieces))
        return lambda: tuple(RowPromptLogprobs(chunk.row, _columns(chunk, pieces)) for chunk, pieces in under_way)

    def try_largest(self, head: HeadOverTokens, token_store: Tensor, num_tokens: int) -> None:
        """Read the largest piece, to take its memory once."""
        count = min(self._most_tokens, num_tokens, token_store.shape[1])
        self._piece(head.logits_of(0, count), token_store[0, :count], MAX_LOGPROBS)

    def _piece(self, logits: Tensor, targets: Tensor, num_alternatives: int) -> _Piece:
        wide = logits.float()
        normalisers = wide.logsumexp(-1, keepdim=True)
        own = (wide.gather(1, targets.long()[:, None]) - normalisers).squeeze(1)
        best = wide.topk(min(num_alternatives, wide.shape[1]), dim=-1)
        top = best.values - normalisers
        return _Piece(
            fetched(self._runtime, own),
            fetched(self._runtime, best.indices.to(torch.int32)),
            fetched(self._runtime, top),
        )


def _columns(chunk: PromptChunk, pieces: list[_Piece]) -> PromptLogprobColumns:
    return PromptLogprobColumns(
        chunk.start + 1,
        b"".join(encode_floats(piece.logprobs.numpy()) for piece in pieces),
        b"".join(encode_column(piece.top_ids.numpy()) for piece in pieces),
        b"".join(encode_floats(piece.top_logprobs.numpy()) for piece in pieces),
    )
