"""The decoder of all supported families, as plain torch operators.

Owns: the forward pass. Must not know: paging, the use of logits.

Rotated pairs of channels lie side by side (see ``rope``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from types import MappingProxyType
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.models.alibi import ScoreBiases
from headway_executor.models.attention import AttentionPlan, AttentionShape
from headway_executor.models.attention_config import GateKind, Rotary
from headway_executor.models.config import Activation
from headway_executor.models.key_index import KeyIndex
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.recurrence import Recurrence, RowStates, StateSpan
from headway_executor.models.rope import rotate_

Product: TypeAlias = Callable[[Tensor], Tensor]
"""``[tokens, in] -> [tokens, out]``, a new tensor."""

Rotations: TypeAlias = Mapping[Rotary, Tensor]

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "relu": functional.relu,
        "relu2": lambda inputs: functional.relu(inputs).square(),
        "clamped_swish": lambda gates: functional.silu(1.702 * gates.clamp(max=_SWISH_LIMIT)) / 1.702,
    }
)


def xielu(inputs: Tensor, curve: Tensor) -> Tensor:
    """A parabola above 0, and an exponential below (Huang & Schlag 2024, arXiv 2411.13010).

    ``curve``: see ``ModelTensors``.
    """
    above, below, slope = curve
    return torch.where(inputs > 0, above * inputs * inputs, below * (inputs.expm1() - inputs)).add_(slope * inputs)


_SWISH_LIMIT = 7.0
"""Of gpt-oss (OpenAI 2025, arXiv 2508.10925)."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """``words`` ``[vocab, own_hidden]``; ``positions`` ``[context, own_hidden]``, or None."""

    words: Tensor
    positions: Tensor | None

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """``[tokens, own_hidden]``, of int64 ``[tokens]`` each."""
        hidden = functional.embedding(token_ids, self.words)
        return hidden if self.positions is None else hidden.add_(self.positions[positions])


@dataclass(frozen=True, slots=True)
class LayerTable:
    """The inputs of each layer's own: ``words`` ``[vocab, layers * size]``, and a projection of embeddings, behind which the
    ``norm`` is over ``size``.
    """

    words: Tensor
    projection: Product
    norm: Product
    size: int

    def __call__(self, token_ids: Tensor, embeddings: Tensor) -> Tensor:
        """``[tokens, layers, size]``, of int64 ``[tokens]`` and ``[tokens, hidden]``."""
        projected = self.projection(embeddings).mul_(embeddings.shape[1] ** -0.5).view(len(token_ids), -1, self.size)
        known = torch.where(token_ids < len(self.words), token_ids, 0)  # Those of pictures may be beyond the table.
        words = functional.embedding(known, self.words).mul_(self.size**0.5).view_as(projected)
        return self.norm(projected).add_(words).mul_(2**-0.5)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What a layer makes of its own inputs, those with the number ``index``."""

    index: int
    gate: Product
    activation: Activation
    back: Product
    post_norm: Product

    def add_to(self, hidden: Tensor, inputs: Tensor) -> None:
        """``hidden`` is changed in place; ``inputs`` of all layers."""
        hidden.add_(self.made_of(hidden, inputs))

    def made_of(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """What is added, ``[tokens, hidden]``; ``hidden`` gates it."""
        gates = ACTIVATIONS[self.activation](self.gate(hidden))
        return self.post_norm(self.back(gates.mul_(inputs[:, self.index])))


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root mean square normalisation in float32 (Zhang & Sennrich 2019, arXiv 1910.07467).

    The result is rounded to the weight's dtype before the product.
    """

    weight: Tensor
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise the last dimension into a new tensor."""
        wide = inputs.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normalised.to(self.weight.dtype).mul_(self.weight).to(inputs.dtype)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation in float32 (Ba et al. 2016, arXiv 1607.06450); ``weight`` and ``bias`` float32."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise the last dimension into a new tensor."""
        wide = functional.layer_norm(inputs.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return wide.to(inputs.dtype)


@dataclass(frozen=True, slots=True)
class SpanNorms:
    """RMS norms over all query heads, and over all key heads; ``num_heads`` are of queries."""

    queries: RmsNorm
    keys: RmsNorm
    num_heads: int

    def __call__(self, heads: Tensor) -> Tensor:
        """``[tokens, heads, head_dim]`` into a new tensor."""
        parts = (heads[:, : self.num_heads], heads[:, self.num_heads :])
        norms = (self.queries, self.keys)
        return torch.cat([norm(part.flatten(1)).view_as(part) for norm, part in zip(norms, parts, strict=True)], 1)


@dataclass(frozen=True, slots=True)
class HeadLayerNorms:
    """A layer norm of each head, of queries and then of keys; ``weight`` and ``bias`` (or None) float32,
    ``[heads + kv_heads, head_dim]``.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, heads: Tensor) -> Tensor:
        """``[tokens, heads + kv_heads, head_dim]`` into a new tensor."""
        normalised = functional.layer_norm(heads.float(), self.weight.shape[1:], eps=self.eps)
        normalised.mul_(self.weight)
        return (normalised if self.bias is None else normalised.add_(self.bias)).to(heads.dtype)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What layers need to know of a step's tokens; ``spans`` are those of rows with ``states``, in a model that has them."""

    attention: AttentionPlan
    states: RowStates | None
    spans: Sequence[StateSpan]
    layer_inputs: Tensor | None = None
    """``[tokens, layers, size]``, of a model that has some."""


@dataclass(frozen=True, slots=True)
class Attention:
    """``qkv`` gives its parts side by side, or with ``is_reading`` queries alone: keys and values are of a layer before.
    ``qk_norm`` normalises the first heads, or is None; with ``norms_rotated``, behind the rotation. A query sees ``window`` positions; None: all. ``rope`` None: no rotation.
    ``growth``: see ``query_factors``; None: 1. ``clip``: see ``AttentionConfig``. The last ``num_gates`` columns of ``qkv``
    are gates of what attention gives. ``index``: of the keys that are seen, or None; ``sees_as_before``: see ``LayerConfig``.
    """

    shape: AttentionShape
    place: KvPlace
    is_reading: bool
    qkv: Product
    num_normed: int
    num_rotated: int
    qk_norm: Product | None
    norms_rotated: bool
    rope: Rotary | None
    output: Product
    window: int | None
    sinks: Tensor | None
    growth: Tensor | None
    num_gates: int
    gate_kind: GateKind
    clip: float | None
    clips_normed: bool
    index: KeyIndex | None
    sees_as_before: bool

    def __call__(self, inputs: Tensor, rotations: Rotations, plan: StepPlan) -> Tensor:
        """``[tokens, hidden] -> [tokens, hidden]``; ``rotations`` ``[tokens, 1, head_dim // 2]``."""
        made = self.qkv(inputs)
        qkv, gates = torch.split(made, [made.shape[1] - self.num_gates, self.num_gates], 1)
        if self.clip is not None and not self.clips_normed:
            qkv.clamp_(-self.clip, self.clip)
        heads = qkv[:, : self.num_normed * self.shape.head_dim].view(-1, self.num_normed, self.shape.head_dim)
        if self.qk_norm is not None and not self.norms_rotated:
            heads.copy_(self.qk_norm(heads))
        if self.clip is not None and self.clips_normed:
            qkv.clamp_(-self.clip, self.clip)
        if self.rope is not None:
            rotate_(heads[:, : self.num_rotated], rotations[self.rope])
        if self.qk_norm is not None and self.norms_rotated:
            heads.copy_(self.qk_norm(heads))
        index = None
        if self.index is not None:
            assert self.rope is not None
            index = self.index(inputs, rotations[self.rope])
        attended = plan.attention.attend(
            self.shape,
            self.place,
            self.window,
            qkv,
            self.sinks,
            self.growth,
            is_reading=self.is_reading,
            index=index,
            sees_as_before=self.sees_as_before,
        )
        if self.num_gates:
            attended.mul_(gates.sigmoid_() if self.gate_kind == "sigmoid" else functional.softplus(gates))
        return self.output(attended)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer's state in place of its attention, or beside it."""

    inputs: Product
    recurrence: Recurrence
    output: Product

    def __call__(self, inputs: Tensor, rotations: Rotations, plan: StepPlan) -> Tensor:  # noqa: ARG002 - tokens have an order
        """``[tokens, hidden] -> [tokens, hidden]``."""
        assert plan.states is not None
        return self.output(self.recurrence(self.inputs(inputs), plan.states, plan.spans))


@dataclass(frozen=True, slots=True)
class Beside:
    """Attention and a state that read the same."""

    attention: Attention
    recurrent: Recurrent

    def __call__(self, inputs: Tensor, rotations: Rotations, plan: StepPlan) -> Tensor:
        """``[tokens, hidden] -> [tokens, hidden]``."""
        return self.attention(inputs, rotations, plan).add_(self.recurrent(inputs, rotations, plan))


@dataclass(frozen=True, slots=True)
class FeedForward:
    """``up`` gives gates, then ups, if it ``is_gated``. ``curve``: of "xielu"; ``limit``: see ``FeedForwardConfig``."""

    up: Product
    activation: Activation
    is_gated: bool
    down: Product
    curve: Tensor | None = None
    limit: float = math.inf
    sparsity: float = 0.0

    def __call__(self, inputs: Tensor) -> Tensor:
        """``[tokens, hidden] -> [tokens, hidden]``."""
        return self.down(self.activated(inputs))

    def activated(self, inputs: Tensor) -> Tensor:
        """What goes into ``down``."""
        if self.curve is not None:
            return xielu(self.up(inputs), self.curve)
        if not self.is_gated:
            return ACTIVATIONS[self.activation](self.up(inputs))
        gate, up = self.up(inputs).chunk(2, dim=1)
        if self.sparsity:
            gate = _beyond(gate, self.sparsity)
        if self.activation == "limited_silu":
            return functional.silu(gate).clamp_(max=self.limit).mul_(up.clamp(-self.limit, self.limit))
        if self.activation == "clamped_swish":
            up = up.clamp(-_SWISH_LIMIT, _SWISH_LIMIT) + 1
        return ACTIVATIONS[self.activation](gate).mul_(up)


def _beyond(gates: Tensor, share: float) -> Tensor:
    """What gates are above the bound that a ``share`` of a normal distribution is below, or 0."""
    factor = torch.tensor(NormalDist().inv_cdf(share), dtype=gates.dtype, device=gates.device)
    spread = gates.std(-1, keepdim=True, unbiased=False)
    return functional.relu(gates - (gates.mean(-1, keepdim=True) + spread * factor))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Norms that a model does not have are None, and so are attention and a feed-forward. ``residual`` is a factor on what is
    added to the hidden state. With ``is_parallel``, attention and feed-forward read the same hidden state. With ``norms_sums``,
    norms behind attention and feed-forward are of the hidden state after the addition. ``factor`` multiplies that behind the
    layer.
    """

    attention_norm: Product | None
    attention: Attention | Recurrent | Beside | None
    attention_post_norm: Product | None
    mlp_norm: Product | None
    feed_forward: Product | None
    mlp_post_norm: Product | None
    residual: float
    is_parallel: bool
    norms_sums: bool
    own_input: LayerInput | None = None
    factor: Tensor | None = None

    def __call__(self, hidden: Tensor, rotations: Rotations, plan: StepPlan) -> None:
        """Add attention and feed-forward to ``hidden`` (``[tokens, hidden]``) in place."""
        inputs = None
        if self.attention is not None:
            attended = self.attention(_normed(self.attention_norm, hidden), rotations, plan)
            inputs = _normed(self.mlp_norm, hidden) if self.is_parallel else None
            _add(self, hidden, attended, self.attention_post_norm)
        if self.feed_forward is not None:
            made = self.feed_forward(_normed(self.mlp_norm, hidden) if inputs is None else inputs)
            _add(self, hidden, made, self.mlp_post_norm)
        if self.own_input is not None and plan.layer_inputs is not None:
            self.own_input.add_to(hidden, plan.layer_inputs)
        if self.factor is not None:
            hidden.mul_(self.factor)


def _add(layer: DecoderLayer, hidden: Tensor, made: Tensor, norm: Product | None) -> None:
    """What attention or a feed-forward has made, behind its norm."""
    hidden.add_(made if layer.norms_sums else _normed(norm, made), alpha=layer.residual)
    if layer.norms_sums and norm is not None:
        hidden.copy_(norm(hidden))


def _normed(norm: Product | None, inputs: Tensor) -> Tensor:
    return inputs if norm is None else norm(inputs)


class FurtherStates(Protocol):
    """Makes several hidden states of each token's, and one of them again."""

    def begin(self, hidden: Tensor) -> Tensor:
        """``[tokens, hidden]`` to ``[states, tokens, hidden]``."""
        ...

    def end(self, states: Tensor) -> Tensor:
        """The way back."""
        ...


Layer: TypeAlias = Callable[[Tensor, Rotations, StepPlan], None]
"""Changes the hidden state of the tokens, or their several states, in place."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The layers of a model or of a stage; ``rotations`` complex64, ``[context, head_dim // 2]``."""

    rotations: Rotations
    layers: tuple[Layer, ...]
    final_norm: Product | None
    head: Product | None
    biases: ScoreBiases | None = None
    table: LayerTable | None = None
    states: FurtherStates | None = None
    logits_factor: float = 1.0
    logits_softcap: float | None = None

    def run_layers(self, hidden: Tensor, positions: Tensor, plan: StepPlan) -> None:
        """Store keys and values; change ``hidden`` (``[tokens, hidden]``) in place. ``positions`` int64, ``[tokens]``."""
        rotations = {rope: table.index_select(0, positions).unsqueeze(1) for rope, table in self.rotations.items()}
        changed = hidden if self.states is None else self.states.begin(hidden)
        for layer in self.layers:
            layer(changed, rotations, plan)
        if self.states is not None:
            hidden.copy_(self.states.end(changed))

    def logits(self, hidden: Tensor, sampled: Tensor) -> Tensor:
        """Return logits, ``[n, vocab]``, in the model's dtype; without a head, what it would get.

        ``sampled`` int64, ``[n]``, indices of tokens.
        """
        normed = self.normed(hidden, sampled)
        if self.head is None:
            return normed
        logits = self.head(normed)
        if self.logits_factor != 1:
            logits.mul_(self.logits_factor)
        return logits if self.logits_softcap is None else capped_(logits, self.logits_softcap)

    def normed(self, hidden: Tensor, places: Tensor) -> Tensor:
        """Return hidden states behind the final norm, ``[n, hidden]``. ``places`` int64, ``[n]``, indices of tokens."""
        return _normed(self.final_norm, hidden.index_select(0, places))


def capped_(values: Tensor, softcap: float) -> Tensor:
    """Bound ``values`` smoothly, in place."""
    return values.div_(softcap).tanh_().mul_(softcap)
