"""The tensors of a checkpoint in the model's form.

Owns: reading them, tied and fused ones too. Must not know: files.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.models.altup_tensors import StateTensors
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import ModelConfig, NormConfig
from headway_executor.models.expert_tensors import ExpertTensors
from headway_executor.models.fused_heads import by_block, by_group
from headway_executor.models.head_norm_tensors import HeadNormTensors, with_offset
from headway_executor.models.latent_tensors import LatentTensors
from headway_executor.models.layer_input_tensors import LayerInputTensors
from headway_executor.models.part import ModelPart, whole
from headway_executor.models.recurrent_tensors import RecurrentTensors, times
from headway_executor.models.rope import sinusoids
from headway_executor.models.stored_names import TensorSource, head_name
from headway_executor.models.tensor_shapes import CURVE, bias_of, qkv_names, qkv_widths

ChannelOrder: TypeAlias = Callable[[int, AttentionConfig], Tensor]
"""Of the channels of a head of so many: int64, ``[head_dim]``. See ``rope``."""


_ROWS_AT_ONCE = 4096
"""Of an embedding that is normalised: of all in float32, the largest vocabularies would take gigabytes."""


class NormTensors(NamedTuple):
    """``weight`` and ``bias`` (or None) of a norm, both ``[hidden]``."""

    weight: Tensor
    bias: Tensor | None


class LayerNorms(NamedTuple):
    """Before and behind attention, before and behind the feed-forward; None where there is none."""

    attention: NormTensors | None
    attention_post: NormTensors | None
    mlp: NormTensors | None
    mlp_post: NormTensors | None


def _changed(words: Tensor, norm: NormTensors | None, projection: Tensor | None, config: NormConfig) -> Tensor:
    """An embedding, projected or normalised as a token's would be, since it depends on nothing else: ``[vocab, hidden]``."""
    if projection is not None:
        words = functional.linear(words, projection.to(words.dtype))
    if norm is None:
        return words
    weight, bias = norm.weight.float(), None if norm.bias is None else norm.bias.float()
    eps, made = config.eps if config.embedding_eps is None else config.embedding_eps, torch.empty_like(words)
    for some, out in zip(torch.split(words, _ROWS_AT_ONCE), torch.split(made, _ROWS_AT_ONCE), strict=True):
        wide = some.float()
        if config.kind == "rms":
            out.copy_(functional.rms_norm(wide, weight.shape, weight, eps))
        else:
            out.copy_(functional.layer_norm(wide, weight.shape, weight, bias, eps))
    return made


