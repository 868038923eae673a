"""The parts of a step, each timed alone, and the time that they make a step expect.

Owns: writing down what a step launches, timing it by kind, the sum. Must not know: floors, how a step is scheduled.

All launches of one kind, of all layers in their order, are recorded as one graph: so each layer reads its own weights, and
the gaps between launches count as they do in a step. What a step takes beyond the sum is what its parts cost each other;
what it takes less is what they share. A part beside its floor says where a step loses.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from inspect import isfunction
from typing import Any, TypeVar

import numpy as np
import torch

from gpu_device import Device
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu import attention as of_attention
from headway_executor.gpu import decoder as of_decoder
from headway_executor.gpu import key_index as of_index
from headway_executor.gpu import latent as of_latent
from headway_executor.gpu.attention import DeviceAttention
from headway_executor.gpu.decoder import Decoder, DecoderWeights, LayerWeights
from headway_executor.gpu.device_step import Mixing
from headway_executor.gpu.graphs import LaunchSize
from headway_executor.gpu.key_index import DeviceKeyIndex
from headway_executor.gpu.latent import LatentAttention
from headway_executor.gpu.norm import DeviceNorm
from headway_executor.gpu.recurrence import Beside

REPETITIONS = 10
OF_ATTENTION = ("qkv", "query", "compress", "gates", "output", "index", "queries", "keys", "norm")
"""What attention and its index call by themselves: products, a norm, the index. As a layer calls its norms, its state and its
feed-forward. The rest are functions of the kernels.
"""

WithNorms = TypeVar("WithNorms", LayerWeights, DecoderWeights)

Calls = dict[str, list[Callable[[], object]]]


@dataclass(frozen=True)
class Parts:
    """A step's parts, beside what it took and its floor; milliseconds."""

    name: str
    measured_ms: float
    floor_ms: float
    parts_ms: dict[str, float]

    @property
    def expected_ms(self) -> float:
        """Of the step, if its parts took what each takes alone."""
        return sum(self.parts_ms.values())

    @property
    def said(self) -> str:
        """One line, the largest first."""
        largest = sorted(self.parts_ms.items(), key=lambda part: -part[1])
        listed = ", ".join(f"{kind} {taken:.3f}" for kind, taken in largest)
        return f"{self.name}: {self.expected_ms:.3f} ms expected of its parts: {listed}"


def measure_parts(backend: TritonBackend, device: Device, num_rows: int) -> dict[str, float]:
    """Return milliseconds by kind of a decode step of rows ``0 .. num_rows - 1``, which the last step was."""
    model = backend._model  # noqa: SLF001 (the step from inside)
    assert model is not None
    parts = model.parts
    decoder, sampler, views = parts.target.decoder, parts.sampler, parts.upload.views
    rows = np.arange(num_rows, dtype=np.int32)
    with torch.inference_mode(), parts.runtime.on_stream():
        with written_down(decoder) as calls:
            parts.target.forward(LaunchSize(num_rows, num_rows, has_decodes=True, has_chunks=False))
        found = {kind: _alone(device, works) for kind, works in calls.items()}
        logits = decoder.logits(num_rows)
        found["head"] = device.seconds(lambda: decoder.logits(num_rows), REPETITIONS)
        store = parts.rows.token_store
        found["sampling"] = device.seconds(lambda: sampler.sample(logits, rows, views, store), REPETITIONS)
    return {kind: seconds * 1e3 for kind, seconds in found.items()}


@contextmanager
def written_down(decoder: Decoder) -> Iterator[Calls]:
    """Write down what the decoder calls inside, by kind; each can be called again."""
    calls: Calls = {}

    def wrapped(kind: str, work: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: Any, **named: Any) -> object:
            calls.setdefault(kind, []).append(lambda: work(*arguments, **named))
            return work(*arguments, **named)

        return called

    def written(layer: LayerWeights) -> LayerWeights:
        mixing = None if layer.mixing is None else mixed(layer.mixing)
        feed_forward = None if layer.feed_forward is None else wrapped("feed_forward", layer.feed_forward)
        own_input = None if layer.own_input is None else wrapped("layer_inputs", layer.own_input)
        return replace(with_norms(layer), mixing=mixing, feed_forward=feed_forward, own_input=own_input)

    def mixed(mixing: Mixing) -> Mixing:
        if isinstance(mixing, Beside):
            return replace(mixing, attention=mixed(mixing.attention), recurrence=mixed(mixing.recurrence))
        if isinstance(mixing, DeviceAttention | LatentAttention):
            return _written(mixing, wrapped)
        return wrapped("recurrence", mixing)

    def with_norms(of_some: WithNorms) -> WithNorms:
        norms = {field.name: getattr(of_some, field.name) for field in fields(of_some)}
        found = {name: wrapped("norm", norm) for name, norm in norms.items() if isinstance(norm, DeviceNorm)}
        return replace(of_some, **found)

    weights = decoder._weights  # noqa: SLF001
    modules = [vars(module) for module in (of_attention, of_latent, of_index, of_decoder)]
    kept = [module.copy() for module in modules]
    table = None if weights.table is None else wrapped("layer_inputs", weights.table)
    layers = tuple(map(written, weights.layers))
    decoder._weights = replace(with_norms(weights), table=table, layers=layers)  # noqa: SLF001
    for module in modules:
        module.update({name: wrapped(name, value) for name, value in module.items() if _is_of_kernels(value)})
    try:
        yield calls
    finally:
        for module, before in zip(modules, kept, strict=True):
            module.update(before)
        decoder._weights = weights  # noqa: SLF001


def _written(part: Any, wrapped: Callable[[str, Callable[..., object]], Callable[..., object]]) -> Any:
    """Attention or an index, whose products are written down."""
    works = ((name, getattr(part, name, None)) for name in OF_ATTENTION)
    return replace(
        part,
        **{
            name: _written(work, wrapped) if isinstance(work, DeviceKeyIndex) else wrapped(name, work)
            for name, work in works
            if work is not None
        },
    )


def _is_of_kernels(value: object) -> bool:
    return isfunction(value) and value.__module__.startswith("headway_kernels.gpu")


def _alone(device: Device, works: list[Callable[[], object]]) -> float:
    """Return the seconds of all of them, as one graph where there are graphs."""

    def all_of_them() -> None:
        for work in works:
            work()

    if not device.is_cuda:
        return device.seconds(all_of_them, 1, warm_ups=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        all_of_them()
    return device.seconds(graph.replay, REPETITIONS)
