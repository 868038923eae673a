"""Rotary positions in config.json.

Owns: the kinds of rope scaling, the context that they give. Must not know: families, frequencies.
"""

from collections.abc import Sequence

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import MAX_SIZE, ConfigFields
from headway_executor.models.attention_config import RopeConfig

_KINDS = "default, linear, dynamic, yarn, llama3"
THETA = 10_000.0
"""Of most families."""


def rope_section(fields: ConfigFields) -> ConfigFields:
    """``rope_scaling`` (transformers 4) wins over ``rope_parameters`` (5)."""
    return fields.section("rope_scaling") or fields.section("rope_parameters") or ConfigFields(fields.source, {})


def rotary_factor(
    fields: ConfigFields, default: float, field: str = "partial_rotary_factor", allowed: str = ""
) -> float:
    """The share of a head's channels that is rotated, inside or beside the section of rope.

    With ``allowed``, no other than the default is.
    """
    section = rope_section(fields)
    inner, outer = section.number("partial_rotary_factor", -1.0), fields.number(field, -1.0)
    for holder, value, name in ((section, inner, "partial_rotary_factor"), (fields, outer, field)):
        if value > 1.0 or (allowed and value not in (-1.0, default)):
            raise holder.refuse(name, allowed or "a number up to 1")
    return inner if inner > 0 else outer if outer > 0 else default


def read_rope(
    fields: ConfigFields,
    max_position_embeddings: int,
    *,
    section: ConfigFields | None = None,
    theta: float = THETA,
    theta_field: str = "rope_theta",
) -> RopeConfig:
    """The rope of a ``section``; theta may be inside or beside it, by default ``theta``."""
    section = rope_section(fields) if section is None else section
    theta = section.number("rope_theta", fields.number(theta_field, theta))
    field = "rope_type" if "rope_type" in section.values else "type"
    kind = section.values.get(field, "default")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind in ("linear", "dynamic"):
        factor = section.number("factor")
        return RopeConfig(kind=str(kind), theta=theta, factor=factor, original_context=max_position_embeddings)
    original_context = original_context_of(fields, section, max_position_embeddings)
    if kind == "llama3":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=section.number("factor"),
            original_context=original_context,
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
        )
    if kind == "yarn":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=section.number("factor", max_position_embeddings / original_context),
            original_context=original_context,
            attention_factor=section.optional_number("attention_factor"),
            beta_fast=section.number("beta_fast", 32.0),
            beta_slow=section.number("beta_slow", 1.0),
            mscale=section.optional_number("mscale"),
            mscale_all_dim=section.optional_number("mscale_all_dim"),
            truncate=section.flag("truncate", default=True),
        )
    raise section.refuse(field, _KINDS)


def read_long_rope(
    fields: ConfigFields,
    context: int,
    num_pairs: int,
    *,
    original: int | None = None,
    theta: float = THETA,
    factor_field: str = "attention_factor",
    names: Sequence[str] = ("longrope",),
) -> RopeConfig | None:
    """Longrope, of which ``names`` are; None: the file has none. Without ``original`` the context is, by default.

    Beyond the original context, it has other frequencies for all positions, also of keys that are cached: such sequences are
    not served. ``factor_field`` is what cosines and sines are multiplied by; ``theta`` a default.
    """
    section = rope_section(fields)
    if section.values.get("rope_type", section.values.get("type")) not in names:
        return None
    before = original_context_of(fields, section, original or context)
    return RopeConfig(
        kind="longrope",
        theta=section.number("rope_theta", fields.number("rope_theta", theta)),
        factor=section.number("factor", context / before),
        original_context=before,
        attention_factor=section.optional_number(factor_field),
        factors=section.numbers("short_factor", num_pairs),
    )


def layer_thetas(fields: ConfigFields, count: int) -> list[float | None]:
    """``layer_rope_theta``: of each of so many layers, 0 for one without a rope; None where the file does not say."""
    thetas = fields.values.get("layer_rope_theta")
    if thetas is None:
        return [None] * count
    is_list = isinstance(thetas, list) and len(thetas) == count
    if not (is_list and all(isinstance(theta, int | float) and theta >= 0 for theta in thetas)):
        raise fields.refuse("layer_rope_theta", f"a list of {count} numbers, 0 for a layer without a rope")
    return [float(theta) for theta in thetas]


def original_context_of(fields: ConfigFields, section: ConfigFields, default: int) -> int:
    """The context before rope scaling."""
    inner = section.integer("original_max_position_embeddings", default, low=2)
    return fields.integer("original_max_position_embeddings", inner, low=2)


def scaled_context(fields: ConfigFields, rope: RopeConfig, max_position_embeddings: int) -> int:
    """Linear, dynamic and yarn scaling stretch the original context by ``factor``.

    ``max_position_embeddings`` is the stretched length in some checkpoints, and always with Llama 3's scaling.
    """
    if rope.kind not in {"linear", "dynamic", "yarn"}:
        return max_position_embeddings
    stretched = rope.original_context * rope.factor
    if not stretched <= MAX_SIZE:
        raise ModelFilesError(
            f"{fields.source}: a rope factor of {rope.factor:g} stretches the context to {stretched:g}; "
            f"allowed: at most {MAX_SIZE}"
        )
    return max(max_position_embeddings, int(stretched))
