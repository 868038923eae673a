"""The tensors of layers that keep several hidden states; see ``altup``.

Owns: their names and shapes. Must not know: files, how a layer uses them.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from headway_executor.models.config import ModelConfig
from headway_executor.models.stored_names import LAYERS

_TO_STATES, _BACK = "altup_projections", "altup_unembed_projections"
_Shapes = Iterator[tuple[str, tuple[int, ...]]]


class LayerStates(NamedTuple):
    """Of one layer: ``router`` ``[states, hidden]`` behind a norm; ``predict`` ``[states ** 2, states]``; ``correct``
    ``[states, states]``; ``output_scale`` ``[hidden]``; ``left`` ``[rank, hidden]`` and ``right`` ``[hidden, rank]``, with a
    norm behind.
    """

    router_norm: Tensor
    router: Tensor
    predict: Tensor
    correct: Tensor
    output_scale: Tensor
    left: Tensor
    right: Tensor
    post_norm: Tensor


_NAMES = (
    "altup.router_norm.weight",
    "altup.modality_router.weight",
    "altup.prediction_coefs.weight",
    "altup.correction_coefs.weight",
    "altup.correct_output_scale",
    "laurel.linear_left.weight",
    "laurel.linear_right.weight",
    "laurel.post_laurel_norm.weight",
)
"""In the order of ``LayerStates``."""


class StateTensors:
    """``read`` gives a whole tensor by its name."""

    def __init__(self, config: ModelConfig, read: Callable[[str], Tensor]) -> None:
        assert config.states is not None
        self._further = range(config.states.count - 1)
        self._layer = config.names.layer
        self._read = read

    def projections(self) -> list[Tensor]:
        """From embeddings to each further state: ``[hidden, hidden]``."""
        return [self._read(_outside(self._layer, _TO_STATES, index)) for index in self._further]

    def back(self) -> list[Tensor]:
        """From each further state: the same."""
        return [self._read(_outside(self._layer, _BACK, index)) for index in self._further]

    def of_layer(self, index: int) -> LayerStates:
        """What is in a layer."""
        return LayerStates(*(self._read(self._layer.format(index) + name) for name in _NAMES))


def state_shapes(config: ModelConfig) -> _Shapes:
    """Names and shapes of those outside of layers."""
    if config.states is None:
        return
    for index in range(config.states.count - 1):
        for name in (_TO_STATES, _BACK):
            yield _outside(config.names.layer, name, index), (config.hidden_size, config.hidden_size)


def layer_state_shapes(config: ModelConfig) -> _Shapes:
    """Names, behind a layer's prefix, and shapes of those in each layer."""
    if config.states is None:
        return
    count, rank, hidden = config.states.count, config.states.rank, config.hidden_size
    shapes = (
        (hidden,),
        (count, hidden),
        (count**2, count),
        (count, count),
        (hidden,),
        (rank, hidden),
        (hidden, rank),
        (hidden,),
    )
    yield from zip(_NAMES, shapes, strict=True)


def _outside(layer: str, name: str, index: int) -> str:
    return f"{layer.partition(LAYERS)[0]}{name}.{index}.weight"
