"""Attention over paged keys and values for one flat batch of chunks and decode tokens.

Owns: the order and groups of a step's tokens. Must not know: requests, sampling.

Groups depend on shape only, so other rows change a row by rounding at most. Padding decode rows within a group at most
doubles the work.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headway_executor.memory.kv_pool import KvPool
from headway_executor.models.alibi import ScoreBiases
from headway_executor.models.key_index import IndexedTokens
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.kv_vectors import KvVectors, LayerVectors
from headway_proto.columns import Int32Array

_SHORT = 64
"""Rows with fewer positions share a group whatever their lengths."""

_MASKED = float("-inf")

_Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes that attention needs; ``scale`` multiplies scores, ``softcap`` bounds them. With ``keys_are_values``, keys serve
    as values, which are not given.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    has_sinks: bool = False
    keys_are_values: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention computes it."""
        return self.softcap is None and not self.has_sinks

    @property
    def query_width(self) -> int:
        """Columns of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def first_value(self) -> int:
        """The first head of values, behind queries and keys."""
        return self.num_heads + (0 if self.keys_are_values else self.num_kv_heads)


class OrderedRows:
    """The rows in the order of the flat batch: decode rows first, by length.

    ``num_new`` and ``kv_length`` (positions after the step) are int64, ``[rows]``. ``order[i]`` is row i's place for
    the caller, ``starts[i]`` its first token.
    """

    def __init__(self, num_new: _Int64Array, num_computed: _Int64Array, tables: Int32Array) -> None:
        kv_length = num_computed + num_new
        # Decode rows by length; then chunks: those without a past first, so that equal sizes lie side by side.
        self.order = np.lexsort((np.where(num_new == 1, kv_length, num_new), num_computed > 0, num_new > 1))
        self.num_new: _Int64Array = num_new[self.order]
        self.kv_length: _Int64Array = kv_length[self.order]
        self.tables = tables[self.order]
        self.num_decodes = int((num_new == 1).sum())
        ends = np.cumsum(self.num_new)
        self.starts: _Int64Array = ends - self.num_new
        self.num_tokens = int(ends[-1])

    def token_rows(self) -> _Int64Array:
        """The row of every token, ``[tokens]``."""
        return np.repeat(np.arange(len(self.num_new)), self.num_new)

    def positions(self, token_rows: _Int64Array) -> _Int64Array:
        """The position of every token, ``[tokens]``."""
        first = self.kv_length - self.num_new
        return np.arange(self.num_tokens) + (first - self.starts)[token_rows]


class Group(Protocol):
    """Consecutive tokens that attend together."""

    def attend(self, qkv: Tensor, vectors: LayerVectors, sinks: Tensor | None, seen: Tensor | None) -> Tensor:
        """Return ``[tokens, query width]``.

        ``qkv`` ``[tokens, all heads * head_dim]``; ``vectors`` contain the new positions. ``seen``: what ``choose`` gave; None:
        nothing was chosen.
        """
        ...

    def choose(self, index: IndexedTokens, vectors: LayerVectors) -> Tensor | None:
        """Which keys are seen, of those that ``attend`` reads, by the ``index`` of the group's tokens; None: all."""
        ...


