"""Where the tensors of a GGUF file stand in a checkpoint, and in which order their rows are.

Owns: names, orders of rows, weights that are stored in parts. Must not know: metadata, files that are written.

Names are those of the ``gguf`` package (``TENSOR_NAMES``). What llama.cpp's converter does to weights
(``conversion/*.py`` of ggml-org/llama.cpp) is undone here. Most of it moves rows, so blocks stay what they are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

Order: TypeAlias = Callable[[Tensor], Tensor]
"""Of the rows of a weight or a bias, or of their blocks."""
Split: TypeAlias = Callable[[Tensor], Mapping[str, Tensor]]
"""Of the rows of a weight, or of their blocks: weights by their names behind the layer's prefix."""

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
"""Braces: a stack of weights, one of each expert."""
_CORRECTIONS = (
    *("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias"),
    "block_sparse_moe.e_score_correction_bias",
)


def shared(prefix: str) -> dict[str, str]:
    """The places of an expert for all tokens."""
    return {f"{place}_shexp": name.replace("mlp.", prefix) for place, name in DENSE.items()}


def by_expert(prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> dict[str, str]:
    """The places of experts behind another prefix."""
    kinds = zip(("gate", "up", "down"), names, strict=True)
    return {f"ffn_{kind}_exps": f"{prefix}.{{}}.{name}" for kind, name in kinds}


@dataclass(frozen=True)
class Joined:
    """A weight that several tensors hold, of places in a layer. ``join`` puts them together.

    ``is_wide``: blocks would not stay whole. ``is_stack``: all experts in one tensor, as gpt-oss has them; there ``join``
    gives ``[experts, outputs, inputs]``.
    """

    name: str
    join: Callable[..., Tensor]
    is_wide: bool = False
    is_stack: bool = False

    def tensor(self, parts: list[Tensor], kind: str, *, end: str) -> tuple[str, Tensor]:
        """Its name behind the layer's prefix, and numbers (``kind`` "") or blocks; ``end``: weight or bias."""
        whole = self.join(*parts)
        if not self.is_stack:
            return f"{self.name}.{kind or end}", whole
        if end == "bias":
            return f"{self.name}_bias", whole
        return (f"{self.name}.{kind}", whole) if kind else (self.name, whole.transpose(1, 2))


@dataclass(frozen=True)
class Layout:
    """``inside`` names what follows ``layer``, the prefix of one; ``orders`` and ``joined`` go by place.

    ``norm_offset`` was added to the weights of norms, but not of those among ``plain_norms``. A name among ``bare`` has no
    end, such as ``.weight``; in a file, the weights of places among ``endless`` have none. ``splits`` cut rows into several weights, by name. Nothing needs layers from ``num_layers`` on.
    """

    inside: Mapping[str, str]
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    layer: str = "model.layers.{}."
    orders: Mapping[str, Order] = field(default_factory=dict)
    joined: Mapping[tuple[str, ...], Joined] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    norm_offset: float = 0.0
    endless: frozenset[str] = frozenset()
    plain_norms: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset({"self_attn.sinks", "self_attn.attention_sink_bias", *_CORRECTIONS})
    num_layers: int | None = None


def usual(*more: Mapping[str, str]) -> dict[str, str]:
    """The places of most layers, and ``more``, which win."""
    places = dict(_INSIDE)
    for some in more:
        places |= some
    return places


def by_halves(heads: int) -> Order:
    """llama.cpp turns neighbouring channels of some families, and stores their rows so; put the pairs half a head apart."""
    return lambda rows: rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).flatten(0, 2)


def by_head(heads: int) -> Order:
    """Queries, keys and values of all heads, one after the other, as those of head after head."""
    return lambda rows: rows.view(3, heads, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def by_group(heads: int, kv_heads: int) -> Order:
    """Queries, keys and values one after the other, as key-value head after key-value head, each behind its queries."""
    count = heads // kv_heads

    def ordered(rows: Tensor) -> Tensor:
        by_one = rows.view(heads + 2 * kv_heads, -1, *rows.shape[1:])
        queries, keys, values = torch.split(by_one, [heads, kv_heads, kv_heads])
        groups = queries.view(kv_heads, count, *queries.shape[1:])
        return torch.cat([groups, keys.unsqueeze(1), values.unsqueeze(1)], 1).flatten(0, 2)

    return ordered


def as_matrix(rows: Tensor) -> Tensor:
    """The one row of a weight."""
    return rows.reshape(1, -1)


def side_by_side(gates: Tensor, ups: Tensor) -> Tensor:
    """Of stacks ``[experts, rows, ...]``: each gate before its up."""
    return torch.stack([gates, ups], dim=2).flatten(1, 2)


def keys_and_values(keys: Tensor, values: Tensor) -> Tensor:
    """What expands a compressed row, ``[heads, rank, channels]`` and ``[heads, channels, rank]``, by head."""
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)


def alone(stack: Tensor) -> Tensor:
    """A stack as it is."""
    return stack
