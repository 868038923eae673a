"""From a layer's tensors to its attention on a device.

Owns: which tensors attention is made of. Must not know: what else a layer has, how weights become codes.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from headway_executor.gpu.attention import AttentionSpace, DeviceAttention
from headway_executor.gpu.device_step import Mixing
from headway_executor.gpu.key_index import DeviceKeyIndex
from headway_executor.gpu.latent import AdaptedHeads, DeviceHeads, HeadsLinear, LatentAttention, LatentSpace
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.gpu.loaded_parts import LoadedParts
from headway_executor.gpu.norm import DeviceNorm, NormedLinear
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.alibi import slopes_of
from headway_executor.models.attention_config import AttentionConfig, Rotary
from headway_executor.models.key_index import INDEX_EPS
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.latent_tensors import LATENT_EPS, Expansion, LatentTensors
from headway_executor.models.rope import query_factors, table_of
from headway_kernels.gpu.attention.paged import Slopes


class AttentionLoader:
    """``spaces``: what layers share that attend alike; ``places``: of layers; see ``KvLayout``."""

    def __init__(
        self,
        parts: LoadedParts,
        spaces: Mapping[AttentionConfig, AttentionSpace],
        places: Mapping[int, KvPlace | None],
        max_model_len: int,
    ) -> None:
        self._parts = parts
        self._spaces = spaces
        self._places = places
        latent, device = parts.config.attention.latent, parts.device
        self._latent_space = (
            None
            if latent is None
            else LatentSpace(latent, len(parts.part.heads), parts.max_num_tokens, parts.dtype, device)
        )
        # Layers that are alike share memory.
        self._table = cache(lambda rotary, head_dim: _table(rotary, head_dim, max_model_len, device))
        self._slopes = cache(lambda attention: _slopes(attention, device))
        self._growth = cache(lambda growth: query_factors(growth, max_model_len).to(device))

    def load(self, index: int) -> Mixing:
        """Of the layer with this number."""
        latent = self._parts.tensors.latent(index)
        return self._attention(index) if latent is None else self._latent(index, latent)

    def _attention(self, index: int) -> DeviceAttention:
        config, tensors, place = self._parts.config, self._parts.tensors, self._places[index]
        layer, sinks = config.layers[index], tensors.sinks(index)
        attention = self._parts.part.attention(config.attention_of(index))
        are_centred = config.attention.qk_norm == "layer"
        weights, biases = tensors.head_norms.weight(index), tensors.head_norms.bias(index)
        query_norm, key_norm = _head_norms(attention, None if are_centred else weights)
        cosines, sines = self._table(config.rotary(index), attention.head_dim)
        assert place is not None
        return DeviceAttention(
            config=attention,
            space=self._spaces[attention],
            place=place,
            is_reading=layer.keys_of is not None,
            qkv=self._parts.projection(index, AdapterSite.QKV, lambda read: read.qkv(index)),
            query_norm=None if query_norm is None else self._parts.norm_weight(query_norm),
            key_norm=None if key_norm is None else self._parts.norm_weight(key_norm),
            head_weights=self._parts.wide(weights) if weights is not None and are_centred else None,
            head_biases=None if biases is None else self._parts.wide(biases),
            norm_eps=config.norm.eps,
            cosines=cosines,
            sines=sines,
            query_factors=self._query_factors(index),
            output=self._parts.behind(index, config.names.output_norm, self._output(index, None)),
            window=layer.window,
            sinks=None if sinks is None else self._parts.wide(sinks),
            slopes=self._slopes(attention),
        )

    def _query_factors(self, index: int) -> Tensor | None:
        growth = self._parts.config.layers[index].query_growth
        return None if growth is None else self._growth(growth)

    def _output(self, index: int, latent: LatentTensors | None) -> DeviceLinear:
        attention = self._parts.config.attention_of(index)
        inputs = self._parts.part.attended(attention.num_heads, attention.attended_dim)
        if latent is None and not attention.value_dim:
            return self._parts.back(index, AdapterSite.OUTPUT, lambda read: read.output(index), inputs)
        # Of numbers: codes cannot be padded.
        padded = self._parts.tensors.wide_output(index) if latent is None else (latent.output(), None)
        own = self._parts.adapted(self._parts.weights.product(*padded), index, AdapterSite.OUTPUT)
        return own if self._parts.to_hidden is None else self._parts.to_hidden.product(own, inputs)

    def _latent(self, index: int, latent: LatentTensors) -> LatentAttention:
        """Of numbers: parts of codes cannot change their order."""
        model, config, query_in, place = self._parts.config, latent.config, latent.query_in(), self._places[index]
        attention = self._parts.part.attention(model.attention_of(index))
        query, gates, width = latent.query_expansion(), latent.gates(), config.query_rank or 0
        compress = latent.key_value_in() if query_in is None else torch.cat([query_in, latent.key_value_in()])
        product = self._parts.weights.product(compress, None)
        if width:
            product = self._parts.adapted(product, index, AdapterSite.LATENT_QUERY_IN, slice(width))
        keys, values = latent.keys_and_values()
        cosines, sines = self._table(model.rotary(index), config.rotary_dim)
        assert place is not None
        assert self._latent_space is not None
        return LatentAttention(
            config=attention,
            space=self._spaces[attention],
            latent_space=self._latent_space,
            place=place,
            query=self._latent_product(index, latent.queries(), AdapterSite.LATENT_QUERY)
            if query is None
            else self._expansion(query, index, AdapterSite.LATENT_QUERY),
            compress=self._parts.adapted(product, index, AdapterSite.LATENT_IN, slice(width, None)),
            row_norm=self._parts.weights.here(latent.row_norm()),
            absorb=self._heads(index, keys[:, config.rotary_dim :].mT, AdapterSite.LATENT_KEYS),
            expand=self._heads(index, values, AdapterSite.LATENT_VALUES),
            gates=None if gates is None else self._latent_product(index, gates, AdapterSite.LATENT_GATES),
            index=self._key_index(index, latent),
            cosines=cosines,
            sines=sines,
            query_factors=self._query_factors(index),
            output=self._parts.behind(index, model.names.output_norm, self._output(index, latent)),
            window=model.layers[index].window,
        )

    def _key_index(self, index: int, latent: LatentTensors) -> DeviceKeyIndex | None:
        """Of numbers: what is near decides who is seen."""
        model, space = (
            self._parts.config,
            self._spaces[self._parts.part.attention(self._parts.config.attention_of(index))],
        )
        if space.index is None or latent.config.index is None or model.layers[index].sees_as_before:
            return None
        tensors, product = latent.index(), self._parts.weights.product
        cosines, sines = self._table(model.rotary(index), latent.config.rotary_dim)
        scale = (latent.config.index.num_heads * latent.config.index.head_dim) ** -0.5
        norm = DeviceNorm(
            self._parts.wide(tensors.norm_weight), self._parts.wide(tensors.norm_bias), INDEX_EPS, is_centred=True
        )
        return DeviceKeyIndex(
            space=space.index,
            queries=product(tensors.queries, None, is_exact=True),
            keys=product(tensors.keys, None, is_exact=True),
            norm=norm,
            weights=self._parts.wide(tensors.weights) * scale,
            cosines=cosines,
            sines=sines,
        )

    def _latent_product(self, index: int, weight: Tensor, site: AdapterSite) -> DeviceLinear:
        return self._parts.adapted(self._parts.weights.product(weight, None), index, site)

    def _heads(self, index: int, weight: Tensor, site: AdapterSite) -> DeviceHeads:
        """Products of heads, ``[heads, out, in]``."""
        product = HeadsLinear(self._parts.weights.here(weight).contiguous())
        if self._parts.adapters is None:
            return product
        return AdaptedHeads(product, self._parts.adapters, self._parts.part.layers.index(index), site)

    def _expansion(self, expansion: Expansion, index: int, site: AdapterSite) -> DeviceLinear:
        product = self._latent_product(index, expansion.weight, site)
        norm = DeviceNorm(self._parts.weights.here(expansion.norm), None, LATENT_EPS, is_centred=False)
        return NormedLinear(norm, product)


def _head_norms(attention: AttentionConfig, weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Of queries and of keys: for a head, or for all. A layer that reads the keys of another has none of keys."""
    if weights is None:
        return None, None
    queries, rest = weights[: attention.num_heads], weights[attention.num_heads :]
    if attention.qk_norm == "all":
        return queries.flatten(), rest.flatten()
    return queries[0], rest[0] if len(rest) else None


def _slopes(attention: AttentionConfig, device: torch.device) -> Slopes | None:
    alibi = attention.alibi
    return None if alibi is None else Slopes(slopes_of(attention.num_heads).to(device), alibi.is_rounded)


def _table(rotary: Rotary | None, head_dim: int, max_model_len: int, device: torch.device) -> Tensor:
    """Cosines and sines of the first channels of a head, ``[2, context, head_dim/2]``; without rope, those of no rotation."""
    if rotary is None:
        table = torch.ones(max_model_len, head_dim // 2, dtype=torch.complex64)
    else:
        table = table_of(rotary, max_model_len)[:, : head_dim // 2]
    return torch.stack([table.real, table.imag]).to(device)
