"""Makes layers that keep several hidden states; see ``altup``.

Owns: which tensor becomes which part. Must not know: how a product or a norm is made, files.
"""

from collections.abc import Callable

from torch import Tensor

from headway_executor.models.altup import AlternatingLayer, States
from headway_executor.models.altup_tensors import LayerStates, StateTensors
from headway_executor.models.decoder import Attention, DecoderLayer, Product
from headway_executor.models.latent import InTurn


def alternating_layer(
    layer: DecoderLayer,
    tensors: LayerStates,
    *,
    linear: Callable[[Tensor], Product],
    norm: Callable[[Tensor], Product],
    output_scale: Tensor | None,
) -> AlternatingLayer:
    """Return ``layer`` as one of several states. Its router's norm has the factor on the router, too."""
    norms = (layer.attention_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm)
    attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = (one for one in norms if one is not None)
    assert isinstance(layer.attention, Attention)
    assert layer.feed_forward is not None
    assert layer.own_input is not None
    router_norm = tensors.router_norm.float() * (1 / len(tensors.router_norm))
    return AlternatingLayer(
        router=InTurn((norm(router_norm), linear(tensors.router))),
        predict=linear(tensors.predict),
        correct=linear(tensors.correct),
        output_scale=output_scale,
        beside=InTurn((linear(tensors.left), linear(tensors.right), norm(tensors.post_norm))),
        attention_norm=attention_norm,
        attention=layer.attention,
        attention_post_norm=attention_post_norm,
        mlp_norm=mlp_norm,
        feed_forward=layer.feed_forward,
        mlp_post_norm=mlp_post_norm,
        own_input=layer.own_input,
    )


def states_at_ends(tensors: StateTensors, linear: Callable[[Tensor], Product]) -> States:
    """Return what makes several states, and one of them again."""
    ways = (tensors.projections(), tensors.back())
    return States(*(tuple(map(linear, way)) for way in ways))
