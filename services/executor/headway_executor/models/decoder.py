"""The decoder that all supported families share, as plain torch operators.

Owns: the forward pass from token ids to logits, and the form its weights take (fused, permuted).
Must not know: where tokens come from, how keys and values are paged, or what is done with the logits.

Every layer sees one flat ``[tokens, hidden]`` tensor; only attention knows that it is made of rows. Query, key and value
projections are one product, gate and up projections another. Query and key channels are permuted at load so that rotated
pairs lie side by side (see ``rope``).
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
    """Root mean square normalisation over the last dimension, in float32 (Zhang & Sennrich 2019, arXiv 1910.07467).

    ``weight`` has the last dimensions.
    """

    weight: Tensor
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise ``inputs``; same shape and dtype, a new tensor."""
        wide = inputs.float()
        normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normalised.to(inputs.dtype).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer.

    ``qkv`` gives queries, keys and values side by side; ``num_rotated`` is how many of its heads are queries and keys.
    ``qk_norm`` normalises those per head (weight ``[num_rotated, head_dim]``) where the family does. ``gate_up`` gives
    gate and up side by side. ``window`` is how many positions a query sees, None for all.
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
        """Add the layer's attention and MLP to ``hidden`` (``[tokens, hidden]``) in place."""
        attended = plan.attend(self.index, self.window, self._rotated(hidden, rotation))
        hidden.add_(self.output(attended))
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=1)
        hidden.add_(self.down(functional.silu(gate).mul_(up)))

    def _rotated(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        """Queries, keys and values, the first two rotated to their positions."""
        qkv = self.qkv(self.attention_norm(hidden))
        heads = qkv[:, : self.num_rotated * self.head_dim].view(-1, self.num_rotated, self.head_dim)
        if self.qk_norm is not None:
            heads.copy_(self.qk_norm(heads))
        rotate_(heads, rotation)
        return qkv


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model.

    ``embedding`` shape ``[vocab, hidden]``; ``rotations`` complex64, shape ``[context, head_dim // 2]``.
    """

    embedding: Tensor
    rotations: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: RmsNorm
    head: Linear

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, sampled: Tensor) -> Tensor:
        """Logits of the tokens that are asked for.

        ``token_ids`` integer and ``positions`` int64, both ``[tokens]``; ``sampled`` int64, ``[n]``, indices into them.
        Returns ``[n, vocab]`` in the model's dtype. Keys and values of all tokens are stored on the way.
        """
        hidden = functional.embedding(token_ids, self.embedding)
        rotation = self.rotations.index_select(0, positions).unsqueeze(1)
        for layer in self.layers:
            layer(hidden, rotation, plan)
        return self.head(self.final_norm(hidden.index_select(0, sampled)))
