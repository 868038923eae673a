"""The weights of norms of heads: of queries, keys and values.

Owns: their order and form. Must not know: files, what a norm computes.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from headway_executor.models.config import ModelConfig
from headway_executor.models.part import ModelPart


class HeadNormTensors:
    """Of the heads that a ``part`` has. ``read`` gives rows of a tensor of a layer, or all of it; ``reordered`` brings the
    channels of a layer's heads in order.
    """

    def __init__(
        self,
        config: ModelConfig,
        part: ModelPart,
        read: Callable[[int, str, range | None], Tensor],
        reordered: Callable[[int, Tensor], Tensor],
        device: torch.device | None,
    ) -> None:
        self._config = config
        self._part = part
        self._read = read
        self._reordered = reordered
        self._device = device

    def weight(self, index: int) -> Tensor | None:
        """``[heads + kv_heads, head_dim]``: queries, then keys, then values if they are normalised; or None."""
        attention, layer = self._config.attention_of(index), self._config.layers[index]
        kind, kv_heads = attention.qk_norm, self._part.kv_heads_of(attention.num_kv_heads)
        names = self._config.names.query_norm, self._config.names.key_norm
        heads = self._part.heads_of(attention.num_heads), kv_heads
        count = 1 if layer.keys_of is not None else 2
        if kind == "none" or not layer.attends or (kind == "plain_if_rotated" and layer.rope is None):
            return None
        if kind in ("plain", "plain_if_rotated"):
            return torch.ones(sum(map(len, heads[:count])), attention.head_dim, device=self._device)
        pairs = list(zip(names, heads, strict=True))[:count]
        if kind == "layer":
            return torch.cat([self._of_layer_norm(index, *pair) for pair in pairs])
        norms = []
        for name, own in pairs:
            weight = with_offset(self._config.norm.offset, self._read(index, f"{name}.weight", None))
            by_head = self._reordered(index, weight).view(-1, attention.head_dim)
            norms.append(by_head.expand(len(own), -1))
        if attention.norms_values and layer.keys_of is None:
            norms.append(torch.ones_like(norms[0][:1]).expand(len(kv_heads), -1))
        return torch.cat(norms)

    def bias(self, index: int) -> Tensor | None:
        """As ``weight``, of layer norms that all heads share; or None."""
        names = self._config.names.query_norm, self._config.names.key_norm
        if not self._config.attention.shares_head_norms:
            return None
        heads = self._part.heads, self._part.kv_heads
        return torch.cat([self._of_layer_norm(index, *pair, "bias") for pair in zip(names, heads, strict=True)])

    def _of_layer_norm(self, index: int, name: str, heads: range, kind: str = "weight") -> Tensor:
        """``[heads, head_dim]``; see ``tensor_shapes``."""
        if self._config.attention.shares_head_norms:
            weights = self._read(index, f"{name}.{kind}", None).expand(len(heads), -1)
        elif "{}" in name:
            weights = torch.stack([self._read(index, f"{name.format(head)}.weight", None) for head in heads])
        else:
            weights = self._read(index, f"{name}.weight", heads)
        return self._reordered(index, weights.flatten()).view(-1, self._config.attention_of(index).head_dim)


def with_offset(offset: float, weight: Tensor) -> Tensor:
    """Return the weight that a norm multiplies by; some families store it less 1."""
    return weight.float() + offset if offset else weight
