"""Adapters of experts that lie in one tensor, as PEFT saves them (``target_parameters``).

Owns: their names and the order of their ranks. Must not know: files, how an adapter is computed.

transformers has the experts of a layer in two parameters, ``gate_up_proj`` and ``down_proj`` of the module ``mlp.experts``,
or ``block_sparse_moe.experts`` in Granite.
PEFT wraps one parameter after the other, so the names tell them apart only by the depth: with both, the inner one
(``mlp.experts.base_layer``) is ``gate_up_proj``; with one alone, ``target_parameters`` says which it is. ``lora_A`` is
``[experts * rank, in]``, expert after expert; ``lora_B`` ``[out, rank * experts]``, rank after rank (``ParamWrapper`` in
``peft/tuners/lora/layer.py``).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.models.config import ExpertsConfig, ModelConfig, RecurrenceConfig

_MODULE, _GRANITE_MODULE = "mlp.experts", "block_sparse_moe.experts"
_ROUTERS = {
    "block_sparse_moe.gate": ("mlp.gate", "mlp.router"),
    "block_sparse_moe.router.layer": ("block_sparse_moe.router",),
}
"""Names in transformers 5, by that in checkpoints."""
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"


def by_matrix(config: ModelConfig) -> ModelConfig:
    """The same model without biases, with a tensor for each matrix of an expert, outputs first: what adapters add to. They do
    not reach inputs that layers have of their own, nor an index of keys, nor what makes several states of one.
    """

    def apart(experts: ExpertsConfig | None) -> ExpertsConfig | None:
        if experts is None:
            return None
        return msgspec.structs.replace(experts, stack=None, has_router_bias=False, has_turned_router=False)

    def without_biases(recurrence: RecurrenceConfig | None) -> RecurrenceConfig | None:
        return None if recurrence is None else msgspec.structs.replace(recurrence, has_bias=False)

    latent = config.attention.latent
    if latent is not None:
        latent = msgspec.structs.replace(latent, index=None)
    return msgspec.structs.replace(
        config,
        layer_inputs=None,
        states=None,
        names=msgspec.structs.replace(config.names, has_inputs_first=False),
        attention=msgspec.structs.replace(config.attention, qkv_bias=False, output_bias=False, latent=latent),
        layers=tuple(
            msgspec.structs.replace(
                layer,
                recurrence=without_biases(layer.recurrence),
                feed_forward=msgspec.structs.replace(
                    layer.feed_forward, has_bias=False, experts=apart(layer.feed_forward.experts)
                ),
            )
            for layer in config.layers
        ),
    )


class Stack(NamedTuple):
    """One matrix of all experts, the ``parameter`` of PEFT: ``modules`` are its parts of one expert, with braces for the
    number. With ``takes_turns``, the outputs of its parts take turns.
    """

    parameter: str
    modules: tuple[str, ...]
    num_experts: int
    outputs: int
    inputs: int
    takes_turns: bool

    def parts(self, down: Tensor, up: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """By module of one expert, ``[rank, in]`` and ``[out, rank]``; parts of one matrix share the first."""
        downs = down.view(self.num_experts, -1, self.inputs)
        ups = up.view(self.outputs, -1, self.num_experts).permute(2, 0, 1)
        width = len(self.modules)
        for number in range(self.num_experts):
            rows = ups[number]
            own = [rows[part::width] for part in range(width)] if self.takes_turns else rows.chunk(width)
            for module, some in zip(self.modules, own, strict=True):
                yield module.format(number), downs[number], some


def parameters_of(fields: ConfigFields) -> list[str]:
    """``target_parameters``. Raises ``ModelFilesError``: it is not a list of names."""
    names = fields.values.get("target_parameters") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.refuse("target_parameters", "a list of names")
    return names


def stacks_of(config: ModelConfig, parameters: Sequence[str]) -> dict[str, Stack]:
    """By the name of a wrapped module; of an adapter of these ``parameters``."""
    matrices = [matrix for matrix in (_GATE_UP, _DOWN) if any(name.endswith(matrix) for name in parameters)]
    found: dict[str, Stack] = {}
    for index, (layer, apart) in enumerate(zip(config.layers, by_matrix(config).layers, strict=True)):
        feed, prefix = layer.feed_forward, config.names.layer.format(index)
        if feed.experts is None or apart.feed_forward.experts is None or not feed.is_gated:
            continue
        names = apart.feed_forward.experts.names
        expert, count = prefix + names.expert, feed.experts.routing.num_experts
        inner, hidden = feed.intermediate_size, config.hidden_size
        wrapped = prefix + (_MODULE if names.stacks is None else _GRANITE_MODULE)
        stacks = {
            _GATE_UP: Stack(
                f"{wrapped}.{_GATE_UP}",
                tuple(expert + name for name in names.gate_up),
                count,
                2 * inner,
                hidden,
                feed.experts.stack == "pairs",
            ),
            _DOWN: Stack(f"{wrapped}.{_DOWN}", (expert + names.down,), count, hidden, inner, takes_turns=False),
        }
        for depth, matrix in enumerate(reversed(matrices)):
            found[wrapped + ".base_layer" * depth] = stacks[matrix]
    return found


def aliases_of(config: ModelConfig) -> dict[str, str]:
    """Names of routers in transformers 5 that checkpoints have under another."""
    found: dict[str, str] = {}
    for index, layer in enumerate(config.layers):
        experts, prefix = layer.feed_forward.experts, config.names.layer.format(index)
        if experts is not None:
            others = _ROUTERS.get(experts.names.router, ())
            found |= {prefix + other: prefix + experts.names.router for other in others}
    return found
