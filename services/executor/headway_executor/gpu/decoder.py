"""The decoder of all supported families, as kernels and products.

Owns: embedding, norms, sums, the head, their memory. Must not know: how a token sees others, graphs, sampling.

Nothing here allocates, waits, or depends on a value of the device, so a CUDA graph can capture it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_executor.backend import BackendConfigError, StepBatch
from headway_executor.gpu.attention import AttentionSpace
from headway_executor.gpu.device_rows import DeviceRows
from headway_executor.gpu.device_step import DeviceStep, Mixing, StepStates
from headway_executor.gpu.feed_forward import DeviceFeedForward
from headway_executor.gpu.linear import DeviceLinear
from headway_executor.gpu.norm import DeviceNorm
from headway_executor.gpu.step_columns import ColumnViews
from headway_executor.memory.kv_pool import CODES
from headway_executor.models.config import ModelConfig
from headway_executor.models.decoder import capped_
from headway_executor.models.features import DENSE, Feature, lacking
from headway_executor.models.recurrence import RowStates
from headway_executor.rank_place import ALONE, RankPlace
from headway_kernels.gpu.attention.long_chunks import LongAttention
from headway_kernels.gpu.attention.tuning import MOST_CHANNELS
from headway_kernels.gpu.recurrence.bounds import RowBounds
from headway_kernels.gpu.rows import expand_rows, gather_rows

_FEATURES = DENSE | {
    Feature.HEAD_LAYER_NORM,
    Feature.INNER_NORM,
    Feature.NEAR_SHARES,
    Feature.EXPERTS,
    Feature.LATENT_EXPERTS,
    Feature.EXPERT_NORMS,
    Feature.WEIGHED_INPUTS,
    Feature.SINKS,
    Feature.LATENT,
    Feature.INDEX,
    Feature.QUERY_GROWTH,
    Feature.GATES,
    Feature.CLIP,
    Feature.CURVE,
    Feature.POSITIONS,
    Feature.ALIBI,
    Feature.UNEVEN_LAYERS,
    Feature.VALUE_NORM,
    Feature.NARROW_VALUES,
    Feature.SOFTPLUS_GATES,
    Feature.LIMIT,
    Feature.LAYER_FACTOR,
    Feature.LAYER_INPUTS,
    Feature.SUM_NORM,
    Feature.BEFORE_HEAD,
    Feature.ALONE,
    Feature.RECURRENCE,
}
"""What these kernels have beyond a plain decoder."""


_CUT_FEATURES = _FEATURES - {
    Feature.NORM_OVER_HEADS,
    Feature.INNER_NORM,
    Feature.EXPERT_NORMS,
    Feature.LATENT_EXPERTS,
    Feature.ALIBI,
    Feature.RECURRENCE,
}
"""What they have where several ranks compute a layer together."""


def check_kernels_have(config: ModelConfig, kv_cache_dtype: str, place: RankPlace = ALONE) -> None:
    """Check the parts of a model. Raises ``BackendConfigError``: there are some that these kernels lack."""
    missing = lacking(config, _FEATURES)
    if not missing and place.tensor_parallel > 1 and (uncut := lacking(config, _CUT_FEATURES)):
        raise BackendConfigError(
            f"tensor_parallel {place.tensor_parallel} is not allowed with backend 'triton' and {config.architecture}, which has "
            f"{uncut}; allowed: 1, or backend torch"
        )
    if config.has_index and kv_cache_dtype == CODES:
        raise BackendConfigError(
            f"kv_cache_dtype {CODES!r} is not allowed with backend 'triton' and {config.architecture}, which has "
            f"{Feature.INDEX}; allowed: auto, or backend torch"
        )
    widest = max(attention.summed_dim for attention in config.attentions)
    if widest > MOST_CHANNELS:
        missing = f"heads of {widest} channels"
    if missing:
        raise BackendConfigError(
            f"backend 'triton' is not allowed with {config.architecture}, which has {missing}; allowed: backend torch"
        )


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What a layer does not have is None. ``own_input`` makes of the hidden state what is added behind the feed-forward: see
    ``layer_inputs``. ``factor``, ``[1]``, multiplies the hidden state behind the layer.
    """

    attention_norm: DeviceNorm | None
    mixing: Mixing | None
    attention_post_norm: DeviceNorm | None
    mlp_norm: DeviceNorm | None
    feed_forward: DeviceFeedForward | None
    mlp_post_norm: DeviceNorm | None
    own_input: Callable[[Tensor, Tensor], None] | None
    factor: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """``embedding`` ``[vocab, hidden]``, or None: the hidden states come from a stage before. ``positions``
    ``[context, hidden]``, added to it, or None. ``table``, or None: see ``layer_inputs``. ``final_norm`` None: there is none.
    ``head`` None: the hidden states go to a stage behind.
    """

    embedding: Tensor | None
    positions: Tensor | None
    table: Callable[[Tensor, Tensor], None] | None
    layers: tuple[LayerWeights, ...]
    final_norm: DeviceNorm | None
    head: DeviceLinear | None


