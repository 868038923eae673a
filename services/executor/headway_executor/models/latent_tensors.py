"""The tensors of multi-head latent attention in the model's form.

Owns: their names, the order and padding of channels, one rank's heads. Must not know: files, the rest of a layer.

Keys and values come from one compressed row of a token (DeepSeek-AI 2024, arXiv 2405.04434). In a head of keys, the channels
that are rotated come first here. Every rank has a whole index of keys.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.models.attention_config import IndexConfig, LatentConfig
from headway_executor.models.part import ModelPart

LATENT_EPS = 1e-6
"""Of the norms of compressed rows, whatever the other norms have."""

QUERY, _QUERY_NORM, QUERY_IN = "q_b_proj", "q_a_layernorm", "q_a_proj"
WHOLE_QUERY = "q_proj"
KEY_VALUE, _KEY_VALUE_NORM = "kv_b_proj", "kv_a_layernorm"
KEY_VALUE_IN = "kv_a_proj_with_mqa"
_INDEX_QUERY, _INDEX_KEY, _INDEX_NORM = "indexer.wq_b", "indexer.wk", "indexer.k_norm"
_INDEX_WEIGHTS = "indexer.weights_proj"
"""Names behind ``LatentConfig.prefix``."""


def latent_shapes(
    config: LatentConfig, heads: int, hidden: int, *, has_index: bool = True
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names behind a layer's prefix, and shapes; without ``has_index``, the layer has none of its own."""
    yield from ((config.prefix + name, shape) for name, shape in _shapes(config, heads, hidden))
    if config.index is not None and has_index:
        yield from ((config.prefix + name, shape) for name, shape in _index_shapes(config, config.index, hidden))


