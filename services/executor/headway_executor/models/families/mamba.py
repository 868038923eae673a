"""What families with states of Mamba 2 read alike from config.json.

Owns: fields and names of a state's tensors that several share. Must not know: one family.
"""

import math

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import RecurrenceConfig
from headway_executor.models.tensor_names import RecurrenceNames

_INFINITIES = (math.inf, {"__float__": "Infinity"})
"""As Python writes it in JSON, and as transformers 5 does."""


def names_behind(prefix: str, *, has_norm: bool = True) -> RecurrenceNames:
    """The usual names of a state's tensors."""
    return RecurrenceNames(
        inputs=(f"{prefix}.in_proj",),
        convolution=(f"{prefix}.conv1d",),
        output=f"{prefix}.out_proj",
        decay=f"{prefix}.A_log",
        step_bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        norm=f"{prefix}.norm" if has_norm else "",
    )


def refuse_bounds_of_steps(fields: ConfigFields) -> None:
    """``time_step_limit``, once ``mamba_dt_limit``; ``time_step_min`` and its like are of training."""
    for field in ("time_step_limit", "mamba_dt_limit"):
        if fields.values.get(field) not in (None, *([0.0, infinity] for infinity in _INFINITIES)):
            raise fields.refuse(field, "from 0 to infinity, or absent")


def read_state(fields: ConfigFields, inner: int | None = None, *, key_dim: int = 256, prefix: str) -> RecurrenceConfig:
    """From fields that begin with ``mamba_``; ``inner``: of all values, by default a multiple of the hidden size; ``key_dim`` is
    a default.
    """
    if inner is None:
        inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", 1)
    if inner % heads or heads % groups:
        raise fields.refuse("mamba_n_heads", f"a divisor of {inner} and a multiple of mamba_n_groups, {groups}")
    if fields.values.get("mamba_d_head") not in (None, "auto", inner // heads):
        raise fields.refuse("mamba_d_head", f"{inner // heads}, auto or absent")
    refuse_bounds_of_steps(fields)
    if fields.values.get("hidden_act") not in (None, "silu"):
        raise fields.refuse("hidden_act", "silu")
    return RecurrenceConfig(
        kind="selective",
        taps=fields.integer("mamba_d_conv", 4, low=2),
        num_heads=heads,
        num_key_heads=groups,
        key_dim=fields.integer("mamba_d_state", key_dim),
        value_dim=inner // heads,
        norm_dim=inner // groups,
        has_bias=fields.flag("mamba_proj_bias", default=False),
        has_convolution_bias=fields.flag("mamba_conv_bias", default=True),
        names=names_behind(prefix),
    )


def read_plain_state(
    fields: ConfigFields, *, heads: tuple[str, int], value_dim: tuple[str, int], key_dim: tuple[str, int]
) -> RecurrenceConfig:
    """From fields without such a beginning; those that differ by their names and defaults."""
    refuse_bounds_of_steps(fields)
    num_heads, groups = fields.integer(*heads), fields.integer("n_groups", 8)
    if num_heads % groups:
        raise fields.refuse(heads[0], f"a multiple of n_groups, {groups}")
    width = fields.integer(*value_dim)
    return RecurrenceConfig(
        kind="selective",
        taps=fields.integer("conv_kernel", 4, low=2),
        num_heads=num_heads,
        num_key_heads=groups,
        key_dim=fields.integer(*key_dim),
        value_dim=width,
        norm_dim=num_heads * width // groups,
        has_bias=fields.flag("use_bias", default=False),
        has_convolution_bias=fields.flag("use_conv_bias", default=True),
        names=names_behind("mixer"),
    )
