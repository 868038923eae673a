"""Weights of a checkpoint as the CPU kernels take them.

Owns: the form of each weight, and padding. Must not know: how kernels compute.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.memory.host_memory import copy_of_table
from headway_executor.models.attention_config import Rotary
from headway_executor.models.coded_tensors import CodedTensors, Projection
from headway_executor.models.compiled import stored_heads
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, RecurrenceConfig
from headway_executor.models.expert_tensors import NormsOfExperts
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.latent_tensors import LATENT_EPS, Expansion, LatentTensors, with_values_as_wide
from headway_executor.models.linear import placed
from headway_executor.models.loading import ModelTensors, NormTensors
from headway_executor.models.part import ModelPart
from headway_executor.models.rope import query_factors, table_of
from headway_kernels.cpu.coded_weight import CodedWeight, rounded_to_8_bits
from headway_kernels.cpu.decoder import (
    BeforeHead,
    LayerHeads,
    LayerInput,
    LayerTable,
    LayerWeights,
    NormWeights,
    Rotations,
)
from headway_kernels.cpu.experts import ExpertNorms, PackedExperts, packed_expert
from headway_kernels.cpu.feed_forward import Activation, DenseFeedForward, activates_in_product
from headway_kernels.cpu.latent import PackedExpansion, PackedLatent
from headway_kernels.cpu.library import (
    CpuLibrary,
    PackedLinear,
    StackedRows,
    WeightForm,
    rounded_to_4_bits,
)
from headway_kernels.cpu.recurrence import PackedRecurrence, StateGate, StateKind, StateSizes

_Weight: TypeAlias = Tensor | StackedRows | CodedWeight
_ENOUGH_TO_TELL = 1024
"""Values of a matrix to check first: weights in full precision show in a few."""
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_tanh": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "relu2": Activation.RELU2,
        "clamped_swish": Activation.CLAMPED_SWISH,
        "xielu": Activation.XIELU,
        "limited_silu": Activation.LIMITED_SILU,
    }
)
STATE_KINDS: Mapping[str, StateKind] = MappingProxyType(
    {
        "gated": StateKind.GATED_CONVOLUTION,
        "delta": StateKind.DELTA,
        "selective": StateKind.SELECTIVE,
        "scanned": StateKind.SCANNED,
        "unit": StateKind.UNIT,
    }
)
STATE_GATES: Mapping[str, StateGate] = MappingProxyType(
    {"silu": StateGate.SILU, "sigmoid": StateGate.SIGMOID, "gelu_tanh": StateGate.GELU_TANH}
)


class WeightLoader:
    """Reads and packs the weights of a part of a model; several threads may ask for layers at once."""

    def __init__(
        self,
        config: ModelConfig,
        part: ModelPart,
        tensors: ModelTensors,
        coded: CodedTensors,
        library: CpuLibrary,
        quantization: str,
        activations: str,
        dtype: torch.dtype,
        max_model_len: int,
        places: Mapping[int, KvPlace | None],
    ) -> None:
        self._places = places
        self._config = config
        self._part = part
        self._tensors = tensors
        self._coded = coded
        self._library = library
        self._quantization = quantization
        self._activations = activations
        self._dtype = dtype
        self._rotations = {rotary: _table(rotary, max_model_len) for rotary in config.rotaries}
        self._growth = functools.cache(lambda growth: query_factors(growth, max_model_len))  # one for layers alike

    def embedding(self) -> Tensor:
        """Return the embedding, float32."""
        return copy_of_table(self._tensors.embedding(torch.float32), torch.float32)

    def positions(self, count: int) -> Tensor | None:
        """Return the first positions of a table, float32; None if there is none."""
        table = self._tensors.positions(count)
        return None if table is None else _float32(table)

    def head(self) -> PackedLinear:
        """Return the head, packed."""
        return self.projection(lambda read: (read.head(), read.head_bias()))

    def before_head(self) -> BeforeHead | None:
        """Return what stands between the final norm and the head, if anything does."""
        config, before = self._config.before_head, self._tensors.before_head()
        if config is None or before is None:
            return None
        weight, bias, norm = before
        return BeforeHead(self._linear(weight, bias), ACTIVATIONS[config.activation], _norm(norm))

    def final_norm(self) -> NormWeights | None:
        """Return the norm before the head, if there is one."""
        norm = self._tensors.final_norm()
        return None if norm is None else _norm(norm)

    def layer(self, index: int) -> LayerWeights:
        """Return all weights of a layer."""
        tensors, layer = self._tensors, self._config.layers[index]
        qk_norm, sinks, factor = tensors.head_norms.weight(index), tensors.sinks(index), tensors.layer_factor(index)
        qk_norm_bias = tensors.head_norms.bias(index) if layer.attends else None
        rotary = self._config.rotary(index)
        qkv, output = self._attention(index) if layer.attends else (None, None)
        norms = [None if norm is None else _norm(norm) for norm in tensors.norms_of_layer(index)]
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = norms
        output_norm = tensors.norm(index, self._config.names.output_norm) if layer.attends else None
        return LayerWeights(
            qkv=qkv,
            output=output,
            recurrence=None if layer.recurrence is None else self._state(index, layer.recurrence),
            feed_forward=self._feed_forward(index, layer.feed_forward) if layer.has_feed_forward else None,
            attention_norm=attention_norm,
            attention_post_norm=attention_post_norm,
            mlp_norm=mlp_norm,
            mlp_post_norm=mlp_post_norm,
            output_norm=None if output_norm is None else _float32(output_norm.weight),
            qk_norm=None if qk_norm is None else _float32(qk_norm),
            qk_norm_bias=None if qk_norm_bias is None else _float32(qk_norm_bias),
            rotations=None if rotary is None else self._rotations[rotary],
            query_factors=None if layer.query_growth is None else self._growth(layer.query_growth),
            window=layer.window,
            sinks=None if sinks is None else _float32(sinks),
            heads=self._kv_heads(index),
            own_input=self._own_input(index),
            factor=1.0 if factor is None else float(factor),
        )

    def inputs(self) -> LayerTable | None:
        """Of each layer's own, if there are any."""
        inputs, config, tensors = self._config.layer_inputs, self._config, self._tensors.layer_inputs()
        if inputs is None or tensors is None:
            return None
        stored = tensors.table()
        is_narrow = self._dtype == torch.bfloat16 or is_exact_in_bfloat16(stored)
        return LayerTable(
            self._linear(tensors.projection(), None),
            _float32(tensors.norm()).expand(config.num_layers, -1).contiguous(),
            copy_of_table(stored, torch.bfloat16 if is_narrow else torch.float32),
            (config.hidden_size**-0.5, inputs.size**0.5, 2**-0.5),
        )

    def _own_input(self, index: int) -> LayerInput | None:
        tensors = self._tensors.layer_inputs()
        if tensors is None:
            return None
        gate, back, norm = tensors.of_layer(index)
        return LayerInput(self._linear(gate, None), self._linear(back, None), NormWeights(_float32(norm)))

    def _kv_heads(self, index: int) -> LayerHeads | None:
        place, attention = self._places[index], self._config.attention_of(index)
        if place is None:
            return None
        kv_heads = self._part.kv_heads_of(attention.num_kv_heads)
        stored = stored_heads(self._library, attention, len(kv_heads))
        is_reading = self._config.layers[index].keys_of is not None
        return LayerHeads(len(self._part.heads_of(attention.num_heads)), *stored, *place, is_reading)

    def _attention(self, index: int) -> tuple[PackedLinear | PackedLatent, PackedLinear]:
        latent = self._tensors.latent(index)
        if latent is not None:
            packed = self._latent(index, latent)
            output = with_values_as_wide(latent.config, latent.output(), packed.attended_dim)
            return packed, self._linear(output, None)
        if self._config.attention_of(index).value_dim:  # Groups of inputs cannot be padded.
            return self._qkv(index), self._output(index, *self._tensors.wide_output(index))
        return self._qkv(index), self._output(index, *self._read(lambda read: read.output(index)))

    def _state(self, index: int, config: RecurrenceConfig) -> PackedRecurrence:
        tensors = self._tensors.recurrence(index)
        taps, bias = tensors.convolution()
        numbers = tensors.head_numbers()
        within = {
            "selection": lambda read: read.recurrence(index).selection(),
            "steps": lambda read: read.recurrence(index).steps(),
            "gates": lambda read: read.recurrence(index).gates(),
        }
        return PackedRecurrence(
            StateSizes(
                STATE_KINDS[config.kind],
                STATE_GATES[config.gate],
                **{name: getattr(config, name) for name in StateSizes._fields[2:]},
            ),
            config.decay_bound or 0.0,
            self.projection(lambda read: read.recurrence(index).inputs()),
            self.projection(lambda read: read.recurrence(index).output()),
            _float32(taps.t()),
            None if bias is None else _float32(bias),
            None if numbers is None else numbers.each(_float32),
            self._config.norm.eps if config.norm_eps is None else config.norm_eps,
            **{name: self._exact(read) for name, read in within.items()},
        )

    def _exact(self, read: Callable[[ModelTensors], Tensor | None]) -> PackedLinear | None:
        """What is small, and decides much: no ``quantization`` rounds it, though a checkpoint may have it as codes."""
        weight = read(self._tensors)
        if weight is None:
            return None
        coded = self._coded.read(lambda tensors: (read(tensors), None))  # type: ignore[arg-type, return-value]
        if coded is not None:
            return self._linear(*coded)
        return PackedLinear(self._library, weight, None, _exact_form(weight))

    def _qkv(self, index: int) -> PackedLinear:
        weight, bias = self._coded.read(lambda read: read.qkv(index)) or _stacked(*self._tensors.qkv_parts(index))
        return self._heads(index, weight, bias)

    def _latent(self, index: int, latent: LatentTensors) -> PackedLatent:
        query, query_in, query_expansion = latent.query(), latent.query_in(), latent.query_expansion()
        compress = latent.key_value_in()
        queries: PackedLinear | PackedExpansion
        if query is not None:
            queries = self._heads(index, query)
        else:
            assert query_in is not None
            assert query_expansion is not None
            queries = self._expansion(index, query_expansion)
            compress = torch.cat([query_in, compress])
        gates, (keys, values) = latent.gates(), latent.keys_and_values()
        return PackedLatent(
            self._library,
            queries,
            self._linear(compress, None),
            _float32(latent.row_norm()),
            [self._linear(of_head.t(), None) for of_head in keys],
            [self._linear(of_head, None) for of_head in values],
            num_shared=latent.config.rotary_dim,
            norm_eps=LATENT_EPS,
            gates=None if gates is None else self._linear(gates, None),
        )

    def _expansion(self, index: int, expansion: Expansion) -> PackedExpansion:
        return PackedExpansion(_float32(expansion.norm), self._heads(index, expansion.weight))

    def _feed_forward(self, index: int, feed: FeedForwardConfig) -> DenseFeedForward | PackedExperts:
        activation = ACTIVATIONS[feed.activation]
        if feed.experts is not None:
            return self._experts(index, feed, feed.experts)
        in_product = activates_in_product(activation, is_gated=feed.is_gated)
        parts = self._coded.read(lambda read: read.gate_up(index)) or _stacked(*self._tensors.gate_up_parts(index))
        gate_up = self._linear(*parts, gated=in_product)
        down = self.projection(lambda read: read.down(index))
        curve = torch.tensor([feed.limit]) if feed.activation == "limited_silu" else self._tensors.curve(index)
        norm = self._tensors.norm(index, self._config.names.down_norm)
        inner_norm = None if norm is None else _float32(norm.weight)
        return DenseFeedForward(gate_up, down, activation, feed.is_gated, curve, inner_norm)

    def _experts(self, index: int, feed: FeedForwardConfig, config: ExpertsConfig) -> PackedExperts:
        """Experts are packed one by one: their weights are many times those of a dense layer."""
        tensors, activation = self._tensors.experts(index), ACTIVATIONS[feed.activation]
        own, own_of_shared = (
            self._part.of_expert(size)[self._part.place.tensor_rank]
            for size in (feed.intermediate_size, config.shared_size)
        )

        def packed(number: int | None, columns: range = own) -> tuple[PackedLinear, PackedLinear]:
            gate_up = self._read(lambda read: read.experts(index).gate_up(number))
            down = self._read(lambda read: read.experts(index).down(number))
            return packed_expert(
                self._library.panel,
                gate_up,
                down,
                self._linear,
                activation,
                len(columns),
                is_gated=feed.is_gated,
            )

        router, bias = tensors.router()
        norms = tensors.norms()
        gate, correction = tensors.shared_gate(), tensors.correction()
        experts = [packed(number) for number in range(config.routing.num_experts)]
        if config.shared_size:
            experts.append(packed(None, own_of_shared))
        if gate is not None:
            router = torch.cat([router, gate])
        return PackedExperts(
            self._library,
            config.routing,
            PackedLinear(self._library, router, bias, _exact_form(router)),  # In 8 bits it would choose others.
            experts,
            None if correction is None else _float32(correction),
            has_gate=gate is not None,
            activation=activation,
            is_gated=feed.is_gated,
            inner_start=own.start,
            shared_start=own_of_shared.start,
            norms=None if norms is None else _norms_of_experts(norms),
            limits=torch.tensor([feed.limit, config.shared_limit]),
        )

    def projection(self, read: Projection, *, gated: bool = False) -> PackedLinear:
        """Return the projection that ``read`` gives, packed; ``gated``: gates, then ups."""
        return self._linear(*self._read(read), gated=gated)

    def _heads(self, index: int, weight: _Weight, bias: Tensor | None = None) -> PackedLinear:
        pad = partial(self._padded, index)
        padded: _Weight = pad(weight) if isinstance(weight, Tensor) else weight.with_rows(pad)
        return self._linear(padded, None if bias is None else pad(bias))

    def _output(self, index: int, weight: Tensor | CodedWeight, bias: Tensor | None) -> PackedLinear:
        if self._padding(index):  # Groups of inputs cannot be padded.
            wide = weight.float() if isinstance(weight, CodedWeight) else weight
            weight = self._padded(index, wide.t()).t()
        return self._linear(weight, bias)

    def _read(self, read: Projection) -> tuple[Tensor | CodedWeight, Tensor | None]:
        return self._coded.read(read) or read(self._tensors)

    def _linear(self, weight: _Weight, bias: Tensor | None, *, gated: bool = False) -> PackedLinear:
        if isinstance(weight, Tensor):
            weight = StackedRows((weight,))
        if isinstance(weight, StackedRows) and self._quantization == "none":
            held = weight.with_rows(lambda part: part.bfloat16()) if self._dtype == torch.bfloat16 else weight
            return PackedLinear(self._library, held, bias, self._form(weight), gated=gated)
        if isinstance(weight, StackedRows):
            is_for_4_bits = self._quantization == "int4"
            weight = rounded_to_4_bits(self._library, weight) if is_for_4_bits else rounded_to_8_bits(*weight.parts)
        if self._activations != "auto":
            weight = replace(weight, rounds_inputs=self._activations == "int8")
        as_dtype = self._activations == "auto" and self._dtype == torch.bfloat16
        may_be_narrow = as_dtype or self._activations == "bfloat16"
        return PackedLinear(self._library, weight, bias, gated=gated, may_be_narrow=may_be_narrow)

    def _form(self, weight: StackedRows) -> WeightForm:
        if self._dtype == torch.bfloat16:
            return WeightForm.PAIRS if self._library.multiplies_pairs else WeightForm.BFLOAT16
        return _exact_form(*weight.parts)

    def _padding(self, index: int) -> int:
        head_dim = self._config.attention_of(index).head_dim
        return self._library.padded_head_dim(head_dim) - head_dim

    def _padded(self, index: int, heads: Tensor) -> Tensor:
        return with_padded_heads(heads, self._config.attention_of(index).head_dim, self._padding(index))


