"""Queries, keys and values of one tensor, in the orders of checkpoints that do not have them part after part.

Owns: these orders. Must not know: names, files.

``stored`` is ``[channels of heads, ...]``, a weight or a bias; each part is ``[own heads * head_dim, ...]``.
"""

import torch
from torch import Tensor

from headway_executor.models.config import ModelConfig
from headway_executor.models.part import ModelPart


def by_group(stored: Tensor, config: ModelConfig, part: ModelPart) -> tuple[Tensor, Tensor, Tensor]:
    """Each key-value head behind its queries; ``stored`` are those of the part."""
    count = config.num_heads // config.num_kv_heads
    groups = stored.view(-1, count + 2, config.head_dim, *stored.shape[1:])
    queries, keys, values = torch.split(groups, [count, 1, 1], 1)
    first = part.heads.start - part.kv_heads.start * count  # Of several ranks, each may have some queries of a group.
    own = queries.flatten(0, 1)[first : first + len(part.heads)]
    return own.flatten(0, 1), keys.flatten(0, 2), values.flatten(0, 2)


def by_block(stored: Tensor, config: ModelConfig, part: ModelPart) -> tuple[Tensor, Tensor, Tensor]:
    """So many blocks of heads, each of queries, values and keys; ``stored`` are all."""
    blocks = stored.view(config.names.blocks, 3, -1, config.head_dim, *stored.shape[1:])
    own = part.heads
    queries, values, keys = (heads.flatten(0, 1)[own.start : own.stop].flatten(0, 1) for heads in blocks.unbind(1))
    return queries, keys, values
