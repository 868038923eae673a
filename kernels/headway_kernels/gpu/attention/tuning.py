"""The cuts of the attention kernels on each device: tile sizes, warps and pipeline stages.

Owns: tunings. Must not know: what a kernel computes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

_REGISTERS = 65536
"""Of a multiprocessor, and the most of a thread (CUDA C++ Programming Guide, table of technical specifications)."""
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class KernelTuning:
    """The cut of one kernel; it changes results by rounding at most.

    ``query_tile``: query vectors of a program. ``key_tile``: positions of one turn.
    Both are powers of two from 16. ``num_stages``: key tiles in the pipeline.
    """

    query_tile: int
    key_tile: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int

    @property
    def max_registers(self) -> int:
        """Of a thread, so that this many programs fit. Without a number, the assembler may spare them and use memory."""
        fitting = _REGISTERS // (32 * self.num_warps * self.programs_per_multiprocessor) // 8 * 8
        return min(fitting, _MOST_REGISTERS)


@dataclass(frozen=True)
class AttentionTuning:
    """The tuning of both kernels."""

    decode: KernelTuning
    chunk: KernelTuning


MOST_CHANNELS = 512
"""Of a head."""
_LEAST_HEAD, _LEAST_RANK = 64, 256


class TileSizes(NamedTuple):
    """What tiles depend on: padded ``channels`` of a head, or of latent attention the padded rank, and the bytes of an element of
    the pool; codes of a model of 16 bits have 1.
    """

    channels: int
    stored_bytes: int
    is_latent: bool = False


# (compute capability's first number, padded head size, bytes of an element of the pool) -> tuning: the largest tiles that
# need no local memory, or with heads of 512 channels little, by what compilers say. 9 is H100 and H200; B200 (10) takes their tiles where it has none of its own.
# Memory bounds decodes: their
# tiles keep some 64 KiB in flight per multiprocessor. The tensor cores bound chunks: their accumulators fill the
# registers (128 query vectors by 128 components for 8 warps). float32 has no tensor cores of full precision; its tiles
# are small, since each thread holds its operands in registers. Elements of one byte are codes of a model of 16 bits.
_TUNING: dict[tuple[int, int, int], AttentionTuning] = {
    (8, 64, 2): AttentionTuning(KernelTuning(16, 64, 4, 4, 3), KernelTuning(128, 64, 8, 3, 1)),
    (8, 128, 2): AttentionTuning(KernelTuning(16, 64, 4, 3, 2), KernelTuning(128, 64, 8, 3, 1)),
    (8, 256, 2): AttentionTuning(KernelTuning(16, 32, 4, 3, 2), KernelTuning(64, 32, 8, 3, 1)),
    (8, 512, 2): AttentionTuning(KernelTuning(16, 16, 4, 3, 2), KernelTuning(32, 16, 8, 3, 1)),
    (9, 64, 2): AttentionTuning(KernelTuning(16, 64, 4, 4, 3), KernelTuning(128, 128, 8, 3, 1)),
    (9, 128, 2): AttentionTuning(KernelTuning(16, 32, 4, 4, 3), KernelTuning(128, 64, 8, 3, 1)),
    (9, 256, 2): AttentionTuning(KernelTuning(16, 32, 4, 3, 2), KernelTuning(128, 32, 8, 3, 1)),
    (9, 512, 2): AttentionTuning(KernelTuning(16, 16, 4, 3, 2), KernelTuning(64, 16, 8, 2, 1)),
    (10, 256, 2): AttentionTuning(KernelTuning(16, 32, 4, 3, 2), KernelTuning(64, 16, 8, 3, 1)),
    (10, 512, 2): AttentionTuning(KernelTuning(16, 16, 4, 3, 2), KernelTuning(32, 32, 8, 2, 1)),
    (8, 64, 1): AttentionTuning(KernelTuning(16, 64, 4, 4, 2), KernelTuning(64, 64, 4, 3, 1)),
    (8, 128, 1): AttentionTuning(KernelTuning(16, 64, 4, 4, 2), KernelTuning(64, 64, 8, 3, 1)),
    (8, 256, 1): AttentionTuning(KernelTuning(16, 32, 4, 4, 2), KernelTuning(64, 32, 8, 3, 1)),
    (8, 512, 1): AttentionTuning(KernelTuning(16, 16, 4, 4, 2), KernelTuning(32, 16, 4, 3, 1)),
    (9, 64, 1): AttentionTuning(KernelTuning(16, 64, 4, 5, 3), KernelTuning(128, 64, 8, 3, 1)),
    (9, 128, 1): AttentionTuning(KernelTuning(16, 32, 4, 5, 3), KernelTuning(128, 64, 8, 3, 1)),
    (9, 256, 1): AttentionTuning(KernelTuning(16, 32, 4, 4, 2), KernelTuning(64, 32, 8, 3, 1)),
    (9, 512, 1): AttentionTuning(KernelTuning(16, 16, 4, 4, 2), KernelTuning(32, 16, 8, 2, 1)),
    (10, 64, 1): AttentionTuning(KernelTuning(16, 64, 4, 5, 3), KernelTuning(64, 64, 8, 3, 1)),
    (10, 128, 1): AttentionTuning(KernelTuning(16, 32, 4, 5, 3), KernelTuning(64, 64, 8, 3, 1)),
    (8, 64, 4): AttentionTuning(KernelTuning(16, 32, 4, 3, 2), KernelTuning(32, 32, 4, 3, 2)),
    (8, 128, 4): AttentionTuning(KernelTuning(16, 16, 4, 3, 2), KernelTuning(32, 32, 8, 3, 1)),
    (8, 256, 4): AttentionTuning(KernelTuning(16, 16, 8, 3, 1), KernelTuning(16, 16, 4, 3, 1)),
    (8, 512, 4): AttentionTuning(KernelTuning(16, 16, 8, 2, 1), KernelTuning(16, 16, 8, 2, 1)),
}

# The same of latent attention, by the channels of a row that are value, too. Several heads read the same row, so a decode
# has up to 32 of them in a query tile: more would halve the reading of rows from the cache, and need local memory.
_LATENT: dict[tuple[int, int, int], AttentionTuning] = {
    (8, 256, 2): AttentionTuning(KernelTuning(32, 32, 4, 3, 2), KernelTuning(64, 32, 8, 3, 1)),
    (8, 512, 2): AttentionTuning(KernelTuning(32, 32, 8, 3, 1), KernelTuning(32, 32, 8, 3, 1)),
    (9, 256, 2): AttentionTuning(KernelTuning(32, 32, 4, 4, 2), KernelTuning(64, 64, 8, 3, 1)),
    (9, 512, 2): AttentionTuning(KernelTuning(32, 32, 8, 4, 1), KernelTuning(64, 16, 8, 3, 1)),
    (10, 256, 2): AttentionTuning(KernelTuning(32, 32, 4, 4, 2), KernelTuning(32, 64, 8, 3, 1)),
    (10, 512, 2): AttentionTuning(KernelTuning(32, 32, 8, 4, 1), KernelTuning(32, 32, 8, 3, 1)),
    (8, 256, 1): AttentionTuning(KernelTuning(32, 16, 8, 4, 1), KernelTuning(32, 16, 8, 3, 1)),
    (8, 512, 1): AttentionTuning(KernelTuning(16, 16, 8, 4, 1), KernelTuning(32, 16, 8, 3, 1)),
    (9, 256, 1): AttentionTuning(KernelTuning(32, 16, 8, 4, 1), KernelTuning(64, 16, 8, 3, 1)),
    (9, 512, 1): AttentionTuning(KernelTuning(32, 16, 8, 4, 1), KernelTuning(32, 16, 8, 2, 1)),
    (10, 256, 1): AttentionTuning(KernelTuning(32, 16, 8, 4, 1), KernelTuning(32, 32, 8, 3, 1)),
    (10, 512, 1): AttentionTuning(KernelTuning(32, 16, 8, 4, 1), KernelTuning(32, 16, 8, 3, 1)),
    (8, 256, 4): AttentionTuning(KernelTuning(16, 16, 8, 2, 1), KernelTuning(16, 16, 8, 2, 1)),
    (8, 512, 4): AttentionTuning(KernelTuning(16, 16, 8, 2, 1), KernelTuning(16, 16, 8, 2, 1)),
}
_ON_CPU = AttentionTuning(KernelTuning(16, 64, 1, 1, 2), KernelTuning(64, 64, 1, 1, 2))


def tile_sizes(head_dim: int, dtype: torch.dtype, *, is_coded: bool = False, is_latent: bool = False) -> TileSizes:
    """Of a model in ``dtype``, over a pool of codes or of numbers; of latent attention, ``head_dim`` is the rank."""
    stored_bytes = 1 if is_coded and dtype.itemsize == 2 else dtype.itemsize
    least = _LEAST_RANK if is_latent else _LEAST_HEAD
    return TileSizes(min(MOST_CHANNELS, max(least, power_of_two(head_dim))), stored_bytes, is_latent)


def attention_tuning(device: torch.device, sizes: TileSizes) -> AttentionTuning:
    """The table's entry for this device."""
    if device.type != "cuda":
        return _ON_CPU
    return tuning_for(torch.cuda.get_device_capability(device)[0], sizes)


def tuning_for(major: int, sizes: TileSizes) -> AttentionTuning:
    """The nearest entry: of the newest generation up to ``major``."""
    table = _LATENT if sizes.is_latent else _TUNING
    known = [entry for entry in table if entry[0] <= major and entry[1:] == sizes[:2]]
    if not known:
        raise ValueError(
            f"no attention kernel for elements of {sizes.stored_bytes} bytes on compute capability {major}.x"
        )
    return table[max(known)]


def tokens_per_tile(num_heads: int, num_kv_heads: int, tuning: AttentionTuning) -> int:
    """Tokens of a query tile with all heads of a group."""
    return max(1, tuning.chunk.query_tile // (num_heads // num_kv_heads))


def latent_groups(num_heads: int, tuning: AttentionTuning) -> int:
    """Equal groups of heads that read the same rows: the fewest of which each fits the query tile of a decode."""
    most = tuning.decode.query_tile
    return next(groups for groups in range(1, num_heads + 1) if num_heads % groups == 0 and num_heads // groups <= most)


def padded_rows(num_rows: int) -> int:
    """Rows that a kernel looks through for one of so many."""
    return max(128, power_of_two(num_rows))


def power_of_two(number: int) -> int:
    """The least power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
