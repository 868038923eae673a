"""What the architectures of GGUF files share.

Owns: what a family is, and fields that several read alike. Must not know: one family, files.
"""

from collections.abc import Mapping
from typing import NamedTuple

from headway.gguf_import.layout import Layout, Order, by_halves
from headway.gguf_import.metadata import Metadata

RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


class Family(NamedTuple):
    """``fields`` win over those that most families share.

    ``eps`` is the name of the norms' epsilon in config.json and its key in the file.
    """

    architecture: str
    layout: Layout
    fields: Mapping[str, object] = {}
    eps: tuple[str, str] = ("rms_norm_eps", RMS)


def turned(metadata: Metadata) -> dict[str, Order]:
    """Queries and keys whose channels llama.cpp has turned."""
    return {"attn_q": by_halves(metadata.num_heads), "attn_k": by_halves(metadata.num_kv_heads)}


def chosen(metadata: Metadata) -> int:
    """Experts of each token."""
    return metadata.integer("expert_used_count")


def partial(metadata: Metadata, rotary: int) -> dict[str, object]:
    """The share of a head that is rotated; somewhat more, for who reads it rounds the product down."""
    head_dim = metadata.head_dim
    return {"partial_rotary_factor": 1.0 if rotary == head_dim else (rotary + 0.25) / head_dim}


def partly(metadata: Metadata) -> dict[str, object]:
    """``rope_parameters`` of heads that are rotated in part."""
    return metadata.rope() | partial(metadata, metadata.integer("rope.dimension_count", metadata.head_dim))


def granite_factors(metadata: Metadata) -> dict[str, object]:
    """On embeddings, scores, the hidden state and logits."""
    return {
        "attention_multiplier": metadata.value("attention.scale", 0.0) or metadata.head_dim**-0.5,
        "embedding_multiplier": metadata.value("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.value("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.number("logit_scale"),
    }


def rotated_granite(metadata: Metadata) -> dict[str, object]:
    """The same, of models that all have positions."""
    metadata.refuse_unless("rope.scaling.finetuned", allowed=True)
    return granite_factors(metadata)


def windows(metadata: Metadata, *, every: int, default: int = 0) -> dict[str, object]:
    """Of ``every`` so many layers the last one has no window, or as a list says."""
    window = metadata.integer("attention.sliding_window", default, low=0)
    pattern = metadata.value("attention.sliding_window_pattern", every)
    if isinstance(pattern, int):
        pattern = [bool((index + 1) % pattern) if pattern else True for index in range(metadata.num_layers)]
    kinds = ["sliding_attention" if window and is_near else "full_attention" for is_near in pattern]
    return {"sliding_window": window or None, "layer_types": kinds}


HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
