"""A model as plain torch operators: any device, any floating dtype.

Owns: a step, from ids to hidden state. Must not know: files, how a layer computes.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.memory.kv_pool import KvPool
from headway_executor.models.adapted import StepAdapters
from headway_executor.models.attention import AttentionPlan, OrderedRows
from headway_executor.models.config import ModelConfig
from headway_executor.models.decoder import Decoder, Embedding, StepPlan
from headway_executor.models.eager_products import mates_of
from headway_executor.models.forward import StepRows
from headway_executor.models.part import whole
from headway_executor.models.recurrence import RowStates, StateSpan, spans_of
from headway_executor.models.stage import Stage


class EagerModel:
    """A ``ForwardPass``. ``embedding`` is None in a later stage. ``adapters``: the loader's. ``states``: of a model that has
    them.
    """

    has_slow_start = True
    """Torch prepares its operators."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        embedding: Embedding | None,
        pool: KvPool,
        dtype: torch.dtype,
        stage: Stage | None = None,
        adapters: StepAdapters | None = None,
        states: RowStates | None = None,
    ) -> None:
        self.states = states
        self._stage = stage or Stage(whole(config))
        self._mates = mates_of(self._stage)
        self._decoder = decoder
        self._embedding = embedding
        self._step_adapters = adapters
        self.adapters = None if adapters is None else adapters.adapters
        self.pool = pool
        self._dtype = dtype

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.run``."""
        return self._run(rows, token_ids, self._decoder.logits)

    def hidden(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.hidden``."""
        return self._run(rows, token_ids, self._decoder.normed)

    def _run(self, rows: StepRows, token_ids: Tensor, end: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``end``: what the last stage makes of the hidden states of all tokens and the places of those wanted."""
        hidden, wanted = self._run_layers(rows, token_ids)
        part = self._stage.part
        if part.place.is_last_stage:
            return end(hidden, wanted)
        own = part.own_hidden
        self._stage.pass_on(hidden[:, own.start : own.stop])
        return hidden[:0]

    def _run_layers(self, rows: StepRows, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states of all tokens, and the places of those that are wanted."""
        ordered = OrderedRows(rows.num_new, rows.num_computed, rows.tables)
        token_rows = ordered.token_rows()
        positions = ordered.positions(token_rows)
        block_size = self.pool.block_size
        slots = ordered.tables[token_rows, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        device = token_ids.device
        columns = np.stack([rows.numbers[ordered.order][token_rows], positions])
        store_rows, store_positions = torch.from_numpy(columns).to(device).unbind(0)
        attention = AttentionPlan(self.pool, ordered, slots, store_positions, self._dtype, self._decoder.biases)
        if self._step_adapters is not None:
            self._step_adapters.begin(columns[0], device)
        words = token_ids[store_rows, store_positions]
        hidden, table = self._begin(words, store_positions), self._decoder.table
        inputs = None if table is None else table(words, hidden)
        plan = StepPlan(attention, self.states, self._spans(rows, ordered, device), inputs)
        self._decoder.run_layers(hidden, store_positions, plan)
        return hidden, torch.from_numpy(_places_in_order(rows, ordered)[rows.wanted]).to(device)

    def _spans(self, rows: StepRows, ordered: OrderedRows, device: torch.device) -> list[StateSpan]:
        if self.states is None:
            return []
        self.states.advance(rows.numbers, rows.num_computed, rows.num_new)
        first = ordered.kv_length - ordered.num_new
        return spans_of(rows.numbers[ordered.order], ordered.num_new, first, device)

    def _begin(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self._embedding is None:
            own = self._stage.receive(len(token_ids), self._dtype)
            assert own is not None
        else:
            own = self._embedding(token_ids, positions)
        return self._mates.gather(own, self._stage.part.hidden)


def _places_in_order(rows: StepRows, ordered: OrderedRows) -> NDArray[np.int64]:
    starts = np.empty_like(ordered.starts)
    starts[ordered.order] = ordered.starts
    places, positions = rows.token_places()
    return starts[places] + positions - rows.num_computed[places]
