"""What mixtures read alike from config.json.

Owns: the numbers of experts. Must not know: one family, tensors.
"""

from headway_executor.checkpoint.fields import ConfigFields
from headway_kernels.routing import MOST_EXPERTS, Routing


def read_routing(fields: ConfigFields, count: tuple[str, int], *, chosen: int, is_normalised: bool) -> Routing:
    """Of how many experts each token goes through how many.

    ``count`` is the field of all experts and its default, ``chosen`` a default.
    """
    num_experts = fields.integer(*count, high=MOST_EXPERTS)
    num_chosen = fields.integer("num_experts_per_tok", chosen)
    if num_chosen > num_experts:
        raise fields.refuse("num_experts_per_tok", f"an integer from 1 to {num_experts}, the number of experts")
    return Routing(num_experts=num_experts, num_chosen=num_chosen, is_normalised=is_normalised)


def layers_named(fields: ConfigFields, field: str, num_layers: int) -> frozenset[int]:
    """A list of layers, by default none."""
    named = fields.values.get(field) or []
    if not isinstance(named, list) or any(layer not in range(num_layers) for layer in named):
        raise fields.refuse(field, f"a list of integers from 0 to {num_layers - 1}")
    return frozenset(named)
