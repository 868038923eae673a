"""From a description and its tensors to a model on a device.

Owns: which tensors a layer's parts are made of. Must not know: launches, how weights become codes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import msgspec
import torch
from torch import Tensor

from headway_executor.gpu.attention import AttentionSpace, DeviceAttention
from headway_executor.gpu.decoder import DecoderWeights, LayerWeights
from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.gpu.device_step import Mixing
from headway_executor.gpu.device_weights import Activations, DeviceWeights, QuantizationKind
from headway_executor.gpu.feed_forward import (
    DenseFeedForward,
    DeviceFeedForward,
    ExpertFeedForward,
    ExpertSpace,
    ExpertWeights,
    FeedForwardSpace,
    PartNorms,
)
from headway_executor.gpu.latent import LatentQkv, latent_space
from headway_executor.gpu.layer_inputs import LayerInputSpace, LayerTable, OwnInput
from headway_executor.gpu.linear import AdaptedExperts, AdaptedLinear, DeviceExperts, DeviceLinear
from headway_executor.gpu.norm import DeviceNorm, NormedLinear
from headway_executor.gpu.recurrence import Beside, DeviceRecurrence, RecurrenceSpace, RecurrenceWeights, widths_of
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.alibi import slopes_of
from headway_executor.models.attention_config import AttentionConfig, Rotary
from headway_executor.models.coded_tensors import Projection
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, RecurrenceConfig
from headway_executor.models.expert_tensors import NormsOfExperts
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.latent_tensors import LATENT_EPS, Expansion, LatentTensors
from headway_executor.models.linear import placed
from headway_executor.models.loading import ModelTensors, NormTensors
from headway_executor.models.rope import halves, query_factors, table_of
from headway_executor.models.stored_names import TensorSource
from headway_kernels.gpu.attention.paged import Slopes
from headway_kernels.gpu.tunings import Tunings
from headway_kernels.states import Convolution


def load_decoder(
    config: ModelConfig,
    checkpoint: TensorSource,
    *,
    max_model_len: int,
    max_num_tokens: int,
    dtype: torch.dtype,
    tunings: Tunings,
    quantization: QuantizationKind | None,
    activations: Activations,
    adapters: DeviceAdapters | None,
    attention: Mapping[AttentionConfig, AttentionSpace],
    places: Sequence[KvPlace | None],
    progress: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> DecoderWeights:
    """Load to the device of ``tunings``, with memory for steps of ``max_num_tokens``; ``quantization`` spares embedding, head and routers.

    ``adapters`` are of the steps that will run; None: there can be none. ``attention``: what layers share that attend
    alike; ``places``: see ``KvLayout``.
    """
    device = tunings.device
    weights = DeviceWeights(
        checkpoint,
        lambda source: ModelTensors(config, source, halves, device),
        quantization,
        activations,
        dtype,
        tunings,
        max_num_tokens,
        warn,
    )
    loader = _Loader(config, weights, adapters, attention, places, max_model_len, max_num_tokens, dtype, device)
    embedding = weights.here(weights.tensors.embedding(dtype))
    final_norm = weights.tensors.final_norm()
    positions = weights.tensors.positions(max_model_len)

    def layer(index: int) -> LayerWeights:
        progress(index, config.num_layers)
        return loader.layer(index)

    return DecoderWeights(
        embedding=embedding,
        positions=None if positions is None else weights.here(positions),
        table=loader.table(),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=None if final_norm is None else loader.norm(final_norm),
        head=loader.head(embedding),
    )


class _Loader:
    def __init__(
        self,
        config: ModelConfig,
        weights: DeviceWeights,
        adapters: DeviceAdapters | None,
        attention: Mapping[AttentionConfig, AttentionSpace],
        places: Sequence[KvPlace | None],
        max_model_len: int,
        max_num_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._weights = weights
        self._tensors = weights.tensors
        self._adapters = adapters
        self._attention_spaces = attention
        self._places = places
        self._device = device
        self._dtype = dtype
        latent = config.attention.latent
        self._latent_space = None if latent is None else latent_space(latent, max_num_tokens, dtype, device)
        inputs = config.layer_inputs
        self._input_space = (
            None if inputs is None else LayerInputSpace(inputs, config.num_layers, max_num_tokens, dtype, device)
        )
        # Layers that are alike share memory.
        self._table = cache(lambda rotary, head_dim: _table(rotary, head_dim, max_model_len, device))
        self._slopes = cache(lambda attention: _slopes(attention, device))
        self._growth = cache(lambda growth: query_factors(growth, max_model_len).to(device))
        self._expert_space = cache(lambda feed: ExpertSpace(max_num_tokens, config.hidden_size, feed, dtype, device))
        self._recurrence_space = cache(lambda widths: RecurrenceSpace(widths, max_num_tokens, dtype, device))
        self._beside = cache(lambda: torch.empty(max_num_tokens, config.hidden_size, dtype=dtype, device=device))
        self._dense_space = cache(
            lambda width, is_gated: FeedForwardSpace(
                max_num_tokens, width, is_gated=is_gated, dtype=dtype, device=device
            )
        )

    def layer(self, index: int) -> LayerWeights:
        eps, factor = (None, self._config.norm.eps_behind) * 2, self._tensors.layer_factor(index)
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = (
            None if norm is None else self.norm(norm, own)
            for norm, own in zip(self._tensors.norms_of_layer(index), eps, strict=True)
        )
        layer = self._config.layers[index]
        return LayerWeights(
            attention_norm=attention_norm,
            mixing=self._mixing(index),
            attention_post_norm=attention_post_norm,
            mlp_norm=mlp_norm,
            feed_forward=self._feed_forward(index, layer.feed_forward) if layer.has_feed_forward else None,
            mlp_post_norm=mlp_post_norm,
            own_input=self._own_input(index),
            factor=None if factor is None else self._weights.here(factor),
        )

    def table(self) -> LayerTable | None:
        """Of the inputs of each layer's own."""
        tensors = self._tensors.layer_inputs()
        if tensors is None or self._input_space is None:
            return None
        return LayerTable(
            self._weights.here(tensors.table()),
            self._weights.product(tensors.projection(), None, is_exact=True),
            self.norm(NormTensors(tensors.norm(), None)),
            self._input_space,
        )

    def _own_input(self, index: int) -> OwnInput | None:
        tensors = self._tensors.layer_inputs()
        if tensors is None or self._input_space is None:
            return None
        gate, back, norm = tensors.of_layer(index)
        return OwnInput(
            index,
            self._weights.product(gate, None, is_exact=True),
            self._config.layers[index].feed_forward.activation,
            self._weights.product(back, None, is_exact=True),
            self.norm(NormTensors(norm, None), self._config.norm.eps_behind),
            self._input_space,
        )

    def _mixing(self, index: int) -> Mixing | None:
        layer = self._config.layers[index]
        attention = self._attention(index) if layer.attends else None
        if layer.recurrence is None:
            return attention
        recurrence = self._recurrence(index, layer.recurrence)
        return recurrence if attention is None else Beside(attention, recurrence, self._beside())

    def _recurrence(self, index: int, config: RecurrenceConfig) -> DeviceRecurrence:
        tensors = self._tensors.recurrence(index)
        (taps, bias), numbers = tensors.convolution(), tensors.head_numbers()
        further = {
            "selection": (tensors.selection(), AdapterSite.STATE_SELECTION),
            "steps": (tensors.steps(), AdapterSite.STATE_STEPS),
            "gates": (tensors.gates(), AdapterSite.STATE_GATES),
        }
        weights = RecurrenceWeights(
            inputs=self._projection(index, AdapterSite.STATE_INPUTS, lambda read: read.recurrence(index).inputs()),
            convolution=Convolution(self._wide(taps.t()).contiguous(), None if bias is None else self._wide(bias)),
            numbers=None if numbers is None else numbers.each(lambda part: self._wide(part).contiguous()),
            norm_eps=self._config.norm.eps if config.norm_eps is None else config.norm_eps,
            output=self._projection(index, AdapterSite.STATE_OUTPUT, lambda read: read.recurrence(index).output()),
            blocks=None
            if numbers is None or numbers.blocks is None
            else self._weights.here(torch.cat(list(numbers.blocks), 2)),
            # They are small, and decide much: they have no codes.
            **{
                name: self._adapted(self._weights.product(weight, None, is_exact=True), index, site)
                for name, (weight, site) in further.items()
                if weight is not None
            },
        )
        return DeviceRecurrence(
            config, len(self._config.recurrences(range(index))), weights, self._recurrence_space(widths_of(config))
        )

    def _attention(self, index: int) -> DeviceAttention:
        config, tensors, place = self._config, self._tensors, self._places[index]
        layer, latent, sinks = config.layers[index], tensors.latent(index), tensors.sinks(index)
        attention, are_centred = config.attention_of(index), config.attention.qk_norm == "layer"
        weights, biases = tensors.head_norms.weight(index), tensors.head_norms.bias(index)
        query_norm, key_norm = _head_norms(attention, None if are_centred else weights)
        cosines, sines = self._table(config.rotary(index), attention.head_dim)
        assert place is not None
        return DeviceAttention(
            config=attention,
            space=self._attention_spaces[attention],
            place=place,
            is_reading=layer.keys_of is not None,
            qkv=self._projection(index, AdapterSite.QKV, lambda read: read.qkv(index))
            if latent is None
            else self._latent(index, latent),
            query_norm=None if query_norm is None else self._norm_weight(query_norm),
            key_norm=None if key_norm is None else self._norm_weight(key_norm),
            head_weights=self._wide(weights) if weights is not None and are_centred else None,
            head_biases=None if biases is None else self._wide(biases),
            norm_eps=config.norm.eps,
            cosines=cosines,
            sines=sines,
            query_factors=None if layer.query_growth is None else self._growth(layer.query_growth),
            output=self._behind(index, config.names.output_norm, self._output(index, latent)),
            window=layer.window,
            sinks=None if sinks is None else self._wide(sinks),
            slopes=self._slopes(attention),
        )

    def _output(self, index: int, latent: LatentTensors | None) -> DeviceLinear:
        if latent is None and not self._config.attention_of(index).value_dim:
            return self._projection(index, AdapterSite.OUTPUT, lambda read: read.output(index))
        # Of numbers: codes cannot be padded.
        padded = self._tensors.wide_output(index) if latent is None else (latent.output(), None)
        return self._adapted(self._weights.product(*padded), index, AdapterSite.OUTPUT)

    def head(self, embedding: Tensor) -> DeviceLinear:
        """The product that gives the logits."""
        if self._config.shares_embedding:
            head = self._weights.product(embedding, None, is_exact=True)
        else:
            head = self._weights.linear(lambda read: (read.head(), read.head_bias()), is_exact=True)
        tensors, config = self._tensors.before_head(), self._config.before_head
        if tensors is None or config is None:
            return head
        weight, bias, norm = tensors
        feed = FeedForwardConfig(
            intermediate_size=self._config.hidden_size, activation=config.activation, is_gated=False
        )
        before = DenseFeedForward(
            self._weights.product(weight, bias, is_exact=True),
            feed,
            NormedLinear(self.norm(norm), head),
            self._dense_space(feed.intermediate_size, feed.is_gated),
        )
        return before.of_all

    def norm(self, stored: NormTensors, eps: float | None = None) -> DeviceNorm:
        """A norm of whole rows, by default with the epsilon of most."""
        config = self._config.norm
        return DeviceNorm(
            weight=self._norm_weight(stored.weight),
            bias=None if stored.bias is None else self._norm_weight(stored.bias),
            eps=config.eps if eps is None else eps,
            is_centred=config.kind == "layer",
        )

    def _behind(self, index: int, name: str | None, product: DeviceLinear) -> DeviceLinear:
        """A product behind the norm of that ``name`` in a layer, if there is one."""
        norm = self._tensors.norm(index, name)
        return product if norm is None else NormedLinear(self.norm(norm), product)

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return self._weights.here(weight) if self._config.norm.rounds_first else self._wide(weight)

    def _wide(self, tensor: Tensor) -> Tensor:
        return placed(tensor, torch.float32, self._device)

    def _latent(self, index: int, latent: LatentTensors) -> LatentQkv:
        """Of numbers: codes cannot be padded."""
        config, query, query_in = self._config.attention.latent, latent.query(), latent.query_in()
        gates = latent.gates()
        assert config is not None
        assert self._latent_space is not None
        expansion, compress = latent.query_expansion(), latent.key_value_in()
        if expansion is None or query_in is None:
            assert query is not None
            queries = self._adapted(self._weights.product(query, None), index, AdapterSite.LATENT_QUERY)
        else:
            queries = self._expansion(expansion, index, AdapterSite.LATENT_QUERY)
            compress = torch.cat([query_in, compress])
        width = config.query_rank or 0
        product = self._weights.product(compress, None)
        if width:
            product = self._adapted(product, index, AdapterSite.LATENT_QUERY_IN, slice(width))
        return LatentQkv(
            config,
            self._config.num_heads,
            queries,
            self._adapted(product, index, AdapterSite.LATENT_IN, slice(width, None)),
            self._expansion(latent.key_value_expansion(), index, AdapterSite.LATENT_EXPANSION),
            self._latent_space,
            None
            if gates is None
            else self._adapted(self._weights.product(gates, None), index, AdapterSite.LATENT_GATES),
        )

    def _expansion(self, expansion: Expansion, index: int, site: AdapterSite) -> DeviceLinear:
        product = self._adapted(self._weights.product(expansion.weight, None), index, site)
        norm = DeviceNorm(self._weights.here(expansion.norm), None, LATENT_EPS, is_centred=False)
        return NormedLinear(norm, product)

    def _feed_forward(self, index: int, feed: FeedForwardConfig) -> DeviceFeedForward:
        if feed.experts is not None:
            return self._experts(index, feed, feed.experts)
        curve = self._tensors.curve(index)
        down = self._projection(index, AdapterSite.DOWN, lambda read: read.down(index))
        return DenseFeedForward(
            self._projection(index, AdapterSite.GATE_UP, lambda read: read.gate_up(index)),
            feed,
            self._behind(index, self._config.names.down_norm, down),
            self._dense_space(feed.intermediate_size, feed.is_gated),
            None if curve is None else self._wide(curve),
        )

    def _projection(self, index: int, site: AdapterSite, read: Projection) -> DeviceLinear:
        return self._adapted(self._weights.linear(read), index, site)

    def _adapted(
        self,
        product: DeviceLinear,
        index: int,
        site: AdapterSite,
        columns: slice = slice(None),
    ) -> DeviceLinear:
        return product if self._adapters is None else AdaptedLinear(product, self._adapters, index, site, columns)

    def _adapted_experts(self, product: DeviceExperts, index: int, site: AdapterSite) -> DeviceExperts:
        return product if self._adapters is None else AdaptedExperts(product, self._adapters, index, site)

    def _experts(self, index: int, feed: FeedForwardConfig, config: ExpertsConfig) -> ExpertFeedForward:
        tensors = self._tensors.experts(index)
        (router, bias), gate, correction = tensors.router(), tensors.shared_gate(), tensors.correction()
        if gate is not None:
            router = torch.cat([router, gate])
            bias = None if bias is None else torch.nn.functional.pad(bias, (0, 1))
        routing, norms = config.routing, tensors.norms()
        numbers = range(routing.num_experts)
        gate_up, down = (
            self._weights.of_experts([partial(part, index, number) for number in numbers], rows_per_token, routing)
            for part, rows_per_token in ((_gate_up, 1), (_down, routing.num_chosen))
        )
        shared = None
        if config.shared_size:
            shared = DenseFeedForward(
                self._projection(index, AdapterSite.SHARED_GATE_UP, partial(_gate_up, index, None)),
                msgspec.structs.replace(feed, limit=config.shared_limit),
                self._projection(index, AdapterSite.SHARED_DOWN, partial(_down, index, None)),
                self._dense_space(config.shared_size, feed.is_gated),
            )
        sites = (AdapterSite.EXPERTS_IN, AdapterSite.EXPERTS_OUT)
        around = {
            name: self._adapted(self._weights.product(weight, None), index, site)
            for name, weight, site in zip(("compress", "expand"), tensors.latent() or (), sites, strict=False)
        }
        scores = self._weights.product(router, bias, is_exact=True)
        if gate is not None:
            scores = self._adapted(scores, index, AdapterSite.SHARED_GATE, slice(routing.num_experts, None))
        weights = ExpertWeights(
            router=self._adapted(scores, index, AdapterSite.ROUTER, slice(routing.num_experts)),
            correction=None if correction is None else self._wide(correction),
            gate_up=self._adapted_experts(gate_up, index, AdapterSite.EXPERT_GATE_UP),
            down=self._adapted_experts(down, index, AdapterSite.EXPERT_DOWN),
            shared=shared,
            factors=None if norms is None else self._wide(norms.weights),
            norms=None if norms is None else self._part_norms(norms),
            **around,
        )
        return ExpertFeedForward(weights, feed, self._expert_space(feed))

    def _part_norms(self, norms: NormsOfExperts) -> PartNorms:
        weights = (norms.router, norms.experts, norms.experts_post, norms.shared, norms.shared_post)
        return PartNorms(*(self.norm(NormTensors(weight, None)) for weight in weights))


def _gate_up(index: int, number: int | None, read: ModelTensors) -> tuple[Tensor, Tensor | None]:
    return read.experts(index).gate_up(number)


def _down(index: int, number: int | None, read: ModelTensors) -> tuple[Tensor, Tensor | None]:
    return read.experts(index).down(number)


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
