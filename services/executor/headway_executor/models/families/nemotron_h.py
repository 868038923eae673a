"""Nemotron-H: layers of a state, attention, a feed-forward or experts alone, without positions."""

from collections.abc import Sequence

import msgspec

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import FeedForwardConfig, ModelConfig, NormConfig
from headway_executor.models.families.mamba import read_plain_state
from headway_executor.models.families.reading import (
    FULL,
    LINEAR,
    read_attention,
    read_feed_forward,
    read_model,
    refuse_unless,
)
from headway_executor.models.families.routing import read_corrected
from headway_executor.models.tensor_names import ExpertNames, TensorNames

_DENSE, _SPARSE = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _DENSE, "E": _SPARSE}
_OLDER = {"mamba": LINEAR, "attention": FULL}
_NOTHING = FeedForwardConfig(intermediate_size=0)
_NAMES = TensorNames(
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    attention_norm="norm",
    mlp_norm="norm",
    ignored_prefixes=("mtp.",),
)
_EXPERT_NAMES = ExpertNames(
    router="mixer.gate",
    correction="mixer.gate.e_score_correction_bias",
    expert="mixer.experts.{}.",
    gate_up=("up_proj",),
    shared="mixer.shared_experts.",
    shared_gate_up=("up_proj",),
    latent=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
)


def read_nemotron_h(fields: ConfigFields) -> ModelConfig:
    """``NemotronHForCausalLM``; the kinds of its layers say how many there are.

    Steps are as in the code that was published with the weights, from 0 to infinity. transformers' own class bounds those of
    prompts by ``time_step_min``, against ``time_step_limit``: see its pull request 48989.
    """
    kinds = _kinds(fields)
    fields = ConfigFields(fields.source, dict(fields.values) | {"num_hidden_layers": len(kinds)})
    for field in ("attention_bias", "mamba_proj_bias"):
        refuse_unless(fields, field, False)
    refuse_unless(fields, "sliding_window", None)
    refuse_unless(fields, "mamba_hidden_act", "silu")
    dense = read_feed_forward(
        fields,
        field="mlp_hidden_act",
        default="relu2",
        is_gated=False,
        has_bias=fields.flag("mlp_bias", default=False),
    )
    sparse = _experts(fields, dense) if _SPARSE in kinds else _NOTHING
    feeds = {_DENSE: dense, _SPARSE: sparse}
    state = read_plain_state(
        fields, heads=("mamba_num_heads", 128), value_dim=("mamba_head_dim", 64), key_dim=("ssm_state_size", 128)
    )
    return read_model(
        fields,
        default_context=4096,
        attention=read_attention(fields, head_dim=128, num_kv_heads=8),
        feed_forward=[feeds.get(kind, _NOTHING) for kind in kinds],
        norm=NormConfig(eps=fields.number("layer_norm_epsilon", 1e-5)),
        recurrences=[state if kind == LINEAR else None for kind in kinds],
        attends=[kind == FULL for kind in kinds],
        rotates=[False] * len(kinds),
        names=_NAMES,
    )


def _kinds(fields: ConfigFields) -> Sequence[str]:
    """A name or a letter of each layer."""
    field = next((name for name in ("layers_block_type", "layer_types") if fields.values.get(name)), None)
    if field is None:
        pattern = fields.values.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or not set(pattern) <= _LETTERS.keys():
            raise fields.refuse("hybrid_override_pattern", f"letters of {' '.join(_LETTERS)}, or layers_block_type")
        return [_LETTERS[letter] for letter in pattern]
    named = fields.values[field]
    kinds = (
        [_OLDER.get(kind, kind) if isinstance(kind, str) else "" for kind in named] if isinstance(named, list) else []
    )
    if not kinds or not set(kinds) <= set(_LETTERS.values()):
        raise fields.refuse(field, f"a list of names, each {', '.join(_LETTERS.values())}")
    return kinds


def _experts(fields: ConfigFields, dense: FeedForwardConfig) -> FeedForwardConfig:
    refuse_unless(fields, "mlp_bias", False)
    refuse_unless(fields, "n_shared_experts", 1)
    experts = msgspec.structs.replace(
        read_corrected(fields, ("n_routed_experts", 8), chosen=2),
        latent_size=fields.optional_integer("moe_latent_size") or 0,
        shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
        names=_EXPERT_NAMES,
    )
    return msgspec.structs.replace(
        dense, intermediate_size=fields.integer("moe_intermediate_size", 7688), experts=experts
    )
