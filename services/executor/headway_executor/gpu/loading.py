"""From a description and its tensors to a model on a device.

Owns: the order of a layer's parts, what is before and behind the layers. Must not know: launches, how weights become codes.
"""

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from headway_executor.gpu.attention import AttentionSpace
from headway_executor.gpu.attention_loading import AttentionLoader
from headway_executor.gpu.decoder import DecoderWeights, LayerWeights
from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.gpu.device_step import Mixing
from headway_executor.gpu.device_weights import Activations, DeviceWeights, QuantizationKind
from headway_executor.gpu.feed_forward import DenseFeedForward
from headway_executor.gpu.feed_forward_loading import FeedForwardLoader
from headway_executor.gpu.layer_inputs import LayerInputSpace, LayerTable, OwnInput
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.gpu.loaded_parts import LoadedParts
from headway_executor.gpu.norm import NormedLinear
from headway_executor.gpu.recurrence import Beside
from headway_executor.gpu.recurrence_loading import RecurrenceLoader
from headway_executor.gpu.stage_mates import BackToHidden, DeviceMates
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import FeedForwardConfig, ModelConfig
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.loading import ModelTensors, NormTensors
from headway_executor.models.part import ModelPart, whole
from headway_executor.models.rope import halves_in_front
from headway_executor.models.stored_names import TensorSource
from headway_kernels.gpu.tunings import Tunings


def load_decoder(
    config: ModelConfig,
    checkpoint: TensorSource,
    part: ModelPart,
    mates: DeviceMates | None,
    *,
    max_model_len: int,
    max_num_tokens: int,
    dtype: torch.dtype,
    tunings: Tunings,
    quantization: QuantizationKind | None,
    activations: Activations,
    adapters: DeviceAdapters | None,
    attention: Mapping[AttentionConfig, AttentionSpace],
    places: Mapping[int, KvPlace | None],
    progress: Callable[[int, int], None],
    warn: Callable[[str], None],
) -> DecoderWeights:
    """Load to the device of ``tunings``, with memory for steps of ``max_num_tokens``; ``quantization`` spares embedding, head and routers.

    ``adapters`` are of the steps that will run; None: there can be none. ``attention``: what layers share that attend
    alike; ``places``: of the layers of ``part``; see ``KvLayout``.
    """
    device = tunings.device

    def weights_of(part: ModelPart) -> DeviceWeights:
        return DeviceWeights(
            checkpoint,
            lambda source: ModelTensors(config, source, halves_in_front, device, part),
            quantization,
            activations,
            dtype,
            tunings,
            max_num_tokens,
            warn,
        )

    def parts_of(part: ModelPart, to_hidden: BackToHidden | None) -> LoadedParts:
        return LoadedParts(config, part, to_hidden, weights_of(part), adapters, max_num_tokens, dtype, device)

    to_hidden = None if mates is None else BackToHidden(mates, part, max_num_tokens, dtype, device)
    parts = parts_of(part, to_hidden)
    # Embedding and head are not cut: one rank draws tokens, and gathers nothing for it.
    ends = parts if mates is None else parts_of(whole(config), None)
    weights = ends.weights
    loader = _Loader(parts, ends, AttentionLoader(parts, attention, places, max_model_len))
    is_first, is_drawing = part.place.is_first_stage, part.place.rank == 0
    embedding = None
    if is_first or (is_drawing and config.shares_embedding):
        embedding = weights.here(weights.tensors.embedding(dtype))
    final_norm = weights.tensors.final_norm() if is_drawing else None
    positions = weights.tensors.positions(max_model_len) if is_first else None

    def layer(index: int) -> LayerWeights:
        progress(index - part.layers.start, len(part.layers))
        return loader.layer(index)

    return DecoderWeights(
        embedding=embedding if is_first else None,
        positions=None if positions is None else weights.here(positions),
        table=loader.table(),
        layers=tuple(layer(index) for index in part.layers),
        final_norm=None if final_norm is None else parts.norm(final_norm),
        head=loader.head(embedding) if is_drawing else None,
    )


