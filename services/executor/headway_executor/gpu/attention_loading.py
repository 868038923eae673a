"""From a layer's tensors to its attention on a device.

Owns: which tensors attention is made of. Must not know: what else a layer has, how weights become codes.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from headway_executor.gpu.attention import AttentionSpace, DeviceAttention
from headway_executor.gpu.latent import LatentQkv, latent_space
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.gpu.loaded_parts import LoadedParts
from headway_executor.gpu.norm import DeviceNorm, NormedLinear
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.alibi import slopes_of
from headway_executor.models.attention_config import AttentionConfig, Rotary
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
        self._latent_space = None if latent is None else latent_space(latent, parts.max_num_tokens, parts.dtype, device)
        # Layers that are alike share memory.
        self._table = cache(lambda rotary, head_dim: _table(rotary, head_dim, max_model_len, device))
        self._slopes = cache(lambda attention: _slopes(attention, device))
        self._growth = cache(lambda growth: query_factors(growth, max_model_len).to(device))

    def load(self, index: int) -> DeviceAttention:
        """Of the layer with this number."""
        config, tensors, place = self._parts.config, self._parts.tensors, self._places[index]
        layer, latent, sinks = config.layers[index], tensors.latent(index), tensors.sinks(index)
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
            qkv=self._parts.projection(index, AdapterSite.QKV, lambda read: read.qkv(index))
            if latent is None
            else self._latent(index, latent),
            query_norm=None if query_norm is None else self._parts.norm_weight(query_norm),
            key_norm=None if key_norm is None else self._parts.norm_weight(key_norm),
            head_weights=self._parts.wide(weights) if weights is not None and are_centred else None,
            head_biases=None if biases is None else self._parts.wide(biases),
            norm_eps=config.norm.eps,
            cosines=cosines,
            sines=sines,
            query_factors=None if layer.query_growth is None else self._growth(layer.query_growth),
            output=self._parts.behind(index, config.names.output_norm, self._output(index, latent)),
            window=layer.window,
            sinks=None if sinks is None else self._parts.wide(sinks),
            slopes=self._slopes(attention),
        )

    def _output(self, index: int, latent: LatentTensors | None) -> DeviceLinear:
        attention = self._parts.config.attention_of(index)
        inputs = self._parts.part.attended(attention.num_heads, attention.head_dim)
        if latent is None and not attention.value_dim:
            return self._parts.back(index, AdapterSite.OUTPUT, lambda read: read.output(index), inputs)
        # Of numbers: codes cannot be padded.
        padded = self._parts.tensors.wide_output(index) if latent is None else (latent.output(), None)
        own = self._parts.adapted(self._parts.weights.product(*padded), index, AdapterSite.OUTPUT)
        return own if self._parts.to_hidden is None else self._parts.to_hidden.product(own, inputs)

    def _latent(self, index: int, latent: LatentTensors) -> LatentQkv:
        """Of numbers: codes cannot be padded."""
        config, query, query_in, gates = latent.config, latent.query(), latent.query_in(), latent.gates()
        assert self._latent_space is not None
        expansion, compress = latent.query_expansion(), latent.key_value_in()
        if expansion is None or query_in is None:
            assert query is not None
            queries = self._parts.adapted(self._parts.weights.product(query, None), index, AdapterSite.LATENT_QUERY)
        else:
            queries = self._expansion(expansion, index, AdapterSite.LATENT_QUERY)
            compress = torch.cat([query_in, compress])
        width = config.query_rank or 0
        product = self._parts.weights.product(compress, None)
        if width:
            product = self._parts.adapted(product, index, AdapterSite.LATENT_QUERY_IN, slice(width))
        return LatentQkv(
            config,
            len(self._parts.part.heads),
            queries,
            self._parts.adapted(product, index, AdapterSite.LATENT_IN, slice(width, None)),
            self._expansion(latent.key_value_expansion(), index, AdapterSite.LATENT_EXPANSION),
            self._latent_space,
            None
            if gates is None
            else self._parts.adapted(
                self._parts.weights.product(gates.repeat_interleave(config.key_dim, 0), None),
                index,
                AdapterSite.LATENT_GATES,
            ),
        )

    def _expansion(self, expansion: Expansion, index: int, site: AdapterSite) -> DeviceLinear:
        product = self._parts.adapted(self._parts.weights.product(expansion.weight, None), index, site)
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
    """Cosines and sines of a layer, ``[2, context, head_dim/2]``; without rope, those of no rotation."""
    if rotary is None:
        table = torch.ones(max_model_len, head_dim // 2, dtype=torch.complex64)
    else:
        table = table_of(rotary, max_model_len)
    return torch.stack([table.real, table.imag]).to(device)
