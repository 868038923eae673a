"""Whether a library computes the attention of long chunks: by a setting, or because it is faster here.

Owns: what each library lacks, the comparison with our own kernel. Must not know: how any of them computes.

Before it is used, a library must give what our kernel gives, on this device and with this model's sizes, and a chunk's
result must have the same bits alone as beside others. Chunks that fit a recorded step, and all decodes, stay our kernels'.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import BackendConfigError
from headway_executor.gpu.graphs import MAX_MIXED_TOKENS
from headway_executor.models.config import ModelConfig
from headway_kernels.gpu.attention import flash_attention, flash_infer
from headway_kernels.gpu.attention.flash_attention import find_flash_attention
from headway_kernels.gpu.attention.flash_infer import find_flash_infer
from headway_kernels.gpu.attention.long_chunks import ChunkLibrary, ChunkSizes, LibraryLacking, LongAttention
from headway_kernels.gpu.attention.paged import AttentionRows, AttentionWorkspace, paged_attention, plan_attention
from headway_kernels.gpu.attention.tuning import AttentionTuning, tokens_per_tile
from headway_proto.wording import one_line

OPTION = "chunk_attention"
OWN_KERNEL, AUTO = "triton", "auto"
"""Values of the option beside the names of libraries: our kernel, whichever is fastest."""
MOST_OWN_TOKENS = MAX_MIXED_TOKENS
"""Of a chunk that is our kernel's: no recorded step has a longer one."""


class Library(NamedTuple):
    """``capability``: the first that it runs on; ``generation``: the only first number of capabilities, or None."""

    said: str
    find: Callable[[ChunkSizes], ChunkLibrary]
    head_dims: tuple[int, ...]
    capability: tuple[int, int]
    generation: int | None = None

    def runs_on(self, device: torch.device) -> bool:
        """Whether it has kernels for the device."""
        found = _capability_of(device)
        return found >= self.capability and self.generation in {None, found[0]}


LIBRARIES: Mapping[str, Library] = MappingProxyType(
    {
        "flash": Library("FlashAttention", find_flash_attention, flash_attention.HEAD_DIMS, (9, 0), generation=9),
        "flashinfer": Library("FlashInfer", find_flash_infer, flash_infer.HEAD_DIMS, (8, 0)),
    }
)
"""By the value of the option that names each."""

_ROWS = ((1, 900), (700, 1500), (1024, 1024), (600, 3000))
"""Tokens of each row of the comparison, and positions after them."""
_ROUNDS = 5
_LAUNCHES = 10
"""Of a round, one behind the other: in a large step the device does not wait for the host, which launches in its own time."""
_TOLERANCE = 2e-2


def lacking(library: Library, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_coded: bool) -> str:
    """What a library lacks for a model on a device, or ""."""
    attention = config.attention
    lacks = {
        f"device {device}, which is not of {_said_of(library)}": not library.runs_on(device),
        f"dtype {str(dtype).removeprefix('torch.')}": dtype.itemsize != 2,
        "a KV cache of 8 bits": is_coded,
        "windows": any(layer.window is not None for layer in config.layers),
        "layers that differ in their heads": len(config.attentions) > 1,
        "soft caps": attention.softcap is not None,
        "attention sinks": config.names.sinks is not None,
        "scores that fall with distance": attention.alibi is not None,
        "latent attention": attention.latent is not None,
        f"heads of {config.head_dim} channels": config.head_dim not in library.head_dims,
    }
    return next((what for what, is_lacking in lacks.items() if is_lacking), "")