class AttentionPlan:
    """How one step attends; ``slots`` (int64, ``[tokens]``) get the keys and values of ``positions`` (the same), of a model
    in ``dtype``, with ``biases`` of scores, if any.
    """

    def __init__(
        self,
        pool: KvPool,
        rows: OrderedRows,
        slots: _Int64Array,
        positions: Tensor,
        dtype: torch.dtype,
        biases: ScoreBiases | None = None,
    ) -> None:
        self._biases = biases
        self._pool = pool
        self._dtype = dtype
        self._rows = rows
        self._slots = slots
        self._positions = positions
        self._places: dict[AttentionShape, tuple[KvVectors, Tensor]] = {}
        self._places_of_index: dict[AttentionShape, Tensor] = {}
        self._groups: dict[tuple[AttentionShape, int | None, bool], list[tuple[slice, Group]]] = {}
        self._seen: list[Tensor | None] = []

    def attend(
        self,
        shape: AttentionShape,
        place: KvPlace,
        window: int | None,
        qkv: Tensor,
        sinks: Tensor | None = None,
        growth: Tensor | None = None,
        *,
        is_reading: bool = False,
        index: IndexedTokens | None = None,
        sees_as_before: bool = False,
    ) -> Tensor:
        """Store new keys and values at ``place``, and attend; return ``[tokens, heads * head_dim]``.

        ``qkv`` ``[tokens, (heads + 2 * kv_heads) * head_dim]``, without values if keys serve as such; with ``is_reading``, queries alone, and the keys and values are
        there. A query sees ``window`` positions, its own included;
        None: all. ``sinks`` ``[heads]``: in each head's softmax a score without a value. ``growth`` ``[context]`` multiplies
        queries by their positions, in place. ``index``: what chooses the keys that are seen; ``sees_as_before``: those are
        seen that the last index chose.
        """
        if growth is not None:
            qkv[:, : shape.query_width].mul_(growth[self._positions, None])
        all_vectors, written = self._placed(shape, qkv.device)
        vectors = all_vectors.at(place)
        if not is_reading:
            vectors.store(written, qkv[:, shape.query_width :].reshape(-1, shape.head_dim))
        groups = self._groups.get((shape, window, is_reading))
        if groups is None:
            reads_all = is_reading or all_vectors.is_coded
            groups = _group(shape, all_vectors, self._rows, window, self._biases, qkv, reads_all=reads_all)
            self._groups[shape, window, is_reading] = groups
        if index is not None:
            padded = functional.pad(index.keys, (0, shape.head_dim - index.keys.shape[1]))
            vectors.store(self._index_places(shape, all_vectors, qkv.device), padded)
            self._seen = [group.choose(index.part(tokens), vectors) for tokens, group in groups]
        seen = self._seen if index is not None or sees_as_before else [None] * len(groups)
        if len(groups) == 1:
            return groups[0][1].attend(qkv, vectors, sinks, seen[0])
        return torch.cat(
            [
                group.attend(qkv[tokens], vectors, sinks, chosen)
                for (tokens, group), chosen in zip(groups, seen, strict=True)
            ]
        )

    def _index_places(self, shape: AttentionShape, vectors: KvVectors, device: torch.device) -> Tensor:
        """Where the index's keys of new tokens go: int64, ``[tokens]``."""
        found = self._places_of_index.get(shape)
        if found is None:
            found = torch.from_numpy(vectors.index_keys(self._slots)).to(device)
            self._places_of_index[shape] = found
        return found

    def _placed(self, shape: AttentionShape, device: torch.device) -> tuple[KvVectors, Tensor]:
        """The vectors of layers of this shape, and where new ones go."""
        found = self._places.get(shape)
        if found is None:
            vectors = KvVectors(
                self._pool,
                shape.num_kv_heads,
                shape.head_dim,
                self._dtype,
                keys_are_values=shape.keys_are_values,
            )
            places = vectors.of(self._slots)
            written = torch.from_numpy(places.reshape(-1, len(self._slots)).T.reshape(-1))
            found = self._places[shape] = vectors, written.to(device)
        return found


def _group(
    shape: AttentionShape,
    vectors: KvVectors,
    rows: OrderedRows,
    window: int | None,
    biases: ScoreBiases | None,
    like: Tensor,
    *,
    reads_all: bool,
) -> list[tuple[slice, Group]]:
    """With ``reads_all``, new keys and values are read like old ones."""
    groups: list[tuple[slice, Group]] = []
    seen_from = np.zeros_like(rows.kv_length) if window is None else np.maximum(0, rows.kv_length - window)
    for low, high in _similar(rows.kv_length[: rows.num_decodes] - seen_from[: rows.num_decodes]):
        part = slice(low, high)
        visible = _visible_slots(rows.tables[part], seen_from[part], rows.kv_length[part], vectors.block_size)
        groups.append((part, _PaddedDecode(shape, vectors, visible, seen_from[part], biases, like)))
    low = rows.num_decodes
    while low < len(rows.num_new):
        high = low + 1
        new, past = int(rows.num_new[low]), int(rows.kv_length[low] - rows.num_new[low])
        if past == 0 and not reads_all:
            while high < len(rows.num_new) and rows.num_new[high] == new == rows.kv_length[high]:
                high += 1
            group: Group = _NewChunks(shape, high - low, new, window, biases, like)
        else:
            first = 0 if window is None else max(0, past + 1 - window)
            ends = rows.kv_length[low:high]
            (keys,) = _visible_slots(rows.tables[low:high], np.array([first]), ends, vectors.block_size)
            group = _ContinuedChunk(shape, vectors, keys, first, new, window, biases, like)
        start = int(rows.starts[low])
        groups.append((slice(start, start + new * (high - low)), group))
        low = high
    return groups