class _Loader:
    def __init__(self, parts: LoadedParts, ends: LoadedParts, attention: AttentionLoader) -> None:
        self._parts = parts
        self._ends = ends
        self._attention = attention
        self._feed_forward = FeedForwardLoader(parts)
        self._recurrence = RecurrenceLoader(parts)
        inputs, tokens = parts.config.layer_inputs, parts.max_num_tokens
        self._input_space = (
            None
            if inputs is None
            else LayerInputSpace(inputs, parts.config.num_layers, tokens, parts.dtype, parts.device)
        )
        self._beside = cache(lambda: parts.space(parts.config.hidden_size))

    def layer(self, index: int) -> LayerWeights:
        config, tensors = self._parts.config, self._parts.tensors
        eps, factor = (None, config.norm.eps_behind) * 2, tensors.layer_factor(index)
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = (
            None if norm is None else self._parts.norm(norm, own)
            for norm, own in zip(tensors.norms_of_layer(index), eps, strict=True)
        )
        layer = config.layers[index]
        return LayerWeights(
            attention_norm=attention_norm,
            mixing=self._mixing(index),
            attention_post_norm=attention_post_norm,
            mlp_norm=mlp_norm,
            feed_forward=self._feed_forward.load(index, layer.feed_forward) if layer.has_feed_forward else None,
            mlp_post_norm=mlp_post_norm,
            own_input=self._own_input(index),
            factor=None if factor is None else self._parts.weights.here(factor),
        )

    def table(self) -> LayerTable | None:
        """Of the inputs of each layer's own."""
        tensors = self._parts.tensors.layer_inputs()
        if tensors is None or self._input_space is None:
            return None
        return LayerTable(
            self._parts.weights.here(tensors.table()),
            self._parts.weights.product(tensors.projection(), None, is_exact=True),
            self._parts.norm(NormTensors(tensors.norm(), None)),
            self._input_space,
        )

    def _own_input(self, index: int) -> OwnInput | None:
        tensors = self._parts.tensors.layer_inputs()
        if tensors is None or self._input_space is None:
            return None
        gate, back, norm = tensors.of_layer(index)
        return OwnInput(
            index,
            self._parts.weights.product(gate, None, is_exact=True),
            self._parts.config.layers[index].feed_forward.activation,
            self._parts.weights.product(back, None, is_exact=True),
            self._parts.norm(NormTensors(norm, None), self._parts.config.norm.eps_behind),
            self._input_space,
        )

    def _mixing(self, index: int) -> Mixing | None:
        layer = self._parts.config.layers[index]
        attention = self._attention.load(index) if layer.attends else None
        if layer.recurrence is None:
            return attention
        recurrence = self._recurrence.load(index, layer.recurrence)
        return recurrence if attention is None else Beside(attention, recurrence, self._beside())

    def head(self, embedding: Tensor | None) -> DeviceLinear:
        """The product that gives the logits."""
        if self._ends.config.shares_embedding:
            assert embedding is not None
            head = self._ends.weights.product(embedding, None, is_exact=True)
        else:
            head = self._ends.weights.linear(lambda read: (read.head(), read.head_bias()), is_exact=True)
        tensors, config = self._ends.tensors.before_head(), self._ends.config.before_head
        if tensors is None or config is None:
            return head
        weight, bias, norm = tensors
        feed = FeedForwardConfig(
            intermediate_size=self._ends.config.hidden_size, activation=config.activation, is_gated=False
        )
        before = DenseFeedForward(
            self._ends.weights.product(weight, bias, is_exact=True),
            feed,
            NormedLinear(self._ends.norm(norm), head),
            self._feed_forward.space(feed.intermediate_size, feed.is_gated),
        )
        return before.of_all
