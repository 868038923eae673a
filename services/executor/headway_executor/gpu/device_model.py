"""A decoder on a device, with its pool of keys and values and its graphs.

Owns: the memory that the model's steps take, which launch serves a step. Must not know: rows, what is made of logits.
"""

from collections.abc import Callable

from torch import Tensor

from headway_executor.backend import HostMemorySource, StepBatch
from headway_executor.gpu.block_mover import BlockMover, open_pool
from headway_executor.gpu.decoder import Decoder
from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.gpu.graphs import LaunchSize, StepGraphs, StepSizes
from headway_executor.gpu.runtime import Runtime
from headway_executor.gpu.step_columns import StepShape
from headway_executor.models.kv_layout import KvLayout

ALIGNMENT = 16
"""Of the tokens of a step that is not recorded, on a GPU."""


class DeviceModel:
    """Runs the step in the decoder's columns. ``draw`` launches the likeliest token of each row of logits.

    ``adapters``: what the decoder's products ask, or None. ``layout``: of the pool, whose blocks have ``block_size`` positions.
    ``most_rows`` and ``most_tokens`` of a step are those for which the decoder has memory.
    """

    def __init__(
        self,
        runtime: Runtime,
        decoder: Decoder,
        layout: KvLayout,
        block_size: int,
        *,
        most_rows: int,
        most_tokens: int,
        draw: Callable[[Tensor], None],
        adapters: DeviceAdapters | None = None,
    ) -> None:
        self._runtime = runtime
        self.decoder = decoder
        self._layout = layout
        self._block_size = block_size
        self._most_rows = most_rows
        self._most_tokens = most_tokens
        self._draw = draw
        self._adapters = adapters
        self._graphs = StepGraphs(runtime)
        self.lacks_adapted = False
        """Whether steps are recorded, and none of rows with adapters."""
        self.sizes = self.step_sizes(recorded=False)

    @property
    def pool(self) -> Tensor:
        """Keys and values; see ``DeviceStep``."""
        return self._pool

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return self._pool.shape[1]

    @property
    def block_bytes(self) -> int:
        """Of a block in all layers."""
        return self._layout.block_bytes

    def open_pool(
        self, num_blocks: int, *, num_host_blocks: int, host_memory: HostMemorySource, part_of: str = ""
    ) -> BlockMover:
        """Take the memory of so many blocks, here and in main memory; return their moves. ``part_of``: see ``KvPool``."""
        self._pool, mover = open_pool(
            self._runtime,
            self._layout.block,
            num_layers=self._layout.num_layers,
            block_size=self._block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            host_memory=host_memory,
            part_of=part_of,
        )
        return mover

    def size_of(self, shape: StepShape, *, draws: bool = False) -> LaunchSize:
        """The size in which a step is launched; only one of decodes ``draws``."""
        return self.sizes.of(shape, draws=draws)

    def launch(self, size: LaunchSize, batch: StepBatch) -> None:
        """Launch the step in the columns, which is ``batch``, as a graph if there is one."""
        if not self._graphs.launch(size):
            self.forward(size, batch)

    def forward(self, size: LaunchSize, batch: StepBatch | None = None) -> None:
        """Launch the step kernel by kernel; without its ``batch``, all chunks are as others."""
        if self._adapters is not None:
            self._adapters.are_any = size.is_adapted
        kinds = {"has_decodes": size.has_decodes, "has_chunks": size.has_chunks}
        long_chunks = None if batch is None else self.decoder.plan_long(batch)
        self.decoder.run(self._pool, size.num_tokens, size.num_rows, long_chunks=long_chunks, **kinds)
        if size.draws and self.decoder.has_head:
            self._draw(self.decoder.logits(size.num_rows))

    def record(self, progress: Callable[[int, int], None], *, is_adapted: bool = False) -> None:
        """Record the graphs of all sizes; the step in the columns must be harmless."""
        self.sizes = self.step_sizes(recorded=True)
        # Also those that draw where nothing is drawn: all ranks of a stage record alike, since they gather meanwhile.
        sizes = [size._replace(is_adapted=is_adapted) for size in self.sizes.recorded()]
        self.lacks_adapted = not is_adapted
        self._graphs.record(self.forward, sizes, progress)

    def step_sizes(self, *, recorded: bool) -> StepSizes:
        """The sizes of steps, with graphs or without."""
        return StepSizes(
            max_num_rows=self._most_rows,
            max_num_tokens=self._most_tokens,
            recorded=recorded,
            alignment=ALIGNMENT if self._runtime.is_cuda else 1,
        )
