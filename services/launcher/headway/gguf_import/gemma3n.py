"""Gemma 3n in a GGUF file: several hidden states of a token, sparse activations, inputs of layers' own.

Owns: its fields of config.json, and where its tensors stand. Must not know: other families, files.

``conversion/gemma.py`` of ggml-org/llama.cpp writes such files, and ``src/models/gemma3n.cpp`` reads them.
"""

from statistics import NormalDist

from headway.gguf_import.family import Family
from headway.gguf_import.gemma4 import INPUTS_INSIDE, INPUTS_OUTSIDE
from headway.gguf_import.layout import DENSE, OUTSIDE, QK_NORMS, Layout, usual
from headway.gguf_import.metadata import Metadata

_PATTERN, _SPARSITY = "attention.sliding_window_pattern", "activation_sparsity_scale"
_OUTSIDE = {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
_SCALE = "altup.correct_output_scale"
_INSIDE = {
    "altup_router_norm": "altup.router_norm",
    "altup_router": "altup.modality_router",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": _SCALE,
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}


def gemma3n(metadata: Metadata) -> Family:
    """The text of Gemma 3n."""
    metadata.refuse_unless("altup.active_idx", 0)
    near = metadata.file.each(f"{metadata.architecture}.{_PATTERN}", bool)
    if len(near) != metadata.num_layers:
        raise metadata.refuse(_PATTERN, f"a list of {metadata.num_layers}")
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    fields: dict[str, object] = {
        "dtype": "bfloat16",
        "layer_types": ["sliding_attention" if is_near else "full_attention" for is_near in near],
        "sliding_window": metadata.integer("attention.sliding_window"),
        "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers", 0, low=0),
        "rope_parameters": {"full_attention": metadata.rope(), "sliding_attention": local},
        "intermediate_size": metadata.inner_sizes,
        "activation_sparsity_pattern": _shares(metadata),
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": metadata.file.shape("per_layer_token_embd.weight")[0],
        "altup_num_inputs": metadata.integer("altup.num_inputs"),
        "laurel_rank": metadata.file.shape("blk.0.laurel_l.weight")[0],
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }
    metadata.read.add(_PATTERN)
    layout = Layout(
        usual(DENSE, QK_NORMS, INPUTS_INSIDE, _INSIDE),
        outside=OUTSIDE | INPUTS_OUTSIDE | _OUTSIDE,
        bare=frozenset({_SCALE}),
    )
    return Family("Gemma3nForCausalLM", layout, fields)


def _shares(metadata: Metadata) -> list[float]:
    """A file has the bounds of a normal distribution that these shares are below; minus infinity: none is."""
    bounds = metadata.file.each(f"{metadata.architecture}.{_SPARSITY}", float)
    if len(bounds) != metadata.num_layers:
        raise metadata.refuse(_SPARSITY, f"a list of {metadata.num_layers}")
    return [NormalDist().cdf(bound) for bound in bounds]
