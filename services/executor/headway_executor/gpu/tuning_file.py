"""A file with the tiles that somebody has measured on a device.

Owns: its format, where it is looked for. Must not know: how tiles are measured, who uses them.

JSON, one file for each device name; ``docs/gpu.md`` describes it. What it does not have keeps the tiles that ship.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import torch
from msgspec import Meta

from headway_executor.backend import BackendConfigError
from headway_kernels.gpu.attention.tuning import AttentionTuning, KernelTuning, TileSizes
from headway_kernels.gpu.linear.float8 import BLOCK
from headway_kernels.gpu.linear.quantized import Tiling
from headway_kernels.gpu.tunings import MOST_FEW_TOKENS, Tunings
from headway_proto.wording import shown

AUTO, SHIPPED = "auto", "shipped"
"""Values of the option ``tuning`` beside the name of a file: this device's file, if there is one; the tiles that ship."""
FORMAT = 1

_TILES = (16, 32, 64, 128, 256)
_Warps: TypeAlias = Annotated[int, Meta(ge=1, le=16)]
_Stages: TypeAlias = Annotated[int, Meta(ge=1, le=8)]
_Bytes: TypeAlias = Annotated[int, Meta(ge=1, le=4)]


class KernelTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See ``KernelTuning``."""

    query_tile: int
    key_tile: int
    num_warps: _Warps
    num_stages: _Stages
    programs_per_multiprocessor: Annotated[int, Meta(ge=1, le=8)]


class AttentionTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a padded head size, and of elements of 1 (codes of a model of 16 bits), 2 or 4 bytes in the pool; or of latent
    attention with that padded rank.
    """

    head_dim: int
    stored_bytes: _Bytes
    decode: KernelTiles
    chunk: KernelTiles
    is_latent: bool = False

    @property
    def sizes(self) -> TileSizes:
        """What they are of."""
        return TileSizes(self.head_dim, self.stored_bytes, self.is_latent)


class ProductTiles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See ``Tiling``; inputs have elements of 1 (E4M3), 2 or 4 bytes. ``max_tokens`` None: any number."""

    element_bytes: _Bytes
    max_tokens: int | None
    tokens: int
    outputs: int
    inputs: int
    num_warps: _Warps
    num_stages: _Stages


class TuningFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``products`` of more than 64 tokens, by ascending ``max_tokens``, None last; of ``pairs`` one by ``element_bytes``.

    ``said``: anything, for people.
    """

    format: int = FORMAT
    device: str
    attention: tuple[AttentionTiles, ...] = ()
    products: tuple[ProductTiles, ...] = ()
    pairs: tuple[ProductTiles, ...] = ()
    said: tuple[str, ...] = ()


def tunings_of(option: str, device: torch.device) -> Tunings:
    """The tiles of ``device`` by the option ``tuning``.

    Raises:
        BackendConfigError: the file cannot be used; names it and what is wrong.
    """
    if option == SHIPPED:
        return Tunings(device)
    name = device_name(device)
    path = file_of(name) if option == AUTO else Path(option)
    if option == AUTO and not path.is_file():
        return Tunings(device)
    try:
        found = read(path)
        if found.device != name:
            raise ValueError(f"it is of {shown(found.device)}, and this device is {shown(name)}")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise BackendConfigError(
            f"backend_options tuning {shown(path, 200)} is not allowed; {reason}; allowed: {AUTO}, {SHIPPED}, or a file that "
            "benchmarks/gpu_tune.py has written on such a device"
        ) from error
    return as_tunings(found, device)


def device_name(device: torch.device) -> str:
    """As its driver calls it; of a CPU, "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def file_of(name: str) -> Path:
    """Where the file of a device is looked for."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "headway" / "tunings" / f"{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def read(path: Path) -> TuningFile:
    """Read and check a file. Raises ``ValueError``, ``OSError``: it cannot be used, and why in one line."""
    found = msgspec.json.decode(path.read_bytes(), type=TuningFile)
    if found.format != FORMAT:
        raise ValueError(f"format {found.format} is not {FORMAT}")
    for tiles in found.attention:
        _check_tiles("attention", tiles.head_dim, (tiles.decode, tiles.chunk))
        allowed = (256, 512) if tiles.is_latent else (64, 128, 256, 512)
        if tiles.head_dim not in allowed:
            raise ValueError(f"attention of head_dim {tiles.head_dim}; allowed: {', '.join(map(str, allowed))}")
    for kind, products in (("products", found.products), ("pairs", found.pairs)):
        _check_tiles(kind, None, products)
        coded = [tiles for tiles in products if tiles.element_bytes == 1]
        if any(tiles.inputs != BLOCK for tiles in coded):
            raise ValueError(f"{kind} of element_bytes 1: allowed: inputs {BLOCK}, the block in which they are rounded")
        if any(tiles.outputs > BLOCK for tiles in coded):
            raise ValueError(f"{kind} of element_bytes 1: allowed: outputs up to {BLOCK}, which share a scale")
        if any(tiles.max_tokens is not None and tiles.max_tokens <= MOST_FEW_TOKENS for tiles in products):
            raise ValueError(f"{kind} of max_tokens {MOST_FEW_TOKENS} or less; those keep the tiles that ship")
    return found


def as_tunings(found: TuningFile, device: torch.device) -> Tunings:
    """The kernels' form of a checked file.

    Raises:
        BackendConfigError: products of some number of tokens have no tiles.
    """
    products = {width: _tilings(found.products, width) for width in {tiles.element_bytes for tiles in found.products}}
    for tilings in products.values():
        if tilings[-1].max_tokens is not None:
            raise BackendConfigError("backend_options tuning is not allowed; products have no tiles without max_tokens")
    return Tunings(
        device,
        attention={tiles.sizes: _attention(tiles) for tiles in found.attention},
        products=products,
        pairs={tiles.element_bytes: _tiling(tiles) for tiles in found.pairs},
    )


def _check_tiles(kind: str, of: int | None, tiles: Iterable[msgspec.Struct]) -> None:
    for entry in tiles:
        for name in ("query_tile", "key_tile", "tokens", "outputs", "inputs"):
            value = getattr(entry, name, _TILES[0])
            if value not in _TILES:
                where = kind if of is None else f"{kind} of head_dim {of}"
                raise ValueError(f"{where}: {name} {value}; allowed: {', '.join(map(str, _TILES))}")
        warps = getattr(entry, "num_warps", 1)
        if warps & (warps - 1):
            raise ValueError(f"{kind}: num_warps {warps}; allowed: 1, 2, 4, 8, 16")


def _attention(tiles: AttentionTiles) -> AttentionTuning:
    decode, chunk = (KernelTuning(*msgspec.structs.astuple(part)) for part in (tiles.decode, tiles.chunk))
    return AttentionTuning(decode, chunk)


def _tilings(products: tuple[ProductTiles, ...], width: int) -> tuple[Tiling, ...]:
    ordered = sorted(
        (tiles for tiles in products if tiles.element_bytes == width), key=lambda tiles: tiles.max_tokens or 1 << 62
    )
    return tuple(_tiling(tiles) for tiles in ordered)


def _tiling(tiles: ProductTiles) -> Tiling:
    return Tiling(tiles.max_tokens, tiles.tokens, tiles.outputs, tiles.inputs, tiles.num_warps, tiles.num_stages)
