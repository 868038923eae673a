"""Encoders of the BERT family, as plain torch operators: from token ids to hidden states.

Owns: their tensors and forward pass. Must not know: pools, steps, pooling.

A token sees all tokens of its input, so an input runs whole and leaves nothing behind for later ones. Devlin et al. 2019
(arXiv 1810.04805); Liu et al. 2019 (arXiv 1907.11692) count positions from the padding token's id on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.families.bert import EncoderConfig
from headway_executor.models.linear import Linear, placed
from headway_executor.models.pair_head import PairHead, head_tensors, load_head

_LAYER = "encoder.layer.{}."
_TYPES = "embeddings.token_type_embeddings.weight"
_IGNORED = frozenset({"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"})
"""Old checkpoints hold the numbers of positions; the pooler belongs to a head."""


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Ba et al. 2016 (arXiv 1607.06450)."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise the last dimension into a new tensor."""
        return functional.layer_norm(inputs, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """``qkv`` gives queries, keys and values side by side."""

    num_heads: int
    qkv: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    norm: LayerNorm

    def __call__(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the next ``[tokens, hidden]``; inputs of these ``lengths`` follow each other."""
        parts = torch.split(self.qkv(hidden), list(lengths))
        attended = torch.cat([self._attend(part) for part in parts])
        hidden = self.attention_norm(hidden + self.output(attended))
        return self.norm(hidden + self.down(functional.gelu(self.up(hidden))))

    def _attend(self, qkv: Tensor) -> Tensor:
        queries, keys, values = qkv.view(len(qkv), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        return functional.scaled_dot_product_attention(queries, keys, values).transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class Encoder:
    """``tokens`` and ``positions`` are tables of embeddings; ``positions`` contain that of the first token type.

    ``second_part``: what is added to the tokens of a pair's second text, ``[hidden]``, or None. ``head``: a reranker's.
    """

    config: EncoderConfig
    tokens: Tensor
    positions: Tensor
    norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    second_part: Tensor | None
    head: PairHead | None

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the hidden states of each input, floating, ``[tokens, hidden]``. ``inputs``: int64, ``[tokens]``."""
        token_ids = torch.cat(tuple(inputs))
        places = torch.cat([self._positions_of(one) for one in inputs])
        embedded = functional.embedding(token_ids, self.tokens) + functional.embedding(places, self.positions)
        if self.second_part is not None:
            is_second = torch.cat([_is_in_second_part(one) for one in inputs])
            embedded = embedded + is_second.unsqueeze(1) * self.second_part
        hidden = self.norm(embedded)
        lengths = [len(one) for one in inputs]
        for layer in self.layers:
            hidden = layer(hidden, lengths)
        return torch.split(hidden, lengths)

    def _positions_of(self, token_ids: Tensor) -> Tensor:
        padding_id = self.config.padding_id
        if padding_id is None:
            return torch.arange(len(token_ids), device=token_ids.device)
        is_text = (token_ids != padding_id).long()
        return is_text.cumsum(0) * is_text + padding_id


def _is_in_second_part(token_ids: Tensor) -> Tensor:
    """For each token of a pair; the separator ends both parts."""
    is_separator = (token_ids == token_ids[-1]).long()
    return is_separator.cumsum(0) > is_separator


def load_encoder(config: EncoderConfig, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> Encoder:
    """Check the tensors and load them.

    Raises:
        ModelFilesError: the checkpoint has others.
    """
    prefix = config.prefix
    expected = {prefix + name: shape for name, shape in _expected_tensors(config).items()}
    checkpoint.check(expected | head_tensors(config), {prefix + name for name in _IGNORED})

    def read(name: str) -> Tensor:
        return placed(checkpoint.read(name), dtype, device)

    def linear(*names: str) -> Linear:
        weight = torch.cat([checkpoint.read(f"{name}.weight") for name in names])
        bias = torch.cat([checkpoint.read(f"{name}.bias") for name in names])
        return Linear(weight, bias, dtype=dtype, device=device)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(read(f"{name}.weight"), read(f"{name}.bias"), config.norm_eps)

    def layer(index: int) -> EncoderLayer:
        place = prefix + _LAYER.format(index)
        return EncoderLayer(
            num_heads=config.num_heads,
            qkv=linear(*(f"{place}attention.self.{part}" for part in ("query", "key", "value"))),
            output=linear(f"{place}attention.output.dense"),
            attention_norm=norm(f"{place}attention.output.LayerNorm"),
            up=linear(f"{place}intermediate.dense"),
            down=linear(f"{place}output.dense"),
            norm=norm(f"{place}output.LayerNorm"),
        )

    types = checkpoint.read(prefix + _TYPES).float()
    positions = checkpoint.read(f"{prefix}embeddings.position_embeddings.weight")
    return Encoder(
        config=config,
        tokens=read(f"{prefix}embeddings.word_embeddings.weight"),
        positions=placed(positions.float() + types[0], dtype, device),
        norm=norm(f"{prefix}embeddings.LayerNorm"),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        second_part=placed(types[1] - types[0], dtype, device) if config.marks_parts else None,
        head=load_head(config, linear),
    )


def _expected_tensors(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    expected: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.num_positions, hidden),
        _TYPES: (config.num_types, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for index in range(config.num_layers):
        for name, (outputs, inputs) in {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inner, hidden),
            "output.dense": (hidden, inner),
        }.items():
            expected[f"{_LAYER.format(index)}{name}.weight"] = (outputs, inputs)
            expected[f"{_LAYER.format(index)}{name}.bias"] = (outputs,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            expected[f"{_LAYER.format(index)}{name}.weight"] = (hidden,)
            expected[f"{_LAYER.format(index)}{name}.bias"] = (hidden,)
    return expected
