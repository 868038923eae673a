"""The decoder of all supported families, as plain torch operators.

Owns: the forward pass. Must not know: paging, the use of logits.

Rotated pairs of channels lie side by side (see ``rope``).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.linear import Linear
from headway_executor.models.attention import AttentionPlan
from headway_executor.models.rope import rotate_


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Root mean square normalisation in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    weight: Tensor
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise the last dimension into a new tensor."""
        wide = inputs.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normalised.to(inputs.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """``qkv`` and ``gate_up`` give their parts side by side.

    ``qk_norm`` (``[num_rotated, head_dim]``) normalises the heads of queries and keys, or is None. A query sees
    ``window`` positions; None: all.
    """

    index: int
    attention_norm: RmsNorm
    qkv: Linear
    num_rotated: int
    head_dim: int
    qk_norm: RmsNorm | None
    output: Linear
    window: int | None
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear

    def __call__(self, hidden: Tensor, rotation: Tensor, plan: AttentionPlan) -> None:
        """Add attention and MLP to ``hidden`` (``[tokens, hidden]``) in place."""
        attended = plan.attend(self.index, self.window, self._rotated(hidden, rotation))
        hidden.add_(self.output(attended))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=1)
        hidden.add_(self.down(functional.silu(gate).mul_(up)))

    def _rotated(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(hidden))
        heads = qkv[:, : self.num_rotated * self.head_dim].view(-1, self.num_rotated, self.head_dim)
        if self.qk_norm is not None:
            heads.copy_(self.qk_norm(heads))
        rotate_(heads, rotation)
        return qkv


@dataclass(frozen=True, slots=True)
class Decoder:
    """``embedding`` ``[vocab, hidden]``; ``rotations`` complex64, ``[context, head_dim // 2]``."""

    embedding: Tensor
    rotations: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: RmsNorm
    head: Linear

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, sampled: Tensor) -> Tensor:
        """Store keys and values; return logits, ``[n, vocab]``, in the model's dtype.

        ``token_ids`` integer and ``positions`` int64, both ``[tokens]``; ``sampled`` int64, ``[n]``, indices into them.
        """
        hidden = functional.embedding(token_ids, self.embedding)
        rotation = self.rotations.index_select(0, positions).unsqueeze(1)
        for layer in self.layers:
            layer(hidden, rotation, plan)
        return self.head(self.final_norm(hidden.index_select(0, sampled)))
