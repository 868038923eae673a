"""Latent attention of a layer on a device (DeepSeek-AI 2024, arXiv 2405.04434).

Owns: its products, their memory, their order. Must not know: norms before and behind it, graphs, files.

One row is stored of a token, for all heads: see ``models/latent.py``. Nothing that runs in a step allocates, waits, or depends
on a value of the device.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headway_executor.gpu.attention import AttentionSpace, multiply_by_gates
from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.gpu.device_step import DeviceStep
from headway_executor.gpu.key_index import DeviceKeyIndex
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.attention_config import AttentionConfig, LatentConfig
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.latent_tensors import LATENT_EPS
from headway_kernels.gpu.attention.paged import AttentionRows, paged_attention
from headway_kernels.gpu.key_index import as_blocks_of_one
from headway_kernels.gpu.latent import store_latent
from headway_kernels.gpu.linear.heads import multiply_heads


class LatentSpace:
    """Memory that layers share, one after the other: of compressed rows, queries and values of ``num_heads``, and gates."""

    def __init__(
        self, config: LatentConfig, num_heads: int, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def space(*shape: int) -> Tensor:
            return torch.empty(num_tokens, *shape, dtype=dtype, device=device)

        self.compressed = space((config.query_rank or 0) + config.rank + config.rotary_dim)
        self.queries = space(num_heads, config.key_dim)
        self.values = space(num_heads, config.value_dim)
        self.gates = space(num_heads)


class DeviceHeads(Protocol):
    """A product of each head."""

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """``[tokens, heads, in] -> [tokens, heads, out]``; allocates nothing."""
        ...


@dataclass(frozen=True, slots=True)
class HeadsLinear:
    """``weight`` ``[heads, out, in]``, contiguous."""

    weight: Tensor

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceHeads``."""
        multiply_heads(inputs, self.weight, out)


@dataclass(frozen=True, slots=True)
class AdaptedHeads:
    """A ``DeviceHeads``, and what each row's adapter adds to it at a ``site`` of a layer; this allocates in large steps."""

    product: DeviceHeads
    step: DeviceAdapters
    layer: int
    site: AdapterSite

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceHeads``."""
        self.product(inputs, out)
        if self.step.are_any:
            self.step.add_of_heads(self.layer, self.site, inputs, out)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """A layer's ``Mixing``. ``place``: of its rows, in the pool.

    ``compress`` gives what queries are made of, unless ``query`` takes the hidden state; then what keys and values are made of,
    behind the norm with ``row_norm``, ``[rank]``; then the channels that all keys share. ``query`` may change its input; its
    rotated channels come first in a head. ``absorb`` takes the others, ``expand`` gives values; ``gates`` are of heads, or None.
    ``index`` chooses what is seen; None: all, or if the ``space`` has an index, what another layer before has chosen.
    ``cosines`` and ``sines`` float32, ``[context, shared channels / 2]``. ``query_factors``, ``window`` and ``output``: see
    ``DeviceAttention``.
    """

    config: AttentionConfig
    space: AttentionSpace
    latent_space: LatentSpace
    place: KvPlace
    query: DeviceLinear
    compress: DeviceLinear
    row_norm: Tensor
    absorb: DeviceHeads
    expand: DeviceHeads
    gates: DeviceLinear | None
    index: DeviceKeyIndex | None
    cosines: Tensor
    sines: Tensor
    query_factors: Tensor | None
    output: DeviceLinear
    window: int | None

    def __call__(self, inputs: Tensor, step: DeviceStep, out: Tensor) -> None:
        """See ``Mixing``."""
        space, num_tokens = self.space, len(inputs)
        wide = space.made(num_tokens, queries_alone=True)
        attended, values = space.attended[:num_tokens], self.latent_space.values[:num_tokens]
        pool_layer = space.layer_of(step.pool, self.place)
        self._make_queries(inputs, wide.view(num_tokens, self.config.num_heads, -1), pool_layer, step)
        if space.index is None:
            self._attend(
                wide, pool_layer, attended, space.rows, has_decodes=step.has_decodes, has_chunks=step.has_chunks
            )
        else:
            if step.has_chunks:
                self._attend(wide, pool_layer[:, :1], attended, space.index.whole, has_decodes=False, has_chunks=True)
            vectors = as_blocks_of_one(pool_layer)
            for rows in space.index.rows:
                self._attend(wide, vectors, attended, rows, has_decodes=True, has_chunks=False)
        self.expand(attended.view(num_tokens, self.config.num_heads, -1), values)
        if self.gates is not None:
            gates = self.latent_space.gates[:num_tokens]
            self.gates(inputs, gates)
            multiply_by_gates(values, gates[..., None], self.config.gate_kind)
        self.output(values.flatten(1), out)

    def _attend(
        self,
        wide: Tensor,
        pool_layer: Tensor,
        attended: Tensor,
        rows: AttentionRows,
        *,
        has_decodes: bool,
        has_chunks: bool,
    ) -> None:
        paged_attention(
            wide,
            pool_layer,
            attended,
            rows,
            self.space.workspace,
            num_kv_heads=self.space.num_groups,
            num_shared=self.config.num_shared,
            scale=self.config.scale,
            window=self.window,
            tuning=self.space.tuning,
            has_decodes=has_decodes,
            has_chunks=has_chunks,
        )

    def _make_queries(self, inputs: Tensor, wide: Tensor, pool_layer: Tensor, step: DeviceStep) -> None:
        """Of ``[tokens, heads, row]``; and store the tokens' rows."""
        num_tokens, shared = len(inputs), self.config.num_shared
        compressed, queries = self.latent_space.compressed[:num_tokens], self.latent_space.queries[:num_tokens]
        self.compress(inputs, compressed)
        row = self.config.vector_dim
        of_query = compressed[:, :-row]
        self.query(of_query if of_query.shape[1] else inputs, queries.flatten(1))
        if self.index is not None:
            self.index(inputs, of_query, step, pool_layer)
        store_latent(
            compressed[:, -row:],
            self.row_norm,
            queries,
            wide,
            step.positions,
            step.slots,
            self.cosines,
            self.sines,
            pool_layer,
            eps=LATENT_EPS,
            query_factors=self.query_factors,
        )
        self.absorb(queries[..., shared:], wide[..., shared:])