def _similar(lengths: _Int64Array) -> list[tuple[int, int]]:
    """In a run, the longest is short or at most twice the shortest."""
    runs: list[tuple[int, int]] = []
    low = 0
    while low < len(lengths):
        high = int(np.searchsorted(lengths, max(_SHORT, 2 * lengths[low]), side="right"))
        runs.append((low, high))
        low = high
    return runs


def _visible_slots(tables: Int32Array, first: _Int64Array, end: _Int64Array, block_size: int) -> list[_Int64Array]:
    found = []
    for i in range(len(end)):
        positions = np.arange(first[i], end[i])
        found.append(tables[i][positions // block_size].astype(np.int64) * block_size + positions % block_size)
    return found


class _PaddedDecode:
    """Row i sees the ``visible[i]``, positions from ``seen_from[i]`` on up to its own."""

    def __init__(
        self,
        shape: AttentionShape,
        vectors: KvVectors,
        visible: Sequence[_Int64Array],
        seen_from: _Int64Array,
        biases: ScoreBiases | None,
        like: Tensor,
    ) -> None:
        self._shape = shape
        width = max(len(slots) for slots in visible)
        padded = np.zeros((len(visible), width), dtype=np.int64)
        seen = np.zeros((len(visible), 1, 1, width), dtype=np.bool_)
        for i, slots in enumerate(visible):
            padded[i, : len(slots)] = slots
            seen[i, 0, 0, : len(slots)] = True
        self._gather = _Gather(shape, vectors, padded, like)
        self._seen = self._mask = torch.from_numpy(seen).to(like.device)
        if biases is not None:
            keys = torch.from_numpy(seen_from[:, None] + np.arange(width)).to(like.device)
            queries = torch.from_numpy(seen_from + [len(slots) - 1 for slots in visible]).to(like.device)
            # Padding has the last key's bias, and is hidden.
            added = biases.of(queries[:, None], keys.minimum(queries[:, None])).transpose(0, 1).to(like.dtype)
            self._mask = added.masked_fill(~self._seen, _MASKED)

    def choose(self, index: IndexedTokens, vectors: LayerVectors) -> Tensor | None:
        if self._gather.width <= index.num_chosen:
            return None
        return index.chosen(self._gather.index_keys(vectors, index), self._seen[:, 0])

    def attend(self, qkv: Tensor, vectors: LayerVectors, sinks: Tensor | None, seen: Tensor | None) -> Tensor:
        shape = self._shape
        keys, values = self._gather.of(vectors)
        # Padding reads slot 0, which may hold NaN: a weight of zero would not hide it.
        values = values.masked_fill(~self._seen.transpose(2, 3), 0.0)
        queries = qkv[:, : shape.query_width].view(-1, shape.num_heads, 1, shape.head_dim)
        attended = _attend(shape, queries, keys, values, self._mask if seen is None else seen, sinks)
        return attended.reshape(-1, shape.query_width)


class _Gather:
    """``slots`` is ``[rows, width]``."""

    def __init__(self, shape: AttentionShape, vectors: KvVectors, slots: _Int64Array, like: Tensor) -> None:
        both = vectors.of(slots).transpose(0, 2, 1, 3)
        self._shape = (*both.shape, shape.head_dim)
        self._index = torch.from_numpy(both.reshape(-1)).to(like.device)
        self._index_keys: Tensor | None = None
        self._vectors, self._slots = vectors, slots

    def of(self, vectors: LayerVectors) -> tuple[Tensor, Tensor]:
        """Both ``[rows, kv_heads, width, head_dim]``."""
        both = vectors.read(self._index).view(self._shape)
        return both[0], both[-1]

    @property
    def width(self) -> int:
        """Of the longest row."""
        return int(self._slots.shape[1])

    def index_keys(self, vectors: LayerVectors, index: IndexedTokens) -> Tensor:
        """Those of the index, ``[rows, width, its head_dim]``."""
        if self._index_keys is None:
            self._index_keys = torch.from_numpy(self._vectors.index_keys(self._slots).reshape(-1)).to(
                self._index.device
            )
        return vectors.read(self._index_keys).view(*self._slots.shape, -1)[..., : index.keys.shape[1]]


class _NewChunks:
    def __init__(
        self,
        shape: AttentionShape,
        num_rows: int,
        num_new: int,
        window: int | None,
        biases: ScoreBiases | None,
        like: Tensor,
    ) -> None:
        self._shape = shape
        self._size = (num_rows, num_new)
        needs_mask = (window is not None and window < num_new) or not shape.is_plain or biases is not None
        self._mask = _mask(range(num_new), num_new, window, biases, like) if needs_mask else None

    def choose(self, index: IndexedTokens, vectors: LayerVectors) -> Tensor | None:
        del vectors  # All keys are new.
        num_rows, num_new = self._size
        if num_new <= index.num_chosen:
            return None
        visible = torch.ones(num_new, num_new, dtype=torch.bool, device=index.keys.device).tril_()
        return index.chosen(index.keys.view(num_rows, num_new, -1), visible[None])

    def attend(self, qkv: Tensor, vectors: LayerVectors, sinks: Tensor | None, seen: Tensor | None) -> Tensor:
        del vectors
        shape = self._shape
        heads = qkv.view(*self._size, -1, shape.head_dim).transpose(1, 2)
        attended = _attend(
            shape,
            heads[:, : shape.num_heads],
            heads[:, shape.num_heads : shape.num_heads + shape.num_kv_heads],
            heads[:, shape.first_value :],
            self._mask if seen is None else seen,
            sinks,
        )
        return attended.transpose(1, 2).reshape(-1, shape.query_width)


class _ContinuedChunk:
    """``slots`` are those of the past, from position ``first`` on, and of the chunk."""

    def __init__(
        self,
        shape: AttentionShape,
        vectors: KvVectors,
        slots: _Int64Array,
        first: int,
        num_new: int,
        window: int | None,
        biases: ScoreBiases | None,
        like: Tensor,
    ) -> None:
        self._shape = shape
        self._gather = _Gather(shape, vectors, slots[None], like)
        self._mask = _mask(range(first, first + len(slots)), num_new, window, biases, like)

    def choose(self, index: IndexedTokens, vectors: LayerVectors) -> Tensor | None:
        if self._gather.width <= index.num_chosen:
            return None
        return index.chosen(self._gather.index_keys(vectors, index), (self._mask == 0)[None])

    def attend(self, qkv: Tensor, vectors: LayerVectors, sinks: Tensor | None, seen: Tensor | None) -> Tensor:
        shape = self._shape
        keys, values = self._gather.of(vectors)
        queries = qkv[:, : shape.query_width].view(1, -1, shape.num_heads, shape.head_dim).transpose(1, 2)
        attended = _attend(shape, queries, keys, values, self._mask if seen is None else seen, sinks)
        return attended.transpose(1, 2).reshape(-1, shape.query_width)


def _attend(
    shape: AttentionShape, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention of ``[rows, heads, tokens, head_dim]``. ``mask``: of booleans, or additive, or None for a causal one."""
    if shape.is_plain:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=shape.scale, enable_gqa=True
        )
    assert mask is not None
    group = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(group, 1).transpose(2, 3) * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(~mask, _MASKED) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return weights[..., : keys.shape[2]] @ values.repeat_interleave(group, 1)


def _mask(seen: range, num_new: int, window: int | None, biases: ScoreBiases | None, like: Tensor) -> Tensor:
    """The additive mask of positions ``seen``, by the last ``num_new`` of them: ``[num_new, seen]``, or of each head."""
    keys = torch.arange(seen.start, seen.stop, device=like.device)
    queries = keys[-num_new:, None]
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    added = like.new_zeros(visible.shape) if biases is None else biases.of(queries[:, 0], keys).to(like.dtype)
    return added.masked_fill_(~visible, _MASKED)