class ModelTensors:
    """Reads the tensors of a checked checkpoint, straight to ``device``, if any; of a ``part`` only its own.

    A result may be the mapped file: do not write to it or keep it. ``channel_order`` orders the channels of query and key
    heads. In shapes, ``heads``, ``kv_heads``, ``own_hidden``, ``own_inner`` and ``own_vocab``
    count what the part has, ``own_inner`` of the layer's size; the fast form has all outputs and its own inputs instead.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: TensorSource,
        channel_order: ChannelOrder,
        device: torch.device | None = None,
        part: ModelPart | None = None,
    ) -> None:
        self._config = config
        self._names = config.names
        self._head = head_name(config.names, checkpoint)
        self._checkpoint = checkpoint
        self._orders = {kind: _order_of(channel_order, kind, device) for kind in config.attentions}
        self._index_order = _order_of_index(channel_order, config.attention, device)
        self._device = device
        self._part = whole(config) if part is None else part
        self.head_norms = HeadNormTensors(config, self._part, self._read, self._reordered, device)

    def embedding(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[vocab, own_hidden]``, in ``dtype`` if the model multiplies it."""
        name = self._names.embedding
        own = self._part.own_hidden
        if self._names.embedding_norm is None and self._names.projections is None:
            stored = self._read_named(name if name in self._checkpoint else self._head, columns=own)
        else:
            words = self._here(self._checkpoint.read(name if name in self._checkpoint else self._head)).to(dtype)
            norm, projections = self._names.embedding_norm, self._names.projections
            changed = _changed(
                words,
                None if norm is None else self._norm(norm, is_weighed=self._config.norm.embedding_has_weight),
                None if projections is None else self._read_named(f"{projections[0]}.weight"),
                self._config.norm,
            )
            stored = changed[:, own.start : own.stop]
        factor = self._config.scalings.embedding
        # The factor is rounded first, as in transformers.
        return stored if factor == 1 else stored.to(dtype) * torch.tensor(factor, dtype=dtype, device=stored.device)

    def positions(self, count: int) -> Tensor | None:
        """``[count, own_hidden]``, of the first positions; or None."""
        name, first, own = self._names.positions, self._config.first_position, self._part.own_hidden
        if self._config.has_sinusoids:
            table = self._here(sinusoids(torch.arange(first, first + count), self._config.hidden_size))
            return table[:, own.start : own.stop]
        return None if name is None else self._read_named(name, columns=own)[first : first + count]

    def head(self) -> Tensor:
        """``[own_vocab, hidden]``; of the embedding if the two are tied."""
        tied = self._config.tie_word_embeddings and self._names.embedding in self._checkpoint
        head = self._read_named(self._names.embedding if tied else self._head, self._part.own_vocab)
        if self._names.projections is None:
            return head
        # One product in place of two: the head of a projected hidden state.
        return head.float() @ self._read_named(f"{self._names.projections[1]}.weight").float()

    def head_bias(self) -> Tensor | None:
        """``[own_vocab]``, or None."""
        return self._read_named(bias_of(self._head), self._part.own_vocab) if self._config.has_head_bias else None

    def before_head(self) -> tuple[Tensor, Tensor | None, NormTensors] | None:
        """``[hidden, hidden]``, a bias, and the norm behind it; or None."""
        before = self._config.before_head
        if before is None:
            return None
        bias = self._read_named(f"{before.dense}.bias") if before.has_bias else None
        return self._read_named(f"{before.dense}.weight"), bias, self._norm(before.norm)

    def final_norm(self) -> NormTensors | None:
        """The norm before the head, or None."""
        if self._names.final_norm is None:
            return None
        return self._norm(self._names.final_norm, offset=self._config.norm.final_offset)

    def norm(self, index: int, name: str | None) -> NormTensors | None:
        """The norm of that ``name`` in a layer; None without a name."""
        return None if name is None else self._norm(self._names.layer.format(index) + name)

    def norms_of_layer(self, index: int) -> LayerNorms:
        """Those that the layer has."""
        names = self._config.norms_of(index)
        return LayerNorms(
            attention=self.norm(index, names.attention),
            attention_post=self.norm(index, names.attention_post),
            mlp=self.norm(index, names.mlp),
            mlp_post=self.norm(index + self._names.has_norms_of_next, names.mlp_post),
        )

    def layer_factor(self, index: int) -> Tensor | None:
        """``[1]``: what multiplies the hidden state behind a layer, or None."""
        return None if self._names.layer_factor is None else self._read(index, self._names.layer_factor)

    def layer_inputs(self) -> LayerInputTensors | None:
        """Of the inputs that layers have of their own, which every part has whole; or None."""
        inputs, read = self._config.layer_inputs, self._checkpoint.read
        if inputs is None:
            return None
        return LayerInputTensors(inputs, self._names.layer, lambda name: self._here(read(name)))

    def states(self) -> StateTensors | None:
        """Of a model whose tokens have several states, which every part has whole; or None."""
        read = self._checkpoint.read
        return None if self._config.states is None else StateTensors(self._config, lambda name: self._here(read(name)))

    def qkv(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[(heads + 2 * kv_heads) * head_dim, hidden]``, and bias: queries, keys, values, and gates of as many heads; queries
        alone of a layer that reads the keys of another.
        """
        weights, bias = self.qkv_parts(index)
        return torch.cat(weights), bias

    def qkv_parts(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """As ``qkv``; the weight is in parts, whose rows follow each other."""
        bias = torch.cat(self._qkv(index, "bias")) if self._config.attention.qkv_bias else None
        return self._qkv(index, "weight"), bias

    def output(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[own_hidden, all heads * value_dim]``, and bias."""
        attention = self._config.attention_of(index)
        heads = _channels(attention.stored_value_dim, self._part.heads_of(attention.num_heads))
        weight, bias = self._back(index, self._names.output, heads, has_bias=attention.output_bias)
        return times(weight, self._config.multipliers.output), bias

    def wide_output(self, index: int) -> tuple[Tensor, Tensor | None]:
        """As ``output``, ``[own_hidden, all heads * head_dim]``."""
        (weight, bias), attention = self.output(index), self._config.attention_of(index)
        return (with_zeros(weight.t(), attention).t() if attention.value_dim else weight), bias

    def gate_up(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[2 * own_inner, hidden]``, and bias: gates, then ups; without a gate, ``[own_inner, hidden]``."""
        weights, bias = self.gate_up_parts(index)
        return torch.cat(weights), bias

    def gate_up_parts(self, index: int) -> tuple[list[Tensor], Tensor | None]:
        """As ``gate_up``; the weight is in parts, whose rows follow each other."""
        has_bias = self._config.layers[index].feed_forward.has_bias
        return self._gate_up(index, "weight"), torch.cat(self._gate_up(index, "bias")) if has_bias else None

    def down(self, index: int) -> tuple[Tensor, Tensor | None]:
        """``[own_hidden, intermediate]``, and bias."""
        feed = self._config.layers[index].feed_forward
        own = self._part.own_inner(feed.intermediate_size)
        weight, bias = self._back(index, self._names.down, own, has_bias=feed.has_bias)
        return times(weight, self._config.multipliers.down), bias

    def curve(self, index: int) -> Tensor | None:
        """Of "xielu", float32, ``[3]``, or None: a, b and c of ``a x^2 + c x`` above 0, and ``b (e^x - 1 - x) + c x`` below."""
        if self._config.layers[index].feed_forward.activation != "xielu":
            return None
        above, below, slope = (self._read(index, f"{self._names.curve}.{name}").float().view(()) for name in CURVE)
        return torch.stack([functional.softplus(above), slope + functional.softplus(below), slope])

    def latent(self, index: int) -> LatentTensors | None:
        """Of a model with latent attention, instead of ``qkv`` and ``output``."""
        latent = self._config.attention.latent
        if latent is None:
            return None
        order = self._orders[self._config.attention_of(index)]
        return LatentTensors(latent, self._part, order, partial(self._read, index), self._index_order)

    def recurrence(self, index: int) -> RecurrentTensors:
        """Of a layer with a state."""
        recurrence = self._config.layers[index].recurrence
        assert recurrence is not None
        return RecurrentTensors(recurrence, partial(self._read, index), self._config.multipliers)

    def sinks(self, index: int) -> Tensor | None:
        """``[heads]``, or None."""
        attention = self._config.attention_of(index)
        name = self._names.sinks if attention.has_sinks else None
        return None if name is None else self._read(index, name, self._part.heads_of(attention.num_heads))

    def experts(self, index: int) -> ExpertTensors:
        """Of a layer that has experts."""
        feed = self._config.layers[index].feed_forward
        assert feed.experts is not None

        def read(name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
            return self._here(self._checkpoint.read(self._name(index, name), rows, columns))

        return ExpertTensors(feed.experts, feed, self._part, read)

    def _norm(self, name: str, *, offset: float | None = None, is_weighed: bool = True) -> NormTensors:
        """``offset``: its own, if it has one."""
        if self._config.norm.has_weight and is_weighed:
            own = self._config.norm.offset if offset is None else offset
            weight = with_offset(own, self._read_named(f"{name}.weight"))
        else:
            weight = self._here(torch.ones(self._config.hidden_size))
        return NormTensors(weight, self._read_named(f"{name}.bias") if self._config.norm.has_bias else None)

    def _read(self, index: int, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        return self._read_named(self._name(index, name), rows, columns)

    def _name(self, index: int, name: str) -> str:
        return self._names.layer.format(index) + name

    def _read_named(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        if self._part.is_whole_stage:
            rows = columns = None
        return self._here(self._checkpoint.read(name, rows, columns))

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor if self._device is None else tensor.to(self._device)

    def _back(self, index: int, name: str, own_inputs: range, *, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        """A projection back to the hidden state."""
        if not self._part.is_fast:
            own = self._part.own_hidden
            weight = self._projection(index, name, "weight", own)
            return weight, self._read(index, f"{name}.bias", own) if has_bias else None
        has_bias = has_bias and self._part.place.tensor_rank == 0  # The ranks' outputs are added.
        weight = self._projection(index, name, "weight", columns=own_inputs)
        return weight, self._read(index, f"{name}.bias") if has_bias else None

    def _projection(
        self, index: int, name: str, kind: str, rows: range | None = None, columns: range | None = None
    ) -> Tensor:
        """A weight or bias of a layer; rows are outputs."""
        if kind == "weight" and self._names.has_inputs_first:
            return self._read(index, f"{name}.{kind}", columns, rows).t().contiguous()
        return self._read(index, f"{name}.{kind}", rows, columns)

    def _gate_up(self, index: int, kind: str) -> list[Tensor]:
        feed = self._config.layers[index].feed_forward
        count = 2 if feed.is_gated else 1
        widths, owns = (feed.intermediate_size,) * count, (self._part.own_inner(feed.intermediate_size),) * count
        parts = self._parts(index, self._names.gate_up, kind, widths, owns)
        parts = parts[::-1] if self._names.has_ups_first else parts
        return [times(parts[0], self._config.multipliers.gate), *parts[1:]]

    def _qkv(self, index: int, kind: str) -> list[Tensor]:
        attention, modules = self._config.attention_of(index), qkv_names(self._config, index)
        own_heads = self._part.heads_of(attention.num_heads)
        heads = _channels(attention.head_dim, own_heads)
        own_kv_heads = self._part.kv_heads_of(attention.num_kv_heads)
        kv_heads, of_values = (_channels(dim, own_kv_heads) for dim in (attention.head_dim, attention.stored_value_dim))
        apart: list[Tensor] = []
        if len(modules) < len(self._names.qkv):  # No values, or neither these nor keys.
            owns = (heads, kv_heads)[: len(modules)]
            parts = self._parts(index, modules, kind, qkv_widths(self._config, index), owns)
            if len(parts) == 1:
                return [times(self._reordered(index, parts[0]), self._config.multipliers.queries)]
            queries, keys, values = parts[0], parts[1], parts[1]
        elif self._names.is_fused_by_head:
            (name,), own_kv = self._names.qkv, self._part.kv_heads
            width = (self._config.num_heads // self._config.num_kv_heads + 2) * self._config.head_dim
            stored = self._projection(index, name, kind, range(width * own_kv.start, width * own_kv.stop))
            queries, keys, values = by_group(stored, self._config, self._part)
        elif self._names.blocks:
            stored = self._here(self._checkpoint.read(self._name(index, f"{self._names.qkv[0]}.{kind}")))
            queries, keys, values = by_block(stored, self._config, self._part)
        else:
            gates = self._config.attention.gates
            of_queries = range(2 * heads.start, 2 * heads.stop) if gates == "by_head" else heads
            of_gates = {"apart": [heads], "of_heads": [own_heads]}
            owns_all = (of_queries, kv_heads, of_values, *of_gates.get(gates, []))
            queries, keys, values, *apart = self._parts(
                index, self._names.qkv, kind, qkv_widths(self._config, index), owns_all
            )
            if gates == "by_head":
                pairs = queries.view(-1, 2, self._config.head_dim, *queries.shape[1:])
                queries, *apart = (part.flatten(0, 1) for part in pairs.unbind(1))
            elif gates == "of_heads":  # Each channel has the gate of its head.
                apart = [apart[0].repeat_interleave(attention.head_dim, 0)]
        factors = self._config.multipliers
        queries = times(self._reordered(index, queries), factors.queries)
        if attention.value_dim:
            values = with_zeros(values, attention)
        return [queries, times(self._reordered(index, keys), factors.keys), times(values, factors.values), *apart]

    def _parts(
        self, index: int, names: Sequence[str], kind: str, widths: Sequence[int], owns: Sequence[range]
    ) -> list[Tensor]:
        """The own rows of parts that are a tensor each, or one behind the other in one."""
        if len(names) == len(owns):
            return [self._projection(index, name, kind, own) for name, own in zip(names, owns, strict=True)]
        name = self._name(index, f"{names[0]}.{kind}")
        starts = itertools.accumulate(widths, initial=0)
        # The last start is the end.
        rows = [range(start + own.start, start + own.stop) for start, own in zip(starts, owns, strict=False)]

        def read(wanted: range) -> Tensor:
            """Some outputs, though the stage may be whole."""
            if kind == "weight" and self._names.has_inputs_first:
                return self._here(self._checkpoint.read(name, columns=wanted).t().contiguous())
            return self._here(self._checkpoint.read(name, wanted))

        return [read(wanted) for wanted in rows]

    def _reordered(self, index: int, heads: Tensor) -> Tensor:
        """``heads`` is ``[heads * head_dim, ...]``."""
        attention = self._config.attention_of(index)
        order = self._orders[attention]
        if bool((order.diff() == 1).all()):
            return heads
        by_head = heads.reshape(-1, attention.head_dim, *heads.shape[1:])
        return by_head[:, order].flatten(0, 1)


def with_zeros(values: Tensor, attention: AttentionConfig) -> Tensor:
    """Values of heads, ``[heads * value_dim, ...]``, as wide as keys; also codes, whose scales are 0 there."""
    by_head = values.reshape(-1, attention.stored_value_dim, *values.shape[1:])
    rest = (0, 0) * (by_head.dim() - 2)
    return functional.pad(by_head, (*rest, 0, attention.head_dim - attention.stored_value_dim)).flatten(0, 1)


def _channels(head_dim: int, heads: range) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _order_of(channel_order: ChannelOrder, attention: AttentionConfig, device: torch.device | None) -> Tensor:
    order = channel_order(attention.head_dim, attention)
    return order if device is None else order.to(device)


def _order_of_index(
    channel_order: ChannelOrder, attention: AttentionConfig, device: torch.device | None
) -> Tensor | None:
    """Of the heads of an index of keys, which may be rotated otherwise than those of attention; None: there is none."""
    index = None if attention.latent is None else attention.latent.index
    if index is None:
        return None
    like_heads = msgspec.structs.replace(attention, head_dim=index.head_dim, is_interleaved=index.is_interleaved)
    return _order_of(channel_order, like_heads, device)
