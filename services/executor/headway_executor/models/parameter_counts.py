"""How many numbers the weights of a model's layers have, whatever these are made of.

Owns: this count. Must not know: tensors, files.
"""

import math
from typing import NamedTuple

from headway_executor.models.config import ModelConfig
from headway_executor.models.tensor_shapes import expected_tensors


class LayerParameters(NamedTuple):
    """Of all layers: what every token goes through, and the experts of which it goes through ``share``."""

    of_all_tokens: int
    of_experts: int
    share: float


def layer_parameters(config: ModelConfig) -> LayerParameters:
    """Count them; mixtures whose layers choose by different shares are taken as those of the first."""
    prefixes = tuple(config.names.layer.format(index) for index in range(config.num_layers))
    named = expected_tensors(config).items()
    total = sum(math.prod(shape) for name, shape in named if name.startswith(prefixes))
    of_experts, share = 0, 1.0
    for layer in reversed(config.layers):
        feed = layer.feed_forward
        if feed.experts is None:
            continue
        routing, width = feed.experts.routing, feed.experts.latent_size or config.hidden_size
        of_experts += routing.num_experts * (3 if feed.is_gated else 2) * width * feed.intermediate_size
        share = routing.num_chosen / routing.num_experts
    return LayerParameters(total - of_experts, of_experts, share)
