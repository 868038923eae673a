"""An index of keys on a device: which positions the tokens of a step see.

Owns: its products, what is chosen, the memory of both. Must not know: what attention does with it, graphs, files.

Nothing that runs in a step allocates, waits, or depends on a value of the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.gpu.device_step import DeviceStep
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.gpu.norm import DeviceNorm
from headway_executor.gpu.step_columns import ColumnViews
from headway_executor.models.attention_config import IndexConfig
from headway_kernels.gpu.attention.paged import AttentionRows, plan_attention
from headway_kernels.gpu.key_index import (
    IndexedStep,
    SeenTokens,
    choose_keys,
    count_seen,
    num_splits,
    score_keys,
    store_index,
    weigh_heads,
)

_MOST_SCORES = 2**24
"""At a time, float32: 64 MiB, or those of one token."""


@dataclass(frozen=True, slots=True)
class SpaceSizes:
    """Of steps of ``most_tokens``, contexts of ``max_model_len``, and hidden states of ``hidden_size``."""

    most_tokens: int
    max_model_len: int
    hidden_size: int


class IndexSpace:
    """What layers share, one after the other: what the last index has chosen, and memory for the next.

    Tokens that see all positions attend as chunks do, if they are several of a row. Any other is a row of its own of attention,
    whose table has what it sees; ``most_rows`` of these are attended with at a time.
    """

    def __init__(
        self, config: IndexConfig, sizes: SpaceSizes, most_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def space(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        most_tokens, context = sizes.most_tokens, sizes.max_model_len
        self._config = config
        self._most_rows = most_rows
        self.queries = space(most_tokens, config.num_heads, config.head_dim)
        self.keys = space(most_tokens, config.head_dim)
        self._num_splits = num_splits(sizes.hidden_size)
        self._weights = space(self._num_splits * most_tokens * config.num_heads, kind=torch.float32)
        # Whoever sees all positions that there can be needs no scores.
        at_once = max(1, min(most_tokens, _MOST_SCORES // context)) if context > config.num_chosen else 0
        self._scores = space(at_once, context, kind=torch.float32)
        self._chosen = numbers(most_tokens, config.num_chosen)
        self._seen = SeenTokens(
            numbers(most_tokens),
            numbers(most_tokens + 1),
            numbers(2 * most_rows),
            numbers(2 * most_rows),
            numbers(2 * most_rows + 1),
        )
        self._places = torch.arange(most_tokens, dtype=torch.int32, device=device)
        self._plan, self._plan_of_whole = numbers(2, most_tokens), numbers(2, 2 * most_rows)
        self._splits_per_item = numbers(1 + -(-most_tokens // most_rows))
        self.rows: Sequence[AttentionRows] = ()
        """The tokens of the step that have lists, as rows of attention."""

    def begin(
        self,
        columns: ColumnViews,
        block_tables: Tensor,
        positions: Tensor,
        num_rows: int,
        *,
        groups: int,
        tokens_per_tile: int,
    ) -> None:
        """Launch the plan of a step, for so many ``groups`` of heads and tiles of ``tokens_per_tile``."""
        self._step = IndexedStep(columns.rows[:num_rows], columns.query_start[: num_rows + 1], block_tables, positions)
        num_tokens = len(positions)
        seen = SeenTokens(
            self._seen.lengths[:num_tokens],
            self._seen.starts[: num_tokens + 1],
            self._seen.whole_rows[: 2 * num_rows],
            self._seen.whole_lengths[: 2 * num_rows],
            self._seen.whole_starts[: 2 * num_rows + 1],
        )
        count_seen(self._step, seen, self._config.num_chosen)
        self.whole = AttentionRows(
            rows=seen.whole_rows,
            query_start=seen.whole_starts,
            kv_length=seen.whole_lengths,
            block_tables=block_tables,
            split_ends=self._plan_of_whole[0, : 2 * num_rows],
            tile_ends=self._plan_of_whole[1, : 2 * num_rows],
            splits_per_item=self._splits_per_item[:1],
            tokens_per_tile=tokens_per_tile,
        )
        """Chunks of tokens that see all positions."""
        self.rows = [
            self._rows(number, first, min(first + self._most_rows, num_tokens))
            for number, first in enumerate(range(0, num_tokens, self._most_rows))
        ]
        for rows in (self.whole, *self.rows):
            plan_attention(rows, groups)

    def weights(self, num_tokens: int) -> Tensor:
        """Memory for those of heads, see ``weigh_heads``."""
        shape = (self._num_splits, num_tokens, self._config.num_heads)
        return self._weights[: self._num_splits * num_tokens * self._config.num_heads].view(shape)

    def choose(self, queries: Tensor, weights: Tensor, pool_layer: Tensor) -> None:
        """Choose what each token sees, of keys that are stored."""
        num_tokens, num_chosen = len(queries), self._config.num_chosen
        at_once = len(self._scores) or num_tokens
        for first in range(0, num_tokens, at_once):
            count = min(at_once, num_tokens - first)
            scores = self._scores[:count]
            if len(scores):
                score_keys(queries, weights, pool_layer, self._step, scores, first, num_chosen)
            choose_keys(scores, count, self._step, self._seen.lengths, self._chosen, first, pool_layer)

    def _rows(self, number: int, first: int, end: int) -> AttentionRows:
        return AttentionRows(
            rows=self._places[first:end],
            query_start=self._seen.starts[first : end + 1],
            kv_length=self._seen.lengths[first:end],
            block_tables=self._chosen,
            split_ends=self._plan[0, first:end],
            tile_ends=self._plan[1, first:end],
            splits_per_item=self._splits_per_item[number + 1 : number + 2],
            tokens_per_tile=1,
        )


@dataclass(frozen=True, slots=True)
class DeviceKeyIndex:
    """A layer's index. ``queries`` read the normed compressed row that attention's do, ``keys`` the hidden state, as ``weights`` do:
    float32, ``[heads, hidden]``. ``cosines`` and ``sines``: see ``LatentAttention``.
    """

    space: IndexSpace
    queries: DeviceLinear
    keys: DeviceLinear
    norm: DeviceNorm
    weights: Tensor
    cosines: Tensor
    sines: Tensor

    def __call__(self, hidden: Tensor, compressed: Tensor, step: DeviceStep, pool_layer: Tensor) -> None:
        """Store the tokens' keys in a layer of the pool, and choose what each sees."""
        space, num_tokens = self.space, len(hidden)
        queries, keys, weights = space.queries[:num_tokens], space.keys[:num_tokens], space.weights(num_tokens)
        self.queries(compressed, queries.flatten(1))
        self.keys(hidden, keys)
        self.norm(keys, None, keys)
        weigh_heads(hidden, self.weights, weights)
        store_index(queries, keys, step.positions, step.slots, self.cosines, self.sines, pool_layer)
        space.choose(queries, weights, pool_layer)