class LibraryChoice:
    """Chooses for a model: ``tuning`` of our kernels, ``block_size`` of the pool, ``is_coded``: it holds codes of 8 bits.

    ``said`` gets a line about a library that is not used, ``seconds`` times a launch.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        tuning: AttentionTuning,
        device: torch.device,
        *,
        block_size: int,
        is_coded: bool,
        said: Callable[[str], None],
        seconds: Callable[[Callable[[], None]], float] | None = None,
    ) -> None:
        self._config = config
        self._tuning = tuning
        self._is_coded = is_coded
        self._said = said
        self._seconds = seconds or _seconds
        self._sizes = sizes_of(config, dtype, device, block_size)

    def of(self, asked: str, max_num_tokens: int) -> LongAttention | None:
        """By a value of the option, for steps of up to ``max_num_tokens``; None: our kernel.

        Raises:
            BackendConfigError: it is ``asked`` for and cannot be used; says why.
        """
        if asked == OWN_KERNEL or (asked == AUTO and max_num_tokens <= MOST_OWN_TOKENS):
            return None
        found = self._fastest() if asked == AUTO else self._named(asked, max_num_tokens)
        return None if found is None else LongAttention(found, self._sizes, MOST_OWN_TOKENS, max_num_tokens)

    def _named(self, asked: str, max_num_tokens: int) -> ChunkLibrary:
        try:
            if max_num_tokens <= MOST_OWN_TOKENS:
                raise LibraryLacking(
                    f"it computes chunks of more than {MOST_OWN_TOKENS} tokens, and max_num_batched_tokens is {max_num_tokens}"
                )
            return self._checked(LIBRARIES[asked])
        except LibraryLacking as error:
            raise BackendConfigError(
                f"backend_options {OPTION} {asked!r} is not allowed; {error}; allowed here: {OWN_KERNEL}, {AUTO}"
            ) from error

    def _fastest(self) -> ChunkLibrary | None:
        found: list[ChunkLibrary] = []
        for library in LIBRARIES.values():
            try:
                found.append(self._checked(library))
            except LibraryLacking as error:
                self._said(f"{library.said} does not compute the attention of prompts: {error}")
        best, least = None, self._seconds(self._trial.by_kernel) if found else 0.0
        for one in found:
            if (seconds := self._seconds(self._trial.by_library(one))) < least:
                best, least = one, seconds
        return best

    def _checked(self, library: Library) -> ChunkLibrary:
        """Raises ``LibraryLacking``."""
        sizes = self._sizes
        if lacks := lacking(library, self._config, sizes.dtype, sizes.device, is_coded=self._is_coded):
            raise LibraryLacking(f"it does not run {lacks}")
        found = library.find(sizes)
        self._trial.check(found)
        return found

    @cached_property
    def _trial(self) -> "_Trial":
        return _Trial(self._config, self._sizes, self._tuning)


def sizes_of(config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int) -> ChunkSizes:
    """What a library must know of a model."""
    return ChunkSizes(
        config.num_heads, config.num_kv_heads, config.head_dim, block_size, config.attention.scale, dtype, device
    )


def _capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def _said_of(library: Library) -> str:
    if library.generation is not None:
        return f"compute capability {library.generation}.x"
    return f"compute capability {'.'.join(map(str, library.capability))} or above"


class _Trial:
    """One layer over random numbers, in the sizes of a model."""

    def __init__(self, config: ModelConfig, sizes: ChunkSizes, tuning: AttentionTuning) -> None:
        draw = torch.Generator().manual_seed(0)
        device = sizes.device

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, sizes.dtype)

        self._config, self._sizes, self._tuning = config, sizes, tuning
        self._counts, lengths = np.array(_ROWS, dtype=np.int32).T
        self._computed = lengths - self._counts
        self._numbers = np.arange(len(_ROWS), dtype=np.int32)
        blocks_each = -(-int(lengths.max()) // sizes.block_size)
        num_blocks = blocks_each * len(_ROWS)
        self._pool = numbers(num_blocks, 2 * config.num_kv_heads, sizes.block_size, config.head_dim)
        self._query = numbers(int(self._counts.sum()), config.num_heads * config.head_dim)
        self._out = torch.empty_like(self._query)
        starts = np.concatenate(([0], np.cumsum(self._counts)))
        places = torch.zeros(2, len(_ROWS), dtype=torch.int32, device=device)
        self._rows = AttentionRows(
            rows=torch.from_numpy(self._numbers).to(device),
            query_start=torch.from_numpy(starts).to(device, torch.int32),
            kv_length=torch.from_numpy(lengths.copy()).to(device),
            block_tables=torch.randperm(num_blocks, generator=draw)
            .view(len(_ROWS), blocks_each)
            .to(device, torch.int32),
            split_ends=places[0],
            tile_ends=places[1],
            splits_per_item=torch.ones(1, dtype=torch.int32, device=device),
            tokens_per_tile=tokens_per_tile(config.num_heads, config.num_kv_heads, tuning),
        )
        plan_attention(self._rows, config.num_kv_heads)
        self._workspace = AttentionWorkspace.allocate(len(_ROWS), config.num_heads, config.head_dim, device)

    def check(self, library: ChunkLibrary) -> None:
        """Compare. Raises ``LibraryLacking``: it gives something else, or fails."""
        expected = self._given_by([self.by_kernel])
        try:
            found = self._given_by([self.by_library(library)])
            alone = self._given_by([self.by_library(library, slice(row, row + 1)) for row in self._numbers])
        # A library fails in its own ways, above all where it compiles.
        except Exception as error:
            raise LibraryLacking(f"it fails: {one_line(error, 100)}") from error
        if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise LibraryLacking("on this device it gives something else than our kernel")
        if not torch.equal(found, alone):
            raise LibraryLacking("on this device its result depends on what else is in the step")

    def _given_by(self, launches: Sequence[Callable[[], None]]) -> Tensor:
        """What is then there for the long chunks."""
        self._out.fill_(torch.nan)
        for launch in launches:
            launch()
        return self._out[torch.from_numpy(np.repeat(self._counts > MOST_OWN_TOKENS, self._counts))]

    def by_kernel(self) -> None:
        """Launch our kernel for all chunks."""
        config = self._config
        paged_attention(
            self._query,
            self._pool,
            self._out,
            self._rows,
            self._workspace,
            num_kv_heads=config.num_kv_heads,
            scale=config.attention.scale,
            has_decodes=False,
            tuning=self._tuning,
        )

    def by_library(self, library: ChunkLibrary, which: slice = slice(None)) -> Callable[[], None]:
        """Plan for some rows; return what launches the library for their long chunks."""
        starts = np.cumsum(self._counts) - self._counts
        first, last = int(starts[which][0]), int((starts + self._counts)[which][-1])
        query, out = self._query[first:last], self._out[first:last]
        attention = LongAttention(library, self._sizes, MOST_OWN_TOKENS, len(self._query))
        counts, computed = self._counts[which], self._computed[which]
        attend = attention.plan(self._numbers[which], counts, computed, self._rows.block_tables)
        return lambda: None if attend is None else attend(query, self._pool, out)


def _seconds(launch: Callable[[], None]) -> float:
    times = []
    for _ in range(1 + _ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(_LAUNCHES):
            launch()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) / _LAUNCHES)
    return min(times[1:])
