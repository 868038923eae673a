"""The part of a model that one rank of an executor has.

Owns: which layers, heads and columns are whose, and which degrees a model allows. Must not know: tensors, how ranks talk.

Every product is cut by its outputs, and its inputs are gathered before it. So each output is the same chain of additions
as with one rank. In the fast form, the output and down projections are cut by their inputs, and the ranks' sums are added.
"""

import itertools
from dataclasses import dataclass

import msgspec

from headway_executor.backend import BackendConfigError
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import ModelConfig
from headway_executor.rank_place import ALONE, RankPlace


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What one rank has. ``hidden`` and ``vocab`` hold each rank's columns: of the stage, in order. Columns are cut at
    multiples of ``unit``, between the projections of ``head_unit``.

    ``heads`` and ``kv_heads`` are this rank's. Several ranks may have the same key-value head.
    """

    place: RankPlace
    layers: range
    heads: range
    kv_heads: range
    hidden: tuple[range, ...]
    vocab: tuple[range, ...]
    unit: int
    head_unit: int
    is_fast: bool

    def heads_of(self, count: int) -> range:
        """This rank's heads of a layer that has ``count`` of them."""
        return self._heads_of(count, self.place.tensor_rank)

    def _heads_of(self, count: int, rank: int) -> range:
        degree = self.place.tensor_parallel
        return range(rank * count // degree, (rank + 1) * count // degree)

    def kv_heads_of(self, count: int) -> range:
        """This rank's key-value heads of a layer that has ``count`` of them."""
        first = self.place.tensor_rank * count // self.place.tensor_parallel
        return range(first, first + max(1, count // self.place.tensor_parallel))

    def attention(self, of_all: AttentionConfig) -> AttentionConfig:
        """Attention of this rank's heads alone."""
        heads, kv_heads = self.heads_of(of_all.num_heads), self.kv_heads_of(of_all.num_kv_heads)
        return msgspec.structs.replace(of_all, num_heads=len(heads), num_kv_heads=len(kv_heads))

    @property
    def own_hidden(self) -> range:
        """This rank's columns of the hidden state."""
        return self.hidden[self.place.tensor_rank]

    @property
    def own_vocab(self) -> range:
        """This rank's columns of the logits."""
        return self.vocab[self.place.tensor_rank]

    def inner(self, size: int) -> tuple[range, ...]:
        """Each rank's columns between gate and down projection of a feed-forward of ``size`` columns."""
        return _cut(size, self.place.tensor_parallel, self.head_unit)

    def own_inner(self, size: int) -> range:
        """This rank's columns of them."""
        return self.inner(size)[self.place.tensor_rank]

    def of_expert(self, size: int) -> tuple[range, ...]:
        """As ``inner``, of an expert, with the columns that fill its last unit."""
        return self.inner(-(-size // self.unit) * self.unit)

    def own_of_expert(self, size: int) -> range:
        """This rank's columns of an expert, without those that fill its last unit."""
        own = self.of_expert(size)[self.place.tensor_rank]
        return range(min(own.start, size), min(own.stop, size))

    def attended(self, num_heads: int, head_dim: int) -> tuple[range, ...]:
        """Each rank's columns of the attended values of so many heads."""
        by_rank = (self._heads_of(num_heads, rank) for rank in range(self.place.tensor_parallel))
        return tuple(range(heads.start * head_dim, heads.stop * head_dim) for heads in by_rank)

    @property
    def in_words(self) -> str:
        """What tells its blocks from those of other parts; empty for the whole model."""
        return "" if self.place.is_alone else f" layers {self.layers} heads {self.kv_heads}"

    @property
    def is_whole_stage(self) -> bool:
        """Whether no other rank has a part of these layers."""
        return self.place.tensor_parallel == 1


def part_of(
    config: ModelConfig, place: RankPlace, *, unit: int = 1, head_unit: int = 1, is_fast: bool = False
) -> ModelPart:
    """Return the part of one rank.

    Raises:
        BackendConfigError: the model cannot be cut into so many parts.
    """
    _check(config, place)
    degree = place.tensor_parallel
    if degree > 1 and is_fast and (config.names.output_norm or config.names.down_norm):
        raise BackendConfigError(
            "tensor_parallel_form 'fast' is not allowed; the model has norms of whole rows before projections that it cuts by "
            "their inputs, so allowed: exact"
        )
    first_kv = place.tensor_rank * config.num_kv_heads // degree
    return ModelPart(
        place=place,
        layers=place.layers(config.num_layers),
        heads=_cut(config.num_heads, degree, 1)[place.tensor_rank],
        kv_heads=range(first_kv, first_kv + max(1, config.num_kv_heads // degree)),
        hidden=_cut(config.hidden_size, degree, unit),
        vocab=_cut(config.vocab_size, degree, unit),
        unit=unit,
        head_unit=head_unit,
        is_fast=is_fast,
    )


def whole(config: ModelConfig) -> ModelPart:
    """The part of a rank that is alone."""
    return part_of(config, ALONE)


def _cut(total: int, parts: int, unit: int) -> tuple[range, ...]:
    """Cut at multiples of ``unit``, as evenly as that allows."""
    units = -(-total // unit)
    bounds = [min(total, units * i // parts * unit) for i in range(parts + 1)]
    return tuple(range(start, end) for start, end in itertools.pairwise(bounds))


def _check(config: ModelConfig, place: RankPlace) -> None:
    degree = place.tensor_parallel
    all_heads = sorted({attention.num_heads for attention in config.attentions}, reverse=True)
    all_kv_heads = sorted({attention.num_kv_heads for attention in config.attentions}, reverse=True)
    if degree > 1 and config.attention.qk_norm == "all":
        raise BackendConfigError(
            f"tensor_parallel {degree} is not allowed; the model normalises queries over all heads, so allowed: 1"
        )
    if degree > 1 and config.has_states:
        raise BackendConfigError(
            f"tensor_parallel {degree} is not allowed; the model has layers with a state instead of attention, so allowed: 1"
        )
    if degree > 1 and config.states is not None:  # Its sparse activations have a bound for whole rows, too.
        raise BackendConfigError(
            f"tensor_parallel {degree} is not allowed; the model's tokens have several hidden states, so allowed: 1"
        )
    allowed = [
        n
        for n in range(1, all_heads[-1] + 1)
        if not any(heads % n for heads in all_heads) and not any(kv % n and n % kv for kv in all_kv_heads)
    ]
    if degree not in allowed:
        raise BackendConfigError(
            f"tensor_parallel {degree} is not allowed; the model has {' or '.join(map(str, all_heads))} heads and {' or '.join(map(str, all_kv_heads))} key-value heads, which "
            f"go into equal parts, so allowed: {', '.join(map(str, allowed))}"
        )
    if place.pipeline_parallel > 1 and any(layer.keys_of is not None for layer in config.layers):
        raise BackendConfigError(
            f"pipeline_parallel {place.pipeline_parallel} is not allowed; the model's layers share keys and values, so allowed: 1"
        )
    if place.pipeline_parallel > 1 and any(layer.sees_as_before for layer in config.layers):
        raise BackendConfigError(
            f"pipeline_parallel {place.pipeline_parallel} is not allowed; the model's layers share what an index chose, so "
            "allowed: 1"
        )
    if place.pipeline_parallel > 1 and config.layer_inputs is not None:
        raise BackendConfigError(
            f"pipeline_parallel {place.pipeline_parallel} is not allowed; the model's layers have inputs of their own, so "
            "allowed: 1"
        )
    if place.pipeline_parallel > config.num_layers:
        raise BackendConfigError(
            f"pipeline_parallel {place.pipeline_parallel} is not allowed; the model has {config.num_layers} layers, so "
            f"allowed: 1 to {config.num_layers}"
        )
