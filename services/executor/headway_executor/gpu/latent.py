"""Queries, keys and values of latent attention (DeepSeek-AI 2024, arXiv 2405.04434), into preallocated memory.

Owns: expanding compressed rows, their memory. Must not know: rotation, attention, files.

Keys and values are expanded before they are stored, other than in ``models/latent.py``.
"""

import torch
from torch import Tensor

from headway_executor.gpu.linear import DeviceLinear
from headway_executor.models.attention_config import LatentConfig


class LatentQkv:
    """A ``DeviceLinear`` to queries, keys and values, ``3 * heads * key_dim`` columns, and perhaps ``gates`` of as many columns as
    queries; keys are not rotated yet.

    ``compress`` gives what queries are made of, unless ``query`` takes the hidden state; then what keys and values are
    made of, then the channels that all keys share; ``expand`` may change the former. ``space`` ``[max tokens, its outputs]``.
    """

    def __init__(
        self,
        config: LatentConfig,
        num_heads: int,
        query: DeviceLinear,
        compress: DeviceLinear,
        expand: DeviceLinear,
        space: Tensor,
        gates: DeviceLinear | None,
    ) -> None:
        self._config = config
        self._num_heads = num_heads
        self._query = query
        self._compress = compress
        self._expand = expand
        self._space = space
        self._gates = gates

    def __call__(self, inputs: Tensor, out: Tensor) -> None:
        """See ``DeviceLinear``."""
        config, heads, num_tokens = self._config, self._num_heads, len(inputs)
        compressed = self._space[:num_tokens]
        self._compress(inputs, compressed)
        of_query, latent, shared = torch.split(compressed, [config.query_rank or 0, config.rank, config.rotary_dim], 1)
        width = heads * config.key_dim
        self._query(inputs if config.query_rank is None else of_query, out[:, :width])
        self._expand(latent, out[:, width : 3 * width])
        if self._gates is not None:
            self._gates(inputs, out[:, 3 * width :])
        # Rotated channels come first in each half of a head.
        keys = out[:, width : 2 * width].view(num_tokens, heads, 2, config.key_dim // 2)
        keys[..., : config.rotary_dim // 2] = shared.view(num_tokens, 1, 2, config.rotary_dim // 2)


def latent_space(config: LatentConfig, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for compressed rows, shared by layers one after the other."""
    width = (config.query_rank or 0) + config.rank + config.rotary_dim
    return torch.empty(num_tokens, width, dtype=dtype, device=device)
