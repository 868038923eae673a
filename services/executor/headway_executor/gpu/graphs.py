"""CUDA graphs of a model's step: recorded once for a ladder of sizes.

Owns: the recorded sizes. Must not know: what a step computes.

Rows without tokens pad a step to its graph's size.
"""

import bisect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from headway_executor.gpu.runtime import Runtime
from headway_executor.gpu.step_columns import StepShape

MAX_MIXED_TOKENS = 512
"""The largest recorded step with chunks: beyond it, a step takes the device longer than the host."""

_MIXED_STEP = 64


class LaunchSize(NamedTuple):
    """The size of a launch, at least that of the step. It ``draws``: each row's likeliest token follows, in the same launch.
    ``is_adapted``: rows may have adapters.
    """

    num_tokens: int
    num_rows: int
    has_decodes: bool
    has_chunks: bool
    draws: bool = False
    is_adapted: bool = False


class ForwardPass(Protocol):
    """Launches the step in memory."""

    def __call__(self, size: LaunchSize) -> None:
        """Launch the step."""
        ...


def decode_ladder(max_num_rows: int) -> list[int]:
    """Rows of decode graphs, ascending."""
    rungs = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_rows + 32, 32)]
    return [*[rung for rung in rungs if rung < max_num_rows], max_num_rows]


def mixed_ladder(max_num_tokens: int) -> list[int]:
    """Tokens of graphs with chunks, ascending."""
    return list(range(_MIXED_STEP, min(max_num_tokens, MAX_MIXED_TOKENS) + 1, _MIXED_STEP))


def most_recorded_tokens(max_num_rows: int, max_num_tokens: int) -> int:
    """Tokens of the largest recorded step."""
    return min(max_num_tokens, max(MAX_MIXED_TOKENS, max_num_rows))


class StepSizes:
    """The launch size of each step."""

    def __init__(self, *, max_num_rows: int, max_num_tokens: int, recorded: bool, alignment: int) -> None:
        self._alignment = alignment
        self._max_num_rows = max_num_rows
        self._max_num_tokens = max_num_tokens
        self._decode = decode_ladder(min(max_num_rows, max_num_tokens)) if recorded else []
        self._mixed = mixed_ladder(max_num_tokens) if recorded else []

    def of(self, shape: StepShape, *, draws: bool = False) -> LaunchSize:
        """The smallest recorded size that holds ``shape``, else its own, rounded. Only a step of decodes ``draws``."""
        if not shape.has_chunks:
            if self._decode:
                rung = self._decode[bisect.bisect_left(self._decode, shape.num_rows)]
                return _decode_size(rung, draws=draws)
        elif self._mixed and shape.num_tokens <= self._mixed[-1]:
            return self._mixed_size(self._mixed[bisect.bisect_left(self._mixed, shape.num_tokens)])
        rounded = min(-(-shape.num_tokens // self._alignment) * self._alignment, self._max_num_tokens)
        return LaunchSize(rounded, shape.num_rows, shape.has_decodes, shape.has_chunks, draws)

    def recorded(self) -> list[LaunchSize]:
        """Every size to record, largest first: smaller sizes reuse its memory."""
        decodes = [_decode_size(rung, draws=draws) for rung in self._decode for draws in (True, False)]
        sizes = [*decodes, *map(self._mixed_size, self._mixed)]
        return sorted(sizes, key=lambda size: -size.num_tokens)

    def _mixed_size(self, num_tokens: int) -> LaunchSize:
        return LaunchSize(num_tokens, min(num_tokens, self._max_num_rows), has_decodes=True, has_chunks=True)


class StepGraphs:
    """Recorded steps. It keeps no way to launch one anew, which would keep a closed model's memory alive."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._graphs: dict[LaunchSize, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def record(self, forward: ForwardPass, sizes: list[LaunchSize], progress: Callable[[int, int], None]) -> None:
        """Record ``forward`` per size; the step in memory must be harmless.

        Entering a graph gives torch's free memory back to the device: the largest step takes it again afterwards.
        """
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        for done, size in enumerate(sizes):
            progress(done, len(sizes))
            # The first run compiles the kernels and chooses products, which a graph cannot record.
            forward(size)
            self._runtime.mark().wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(
                graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ):
                forward(size)
            self._graphs[size] = graph

    def launch(self, size: LaunchSize) -> bool:
        """Launch the graph of this size; return whether there is one."""
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        return graph is not None


def _decode_size(num_rows: int, *, draws: bool) -> LaunchSize:
    return LaunchSize(num_rows, num_rows, has_decodes=True, has_chunks=False, draws=draws)
