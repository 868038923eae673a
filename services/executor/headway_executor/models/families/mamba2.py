"""Mamba 2: layers of a state alone."""

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import FeedForwardConfig, ModelConfig, NormConfig
from headway_executor.models.families.mamba import read_plain_state
from headway_executor.models.families.reading import num_layers_of, read_model, refuse_unless
from headway_executor.models.tensor_names import TensorNames

MAMBA_CONTEXT = 262_144
"""Nothing in a model bounds it; its steps and tables want a bound, and Codestral has been tested up to this one."""
NO_ATTENTION = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=2, rotary_dim=2, scale=1.0)
MAMBA_NAMES = TensorNames(
    embedding="backbone.embeddings.weight",
    final_norm="backbone.norm_f",
    layer="backbone.layers.{}.",
    attention_norm="norm",
)


def read_mamba2(fields: ConfigFields) -> ModelConfig:
    """``Mamba2ForCausalLM``."""
    refuse_unless(fields, "hidden_act", "silu")
    state = read_plain_state(fields, heads=("num_heads", 128), value_dim=("head_dim", 64), key_dim=("state_size", 128))
    inner, num_layers = fields.integer("expand", 2) * fields.integer("hidden_size"), num_layers_of(fields)
    if state.inner != inner:
        raise fields.refuse("num_heads", f"a divisor of {inner}, and head_dim the rest of it")
    return read_model(
        fields,
        default_context=MAMBA_CONTEXT,
        attention=NO_ATTENTION,
        feed_forward=FeedForwardConfig(intermediate_size=0),
        norm=NormConfig(eps=fields.number("layer_norm_epsilon", 1e-5), rounds_first=True),
        recurrences=[state] * num_layers,
        names=MAMBA_NAMES,
    )
