"""Gemma 4 in a GGUF file: layers of two kinds, some of which share keys and values, have inputs of their own, or experts.

Owns: its fields of config.json, and where its tensors stand. Must not know: other families, files.

``conversion/gemma.py`` of ggml-org/llama.cpp writes such files, and ``src/models/gemma4.cpp`` reads them.
"""

from collections.abc import Mapping

from torch import Tensor

from headway.gguf_import.family import Family, chosen
from headway.gguf_import.layout import DENSE, OUTSIDE, QK_NORMS, Layout, by_expert, usual
from headway.gguf_import.metadata import Metadata

_PATTERN, _WIDTHS = "attention.sliding_window_pattern", "feed_forward_length"
_FACTORS = "rope_freqs.weight"
_NOT_TURNED = 1e30
_SUPPRESSED = "tokenizer.ggml.suppress_tokens"
INPUTS_OUTSIDE = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
INPUTS_INSIDE = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_MIXTURE = {
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_BARE = frozenset({"layer_scalar", "router.scale", "router.per_expert_scale"})


def gemma4(metadata: Metadata) -> Family:
    """The text of Gemma 4. Rows of gates and ups of an expert are in one tensor, or in two in some files."""
    near, num_own = _near_layers(metadata), _layers_with_keys(metadata)
    head_dim, heads = metadata.integer("attention.key_length_swa"), metadata.kv_heads
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        metadata.refuse_unless(key, head_dim)
    if metadata.file.value(_SUPPRESSED, []):
        raise metadata.file.refuse(f"{_SUPPRESSED} is not supported; allowed: none")
    usual_heads = next((count for count, is_near in zip(heads, near, strict=True) if is_near), heads[0])
    wide = {"head_dim": metadata.head_dim}
    fields: dict[str, object] = {
        "dtype": "bfloat16",
        "layer_types": ["sliding_attention" if is_near else "full_attention" for is_near in near],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "head_dim": head_dim,
        "num_key_value_heads": usual_heads,
        "per_layer_config": {
            str(index): ({} if is_near else wide) | {"num_key_value_heads": count}
            for index, (is_near, count) in enumerate(zip(near, heads, strict=True))
        },
        "attention_k_eq_v": _are_values_keys(metadata, near[:num_own]),
        "num_kv_shared_layers": metadata.num_layers - num_own,
        "rope_parameters": _ropes(metadata),
        "final_logit_softcapping": metadata.value("final_logit_softcapping", 0.0) or None,
    }
    fields |= _inner_sizes(metadata, num_own) | _inputs(metadata) | _experts(metadata)
    layout = Layout(
        usual(DENSE, QK_NORMS, INPUTS_INSIDE, _MIXTURE, by_expert("experts")),
        outside=OUTSIDE | INPUTS_OUTSIDE,
        splits={"ffn_gate_up_exps": _gates_and_ups},
        bare=_BARE,
    )
    return Family("Gemma4ForCausalLM", layout, fields)


def _near_layers(metadata: Metadata) -> list[bool]:
    """Those with a window."""
    near = metadata.file.each(f"{metadata.architecture}.{_PATTERN}", bool)
    metadata.read.add(_PATTERN)
    if len(near) != metadata.num_layers or near[-1]:
        raise metadata.refuse(_PATTERN, f"a list of {metadata.num_layers}, the last of which is False")
    return near


def _layers_with_keys(metadata: Metadata) -> int:
    """The first ones. Those behind them read the keys and values of the last one of their kind."""
    key = "attention.shared_kv_layers"
    num_shared = metadata.integer(key, 0, low=0)
    if num_shared >= metadata.num_layers:
        raise metadata.refuse(key, f"0 to {metadata.num_layers - 1}")
    return metadata.num_layers - num_shared


def _are_values_keys(metadata: Metadata, near: list[bool]) -> bool:
    """Whether layers without a window have no values of their own."""
    lacking = [not metadata.has_tensor(f"blk.{index}.attn_v.weight") for index in range(len(near))]
    if any(lacking) and lacking != [not is_near for is_near in near]:
        name = f"blk.{lacking.index(True)}.attn_v.weight"
        raise metadata.file.refuse(f"tensor {name} is missing; allowed: only in all layers without a window")
    return any(lacking)


def _inner_sizes(metadata: Metadata, num_own: int) -> dict[str, object]:
    """Layers that share keys and values may be twice as wide."""
    sizes = metadata.inner_sizes
    first, last = sizes[0], sizes[-1]
    if last not in (first, 2 * first) or sizes != [first] * num_own + [last] * (metadata.num_layers - num_own):
        raise metadata.refuse(_WIDTHS, "one number, or twice as many in layers that share keys and values")
    return {"intermediate_size": first, "use_double_wide_mlp": last != first}


def _inputs(metadata: Metadata) -> dict[str, object]:
    size = metadata.integer("embedding_length_per_layer_input", 0, low=0)
    if not size:
        return {"hidden_size_per_layer_input": 0}
    words = metadata.file.shape("per_layer_token_embd.weight")[0]
    return {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": words}


def _experts(metadata: Metadata) -> dict[str, object]:
    count = metadata.integer("expert_count", 0, low=0)
    if not count:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": chosen(metadata),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _ropes(metadata: Metadata) -> dict[str, object]:
    """Frequencies of layers without a window have a factor each: 1, or one so large that nothing turns."""
    metadata.refuse_unless("rope.scaling.type", "none")
    metadata.refuse_unless("rope.scaling.factor", 1.0)
    pairs = metadata.head_dim // 2
    factors = metadata.file.wide(_FACTORS).tolist() if metadata.has_tensor(_FACTORS) else []
    count = factors.count(1.0)
    if len(factors) != pairs or not count or any(factor < _NOT_TURNED for factor in factors[count:]):
        raise metadata.file.refuse(f"{_FACTORS} is not supported; allowed: {pairs} factors, 1 and then {_NOT_TURNED:g}")
    far = {
        "rope_type": "proportional",
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
        # Somewhat more, for who reads it rounds the product down.
        "partial_rotary_factor": 1.0 if count == pairs else (2 * count + 0.25) / metadata.head_dim,
    }
    near = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    return {"full_attention": far, "sliding_attention": near}


def _gates_and_ups(stack: Tensor) -> Mapping[str, Tensor]:
    """Of experts: ``[experts, rows, ...]``."""
    return {
        f"experts.{number}.{name}": rows
        for number, both in enumerate(stack)
        for name, rows in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True)
    }
