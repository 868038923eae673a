"""Whether a library computes the attention of large steps with chunks: by a setting, or because it is faster here.

Owns: what the library lacks, the comparison with our own kernel. Must not know: how either computes.

Before it is used, the library must give what our kernel gives, on this device and with this model's sizes. Chunks of steps
that have graphs, and all decodes, stay our kernels'.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from headway_executor.backend import BackendConfigError
from headway_executor.models.config import ModelConfig
from headway_kernels.gpu.attention import AttentionRows, AttentionWorkspace, paged_attention, plan_attention
from headway_kernels.gpu.attention_tuning import AttentionTuning, tokens_per_tile
from headway_kernels.gpu.flash_attention import HEAD_DIMS, FlashAttention, FlashLacking, find_flash_attention

OPTION = "chunk_attention"
OWN_KERNEL, FLASH, AUTO = "triton", "flash", "auto"
"""Values of the option: our kernel, FlashAttention 3, whichever is faster."""

_CAPABILITY = 9
_ROWS = ((700, 1500), (1, 900), (333, 333))
"""Tokens of each row of the comparison, and positions after them."""
_BLOCK_SIZE = 16
_ROUNDS = 5
_TOLERANCE = 2e-2


def lacking(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_coded: bool) -> str:
    """What FlashAttention lacks for a model on a device, or ""."""
    attention = config.attention
    lacks = {
        f"device {device}, which is not of compute capability {_CAPABILITY}.x": not _is_of_capability(device),
        f"dtype {str(dtype).removeprefix('torch.')}": dtype.itemsize != 2,
        "a KV cache of 8 bits": is_coded,
        "windows": any(layer.window is not None for layer in config.layers),
        "soft caps": attention.softcap is not None,
        "attention sinks": config.names.sinks is not None,
        "latent attention": attention.latent is not None,
        f"heads of {config.head_dim} channels": config.head_dim not in HEAD_DIMS,
    }
    return next((what for what, is_lacking in lacks.items() if is_lacking), "")


def chunk_library(
    asked: str,
    config: ModelConfig,
    dtype: torch.dtype,
    tuning: AttentionTuning,
    device: torch.device,
    *,
    is_coded: bool,
    warn: Callable[[str], None],
    seconds: Callable[[Callable[[], None]], float] | None = None,
) -> FlashAttention | None:
    """The library for steps with chunks, or None: our kernel. ``seconds`` times a launch.

    Raises:
        BackendConfigError: it is ``asked`` for and cannot be used; says why.
    """
    if asked == OWN_KERNEL:
        return None
    try:
        if lacks := lacking(config, dtype, device, is_coded=is_coded):
            raise FlashLacking(f"it does not run {lacks}")
        library = find_flash_attention()
        trial = _Trial(config, dtype, tuning, device)
        trial.check(library)
    except FlashLacking as error:
        if asked == FLASH:
            raise BackendConfigError(
                f"backend_options {OPTION} {FLASH!r} is not allowed; {error}; allowed here: {OWN_KERNEL}, {AUTO}"
            ) from error
        if isinstance(error, _OtherResult):
            warn(f"FlashAttention is installed and not used: {error}")
        return None
    if asked == FLASH:
        return library
    clock = seconds or _seconds
    return library if clock(lambda: trial.by_library(library)) < clock(trial.by_kernel) else None


def _is_of_capability(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _CAPABILITY


class _OtherResult(FlashLacking):
    """The library does not give what our kernel gives."""


class _Trial:
    """One layer over random numbers, in the sizes of a model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, tuning: AttentionTuning, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(device, dtype)

        self._config, self._tuning = config, tuning
        counts, lengths = (list(column) for column in zip(*_ROWS, strict=True))
        blocks_each = -(-max(lengths) // _BLOCK_SIZE)
        num_blocks = blocks_each * len(_ROWS)
        self._pool = numbers(num_blocks, 2 * config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
        self._query = numbers(sum(counts), config.num_heads * config.head_dim)
        self._longest = max(counts)
        self._is_real = torch.ones(sum(counts), dtype=torch.bool, device=device)
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        tables = torch.randperm(num_blocks, generator=draw).view(len(_ROWS), blocks_each)
        places = torch.zeros(2, len(_ROWS), dtype=torch.int32, device=device)
        self._rows = AttentionRows(
            rows=torch.arange(len(_ROWS), dtype=torch.int32, device=device),
            query_start=starts.to(device),
            kv_length=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=tables.to(device, torch.int32),
            split_ends=places[0],
            tile_ends=places[1],
            splits_per_item=torch.ones(1, dtype=torch.int32, device=device),
            tokens_per_tile=tokens_per_tile(config.num_heads, config.num_kv_heads, tuning),
        )
        plan_attention(self._rows, config.num_kv_heads)
        self._workspace = AttentionWorkspace.allocate(len(_ROWS), config.num_heads, config.head_dim, device)
        self._out = torch.empty_like(self._query)

    def check(self, library: FlashAttention) -> None:
        """Compare. Raises ``FlashLacking``: it gives something else, or fails."""
        self.by_kernel()
        expected = self._out.clone()
        try:
            self.by_library(library)
        except Exception as error:
            raise _OtherResult(f"it fails: {' '.join(str(error).split())[:100]}") from error
        if not torch.allclose(self._out, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise _OtherResult("on this device it gives something else than our kernel")

    def by_kernel(self) -> None:
        """Launch our kernels."""
        config = self._config
        paged_attention(
            self._query,
            self._pool,
            self._out,
            self._rows,
            self._workspace,
            num_kv_heads=config.num_kv_heads,
            scale=config.attention.scale,
            tuning=self._tuning,
        )

    def by_library(self, library: FlashAttention) -> None:
        """Launch the library."""
        library(
            self._query,
            self._pool,
            self._out,
            self._rows,
            tables=self._rows.block_tables,
            is_real=self._is_real,
            longest=self._longest,
            num_kv_heads=self._config.num_kv_heads,
            scale=self._config.attention.scale,
        )


def _seconds(launch: Callable[[], None]) -> float:
    times = []
    for _ in range(1 + _ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        launch()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
