"""Where the keys and values of each layer are in a pool.

Owns: which layers have some, where they stand, the bytes of a block. Must not know: rows, how a vector is stored.

Layers that are alike have a pool's layer each. Layers whose heads differ in number or size stand behind each other in one
block of one layer instead, so that moving, swapping and handing over blocks need not know of them. A layer that reads the
keys and values of another is where that is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from headway_executor.backend import BackendConfigError
from headway_executor.memory.kv_pool import CODES, StoredBlock, stored_block
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import ModelConfig
from headway_executor.models.part import ModelPart

_ALIGNED = 64
"""Numbers: a layer begins at a whole cache line, whatever is before it."""


class KvPlace(NamedTuple):
    """The layer of the pool, and the first of the numbers in its blocks."""

    layer: int
    first: int = 0


@dataclass(frozen=True)
class KvLayout:
    """A pool of ``num_layers``, whose blocks are each a ``block``; ``places`` are those of a part's layers, in order, None of
    one without attention.
    """

    num_layers: int
    block: StoredBlock
    places: tuple[KvPlace | None, ...]

    @property
    def block_bytes(self) -> int:
        """Of a block in all layers."""
        return self.num_layers * self.block.num_bytes


def kv_layout(
    config: ModelConfig, layers: Sequence[int], block_of: Callable[[AttentionConfig], StoredBlock]
) -> KvLayout:
    """Of these ``layers``, where ``block_of`` gives the form of a block of a layer alone."""
    own = [index for index in layers if config.layers[index].attends and config.layers[index].keys_of is None]
    blocks = {index: block_of(config.attention_of(index)) for index in own}
    if len(set(blocks.values())) <= 1:
        block = next(iter(blocks.values()), block_of(config.attention))
        # A stage may have no layer with keys and values, and has blocks like the others.
        return _placed(config, layers, max(1, len(own)), block, {index: KvPlace(i) for i, index in enumerate(own)})
    # So that a layer's vectors, of any size, are at whole numbers of them.
    unit = math.lcm(_ALIGNED, *(config.attention_of(index).head_dim for index in own))
    first, places = 0, {}
    for index, block in blocks.items():
        places[index] = KvPlace(0, first)
        first += -(-math.prod(block.shape) // unit) * unit
    return _placed(config, layers, 1, StoredBlock((first,), next(iter(blocks.values())).dtype), places)


def _placed(
    config: ModelConfig, layers: Sequence[int], num_layers: int, block: StoredBlock, own: dict[int, KvPlace]
) -> KvLayout:
    sources = (config.layers[index].keys_of for index in layers)
    places = (own.get(index if source is None else source) for index, source in zip(layers, sources, strict=True))
    return KvLayout(num_layers, block, tuple(places))


def vectors_layout(
    config: ModelConfig,
    part: ModelPart,
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str,
) -> KvLayout:
    """Of a part whose blocks are vectors of heads, see ``kv_vectors``, or rows of tokens: latent attention."""

    def block_of(attention: AttentionConfig) -> StoredBlock:
        num_vectors = part.attention(attention).num_vectors + config.has_index
        return stored_block(kv_cache_dtype, (num_vectors, block_size, attention.vector_dim), dtype)

    layout = kv_layout(config, part.layers, block_of)
    if kv_cache_dtype == CODES and len(layout.block.shape) == 1:
        raise BackendConfigError(
            f"kv_cache_dtype {CODES!r} is not allowed with this model, whose layers have keys and values of several sizes; "
            "allowed: auto"
        )
    return layout