def _index_shapes(config: LatentConfig, index: IndexConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    assert config.query_rank is not None  # Its reader has seen to it.
    yield f"{_INDEX_QUERY}.weight", (index.num_heads * index.head_dim, config.query_rank)
    yield f"{_INDEX_KEY}.weight", (index.head_dim, hidden)
    yield f"{_INDEX_NORM}.weight", (index.head_dim,)
    yield f"{_INDEX_NORM}.bias", (index.head_dim,)
    yield f"{_INDEX_WEIGHTS}.weight", (index.num_heads, hidden)


def _shapes(config: LatentConfig, heads: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.query_rank is None:
        yield f"{WHOLE_QUERY}.weight", (heads * config.key_dim, hidden)
    else:
        yield f"{QUERY_IN}.weight", (config.query_rank, hidden)
        yield f"{_QUERY_NORM}.weight", (config.query_rank,)
        yield f"{QUERY}.weight", (heads * config.key_dim, config.query_rank)
    yield f"{KEY_VALUE_IN}.weight", (config.rank + config.rotary_dim, hidden)
    yield f"{_KEY_VALUE_NORM}.weight", (config.rank,)
    yield f"{KEY_VALUE}.weight", (heads * (config.plain_dim + config.value_dim), config.rank)
    yield f"{config.output}.weight", (hidden, heads * config.value_dim)
    if config.gates is not None:
        yield f"{config.gates}.weight", (heads, hidden)


class Expansion(NamedTuple):
    """A norm of a compressed row (``[rank]``) and the product behind it (``[outputs, rank]``)."""

    norm: Tensor
    weight: Tensor


class IndexTensors(NamedTuple):
    """Of an index: ``queries`` ``[heads * head_dim, query_rank]``, ``keys`` ``[head_dim, hidden]`` and the layer norm behind them,
    ``weights`` ``[heads, hidden]``.
    """

    queries: Tensor
    keys: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    weights: Tensor


class LatentTensors:
    """Those of one layer; ``read`` takes a name behind the layer's prefix, and rows and columns or None.

    ``channel_order`` (int64, ``[key_dim]``) orders the channels of a head, rotated ones first; ``index_order`` those of an
    index's head. Of a ``part``, ``heads`` and ``own_hidden`` count what it has (see ``ModelTensors``); compressed rows are whole.
    """

    def __init__(
        self,
        config: LatentConfig,
        part: ModelPart,
        channel_order: Tensor,
        read: Callable[..., Tensor],
        index_order: Tensor | None,
    ) -> None:
        self.config = config
        self._part = part
        self._order = channel_order
        self._index_order = index_order
        self._read_named = read

    def query(self) -> Tensor | None:
        """``[heads * key_dim, hidden]``; None if queries are compressed too."""
        return self.queries() if self.config.query_rank is None else None

    def query_in(self) -> Tensor | None:
        """``[query_rank, hidden]``, or None."""
        return None if self.config.query_rank is None else self._read(f"{QUERY_IN}.weight")

    def query_expansion(self) -> Expansion | None:
        """To ``[heads * key_dim]``, or None."""
        if self.config.query_rank is None:
            return None
        return Expansion(self._read(f"{_QUERY_NORM}.weight"), self.queries())

    def queries(self) -> Tensor:
        """To ``[heads * key_dim]``, from the hidden state or a compressed row."""
        by_head = self._of_heads(WHOLE_QUERY if self.config.query_rank is None else QUERY, self.config.key_dim)
        rotated_first = torch.cat([by_head[:, self.config.plain_dim :], by_head[:, : self.config.plain_dim]], 1)
        return rotated_first[:, self._order].flatten(0, 1)

    def key_value_in(self) -> Tensor:
        """``[rank + rotary_dim, hidden]``: the rows behind ``rank`` are channels that all keys share, in their order."""
        stored = self._read(f"{KEY_VALUE_IN}.weight")
        return torch.cat([stored[: self.config.rank], stored[self.config.rank :][self._order[self.shared_places()]]])

    def row_norm(self) -> Tensor:
        """Of what keys and values are made of: ``[rank]``."""
        return self._read(f"{_KEY_VALUE_NORM}.weight")

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """From a compressed row to keys, ``[heads, key_dim, rank]``, in which the channels that they share are zeros, and to
        values, ``[heads, value_dim, rank]``.
        """
        plain_dim = self.config.plain_dim
        by_head = self._of_heads(KEY_VALUE, plain_dim + self.config.value_dim)
        keys = functional.pad(by_head[:, :plain_dim], (0, 0, self.config.rotary_dim, 0))[:, self._order]
        return keys, by_head[:, plain_dim:]

    def output(self) -> Tensor:
        """``[own_hidden, all heads * value_dim]``."""
        part = self._part
        rows, columns = (None, self._channels(self.config.value_dim)) if part.is_fast else (part.own_hidden, None)
        return self._read(f"{self.config.output}.weight", rows, columns)

    def gates(self) -> Tensor | None:
        """``[heads, hidden]``, or None."""
        gates = self.config.gates
        return None if gates is None else self._read(f"{gates}.weight", self._part.heads)

    def index(self) -> IndexTensors:
        """The layer's index of keys, which it has."""
        order = self._index_order
        assert order is not None
        queries = self._read(f"{_INDEX_QUERY}.weight")
        return IndexTensors(
            queries.view(-1, len(order), queries.shape[1])[:, order].flatten(0, 1),
            self._read(f"{_INDEX_KEY}.weight")[order],
            self._read(f"{_INDEX_NORM}.weight")[order],
            self._read(f"{_INDEX_NORM}.bias")[order],
            self._read(f"{_INDEX_WEIGHTS}.weight"),
        )

    def shared_places(self) -> Tensor:
        """Where in a key the shared channels are: int64, ``[rotary_dim]``."""
        return (self._order < self.config.rotary_dim).nonzero().flatten()

    def _read(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        return self._read_named(self.config.prefix + name, rows, columns)

    def _of_heads(self, name: str, head_dim: int) -> Tensor:
        """``[heads, head_dim, inputs]``."""
        stored = self._read(f"{name}.weight", self._channels(head_dim))
        return stored.view(len(self._part.heads), head_dim, stored.shape[1])

    def _channels(self, head_dim: int) -> range:
        return range(self._part.heads.start * head_dim, self._part.heads.stop * head_dim)


def with_values_as_wide(config: LatentConfig, behind: Tensor, width: int) -> Tensor:
    """What reads the values of heads, ``[n, heads * value_dim]``, for heads of ``width`` columns; those behind values are zeros."""
    num_heads = behind.shape[1] // config.value_dim  # Not -1: a rank may have no rows.
    values = behind.view(len(behind), num_heads, config.value_dim)
    return functional.pad(values, (0, width - config.value_dim)).flatten(1)