def with_padded_heads(heads: Tensor, head_dim: int, padding: int) -> Tensor:
    """Pad the channels of ``[heads * head_dim, ...]`` with zeros."""
    if not padding:
        return heads
    by_head = heads.reshape(len(heads) // head_dim, head_dim, *heads.shape[1:])
    rest = (0, 0) * (by_head.dim() - 2)
    return functional.pad(by_head, (*rest, 0, padding)).flatten(0, 1)


def _stacked(weights: Sequence[Tensor], bias: Tensor | None) -> tuple[StackedRows, Tensor | None]:
    """Parts of several dtypes widen to one that holds all."""
    wide = functools.reduce(torch.promote_types, [weight.dtype for weight in weights])
    return StackedRows(tuple(weight.to(wide) for weight in weights)), bias


def _exact_form(*weights: Tensor) -> WeightForm:
    return WeightForm.BFLOAT16 if all(map(is_exact_in_bfloat16, weights)) else WeightForm.FLOAT32


def is_exact_in_bfloat16(weight: Tensor) -> bool:
    """Return whether bfloat16 holds every value: then it only saves memory."""
    if weight.dtype == torch.bfloat16:
        return True
    some = weight.reshape(-1)[:_ENOUGH_TO_TELL].float()
    if not torch.equal(some.bfloat16().float(), some):
        return False
    wide = weight.float()
    return torch.equal(wide.bfloat16().float(), wide)


def _norms_of_experts(norms: NormsOfExperts) -> ExpertNorms:
    own = norms._asdict()
    factors = own.pop("weights")
    return ExpertNorms(**{name: _float32(weight) for name, weight in own.items()}, factors=_float32(factors))


def _norm(norm: NormTensors) -> NormWeights:
    """Return a norm's weights, float32."""
    return NormWeights(_float32(norm.weight), None if norm.bias is None else _float32(norm.bias))


def _table(rotary: Rotary, max_model_len: int) -> Rotations:
    table = table_of(rotary, max_model_len)
    return Rotations(table.real.contiguous(), table.imag.contiguous())


def _float32(tensor: Tensor) -> Tensor:
    return placed(tensor, torch.float32, torch.device("cpu"))