class _Activations:
    def __init__(
        self, config: ModelConfig, num_tokens: int, num_drawn: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def space(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        def padded(*shape: int) -> Tensor:
            """Padding is never written: zeros keep NaN out of the products."""
            return torch.zeros(shape, dtype=dtype, device=device)

        self.token_ids = space(num_tokens, kind=torch.int32)
        self.positions = space(num_tokens, kind=torch.int32)
        self.slots = space(num_tokens, kind=torch.int32)
        self.hidden = padded(num_tokens, config.hidden_size)
        self.normed = space(num_tokens, config.hidden_size)
        self.delta = space(num_tokens, config.hidden_size)
        self.last = padded(num_drawn, config.hidden_size)
        self.logits = space(num_drawn, config.vocab_size)


class Decoder:
    """A loaded model. ``attention``: what its layers share, of each way to attend; ``states``: of rows, in a model that has some;
    ``max_num_rows``: of a step; ``long_attention``: for long chunks, or None, as for others.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rows: DeviceRows,
        columns: ColumnViews,
        attention: Sequence[AttentionSpace],
        states: RowStates | None,
        *,
        max_num_tokens: int,
        max_num_rows: int,
        dtype: torch.dtype,
        long_attention: LongAttention | None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._rows = rows
        self._columns = columns
        num_drawn = 0 if weights.head is None else max_num_rows
        self._space = _Activations(config, max_num_tokens, num_drawn, dtype, rows.token_store.device)
        self._attention = attention
        self.states = states
        self._long_attention = long_attention

    @property
    def hidden(self) -> Tensor:
        """``[max_num_tokens, hidden]``: a step's hidden states, from the stage before it and for the stage behind it."""
        return self._space.hidden

    @property
    def has_head(self) -> bool:
        """Whether it gives logits."""
        return self._weights.head is not None

    def plan_long(self, batch: StepBatch) -> Callable[[Tensor, Tensor, Tensor], None] | None:
        """What attends with the long chunks of the step in the columns; None: there are none, or they are as others."""
        if self._long_attention is None:
            return None
        counts, computed = batch.num_scheduled_tokens, batch.num_computed_tokens
        return self._long_attention.plan(batch.rows, counts, computed, self._rows.block_tables)

    def run(
        self,
        pool: Tensor,
        num_tokens: int,
        num_rows: int,
        *,
        has_decodes: bool,
        has_chunks: bool,
        long_chunks: Callable[[Tensor, Tensor, Tensor], None] | None = None,
    ) -> None:
        """Run the step in the columns, padded to ``num_tokens`` and ``num_rows``; ``long_chunks`` from ``plan_long``.

        ``pool``: see ``DeviceStep``.
        """
        space, weights = self._space, self._weights
        self._expand(num_tokens, num_rows)
        most_tokens = None if self._long_attention is None or long_chunks is None else self._long_attention.most_tokens
        for space_of_kind in self._attention:
            positions = space.positions[:num_tokens]
            space_of_kind.begin(self._columns, self._rows.block_tables, positions, num_rows, most_tokens)
        hidden, normed, delta = space.hidden[:num_tokens], space.normed[:num_tokens], space.delta[:num_tokens]
        step = DeviceStep(
            positions=space.positions[:num_tokens],
            slots=space.slots[:num_tokens],
            pool=pool,
            has_decodes=has_decodes,
            has_chunks=has_chunks,
            long_chunks=long_chunks,
            states=self._step_states(num_rows),
        )
        if weights.embedding is not None:
            self._embed(weights.embedding, hidden, normed)
        update: Tensor | None = None
        factor: Tensor | None = None
        for layer in weights.layers:
            if layer.mixing is not None:
                layer.mixing(_normed(hidden, update, layer.attention_norm, normed, factor), step, delta)
                factor = None
                if not self._config.is_parallel:
                    update = self._finished(hidden, delta, layer.attention_post_norm)
            if layer.feed_forward is not None:
                if self._config.is_parallel:
                    # Before anything is added to the hidden state.
                    inputs = _normed(hidden, None, layer.mlp_norm, normed)
                    _normed(hidden, self._finished(hidden, delta, layer.attention_post_norm), None, normed)
                else:
                    inputs = _normed(hidden, update, layer.mlp_norm, normed, factor)
                layer.feed_forward(inputs, step.slots, delta)
                update = self._finished(hidden, delta, layer.mlp_post_norm)
            factor = layer.factor
            if layer.own_input is not None:
                layer.own_input(_normed(hidden, update, None, normed), delta)
                update = delta
        if _normed(hidden, update, weights.final_norm, normed, factor) is hidden and weights.head is not None:
            normed.copy_(hidden)

    def logits(self, num_sampled: int) -> Tensor:
        """Logits ``[num_sampled, vocab]``, in memory that the next call reuses."""
        last, logits = self._space.last[:num_sampled], self._space.logits[:num_sampled]
        gather_rows(self._space.normed, self._columns.sampled_token[:num_sampled], last)
        return self._headed(last, logits)

    def logits_of(self, first: int, count: int) -> Tensor:
        """Logits of ``count`` tokens from ``first`` on, at most one per row."""
        return self._headed(self._space.normed[first : first + count], self._space.logits[:count])

    def _finished(self, hidden: Tensor, delta: Tensor, norm: DeviceNorm | None) -> Tensor | None:
        """What is to be added to the hidden state, of what a part of a layer has made; None: it has been."""
        sums = self._config.norms_sums
        if norm is not None and not sums:
            norm(delta, None, delta)
        if self._config.scalings.residual != 1:
            delta.mul_(self._config.scalings.residual)
        if norm is not None and sums:
            norm(hidden, delta, hidden)
            return None
        return delta

    def _headed(self, states: Tensor, logits: Tensor) -> Tensor:
        assert self._weights.head is not None
        self._weights.head(states, logits)
        scalings = self._config.scalings
        if scalings.logits != 1:
            logits.mul_(scalings.logits)
        return logits if scalings.logits_softcap is None else capped_(logits, scalings.logits_softcap)

    def _embed(self, embedding: Tensor, hidden: Tensor, normed: Tensor) -> None:
        """Begin with what tokens are, and perhaps where; ``normed`` is overwritten."""
        space, weights, num_tokens = self._space, self._weights, len(hidden)
        gather_rows(embedding, space.token_ids[:num_tokens], hidden)
        if weights.positions is not None:
            gather_rows(weights.positions, space.positions[:num_tokens], normed)
            hidden.add_(normed)
        if weights.table is not None:
            weights.table(space.token_ids[:num_tokens], hidden)

    def _step_states(self, num_rows: int) -> StepStates | None:
        columns = self._columns
        if self.states is None:
            return None
        bounds = RowBounds(
            columns.rows[:num_rows], columns.query_start[: num_rows + 1], columns.first_position[:num_rows]
        )
        return StepStates(self.states, bounds)

    def _expand(self, num_tokens: int, num_rows: int) -> None:
        space, columns = self._space, self._columns
        expand_rows(
            columns.rows[:num_rows],
            columns.query_start[: num_rows + 1],
            columns.first_position[:num_rows],
            self._rows.token_store,
            self._rows.block_tables,
            space.token_ids[:num_tokens],
            space.positions[:num_tokens],
            space.slots[:num_tokens],
            block_size=self._rows.block_size,
        )


def _normed(
    hidden: Tensor, update: Tensor | None, norm: DeviceNorm | None, out: Tensor, factor: Tensor | None = None
) -> Tensor:
    """Add ``update`` to the hidden state, and multiply it by ``factor``; return it behind a norm, if there is one."""
    if norm is None:
        hidden = hidden if update is None else hidden.add_(update)
        return hidden if factor is None else hidden.mul_(factor)
    norm(hidden, update, out, factor)
    return out
