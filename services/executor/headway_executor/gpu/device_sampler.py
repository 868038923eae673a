"""Drawing the next tokens on the device, and bringing them to main memory.

Owns: parameters, the choice of kernels. Must not know: the model, blocks.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway_executor.backend import NewRow
from headway_executor.gpu.runtime import Runtime, fetched, sent
from headway_executor.gpu.step_columns import ColumnViews
from headway_executor.sampling.constraints.rows import StepMasks
from headway_executor.sampling.sampler import BAD_LOGITS
from headway_executor.sampling.sampling_columns import SamplingColumns, SamplingEntriesError, SamplingNeeds
from headway_kernels.gpu.masks import exclude
from headway_kernels.gpu.rows import store_sampled
from headway_kernels.gpu.sampling.logprobs import row_logprobs, top_logprobs
from headway_kernels.gpu.sampling.memory import SamplingColumns as DeviceColumns
from headway_kernels.gpu.sampling.memory import SamplingWorkspace
from headway_kernels.gpu.sampling.sample import sample
from headway_proto.columns import Int32Array
from headway_proto.sampling import MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, NO_LOGPROBS, SamplingParams
from headway_proto.step import RowError, RowLogprobs

_STOP_IDS_PER_ROW = 20
"""Entries per row beside the logit bias; rows share them."""


class DrawnTokens(NamedTuple):
    """A step's draws; valid once the device has passed the copies.

    ``ids_and_status`` int32, ``[2, n]`` or wider: one copy brings both. ``logprobs`` float32, ``[n]``, or None.
    ``top``: ids and log probabilities, both ``[k, width]``, of the rows ``top_places``.
    """

    rows: Int32Array
    num_logprobs: Int32Array
    ids_and_status: Tensor
    logprobs: Tensor | None
    top: tuple[Tensor, Tensor] | None
    top_places: Int32Array

    def collect(self) -> tuple[Int32Array, tuple[RowLogprobs, ...], tuple[RowError, ...]]:
        """Token ids (int32, ``[n]``, -1 for failed rows), log probabilities, errors."""
        token_ids, status = self.ids_and_status.numpy()[:, : len(self.rows)]
        errors: tuple[RowError, ...] = ()
        if status.any():
            errors = tuple(RowError(row, BAD_LOGITS) for row in self.rows[status != 0].tolist())
        return token_ids, self._row_logprobs(status), errors

    def token_ids(self) -> Int32Array:
        """The token ids of ``collect``."""
        token_ids: Int32Array = self.ids_and_status.numpy()[0, : len(self.rows)]
        return token_ids

    def _row_logprobs(self, status: Int32Array) -> tuple[RowLogprobs, ...]:
        if self.logprobs is None:
            return ()
        own = self.logprobs.tolist()
        top_ids, top_values = ([], []) if self.top is None else (part.tolist() for part in self.top)
        at = {place: number for number, place in enumerate(self.top_places.tolist())}
        found = []
        for place, (row, count) in enumerate(zip(self.rows.tolist(), self.num_logprobs.tolist(), strict=True)):
            if count < 0 or status[place]:
                continue
            ids, values = (top_ids[at[place]], top_values[at[place]]) if count else ([], [])
            found.append(RowLogprobs(row, own[place], tuple(ids[:count]), tuple(values[:count])))
        return tuple(found)


class DeviceSampler:
    """Sampling state of ``max_num_rows`` rows, of which a step may draw ``max_num_draws`` tokens."""

    def __init__(self, runtime: Runtime, *, vocab_size: int, max_num_rows: int, max_num_draws: int) -> None:
        self._runtime = runtime
        self._vocab_size = vocab_size
        entry_capacity = max_num_rows * (MAX_LOGIT_BIAS_ENTRIES + _STOP_IDS_PER_ROW)
        device = runtime.device
        self._host = SamplingColumns(vocab_size=vocab_size, max_num_rows=max_num_rows, entry_capacity=entry_capacity)
        self._columns = DeviceColumns.allocate(num_rows=max_num_rows + 1, entry_capacity=entry_capacity, device=device)
        self._workspace = SamplingWorkspace.allocate(max_batch=max_num_draws, vocab_size=vocab_size, device=device)
        self._drawn = torch.zeros((2, max_num_draws), dtype=torch.int32, device=device)
        self._own_logprobs = torch.zeros((2, max_num_draws), dtype=torch.float32, device=device)

    def forget(self, rows: Int32Array) -> None:
        """Forget finished ``rows``."""
        for row in rows.tolist():
            self._host.clear_row(row)

    def add_rows(self, new_rows: tuple[NewRow, ...]) -> dict[int, str]:
        """Store parameters; return refused rows with reasons."""
        refused = {}
        for new in new_rows:
            try:
                entries = self._host.set_row(new.row, new.sampling, new.num_prompt_tokens)
            except SamplingEntriesError as error:
                refused[new.row] = str(error)
                continue
            if entries is not None:
                self._columns.write_entries(entries.first, self._sent(entries.token_ids), self._sent(entries.biases))
        rows = np.array([new.row for new in new_rows], dtype=np.int64)
        self._columns.write_rows(self._sent(rows), self._sent(self._host.pack(rows)))
        return refused

    def is_greedy(self, rows: Int32Array) -> bool:
        """Whether the likeliest token is all that each of ``rows`` wants."""
        needs = self._host.needs(rows)
        return needs.variant == "greedy" and not needs.adjusted and needs.top_logprobs < 0

    def draw_likeliest(self, logits: Tensor, views: ColumnViews, token_store: Tensor) -> None:
        """Launch the draws of greedy rows and padding, one for each row of ``logits``; a graph can capture it."""
        self._draw(logits, views, token_store, SamplingNeeds("greedy", adjusted=False, top_logprobs=NO_LOGPROBS))

    def draw(self, logits: Tensor, rows: Int32Array, views: ColumnViews, token_store: Tensor) -> None:
        """Launch the draws of ``rows``, and store them for the next step; nothing comes to main memory."""
        self._draw(logits, views, token_store, self._host.needs(rows))

    def drawn(self, rows: Int32Array) -> DrawnTokens:
        """What ``draw_likeliest`` has drawn for ``rows``."""
        nobody = np.empty(0, dtype=np.int32)
        return DrawnTokens(rows, self._host.num_logprobs(rows), fetched(self._runtime, self._drawn), None, None, nobody)

    def sample(
        self,
        logits: Tensor,
        rows: Int32Array,
        views: ColumnViews,
        token_store: Tensor,
        masks: StepMasks | None = None,
    ) -> DrawnTokens:
        """Draw tokens and store them for the next step. Never wait."""
        needs = self._host.needs(rows)
        allowed = self._masked(logits, masks.places, masks.words) if masks is not None and len(masks) else logits
        self._draw(allowed, views, token_store, needs)
        num_logprobs = self._host.num_logprobs(rows)
        logprobs, top, top_places = None, None, np.flatnonzero(num_logprobs > 0)
        if needs.top_logprobs >= 0:
            logprobs, top = self._logprobs(logits, self._drawn[0, : len(rows)], top_places)
        return DrawnTokens(
            rows, num_logprobs, fetched(self._runtime, self._drawn), logprobs, top, top_places.astype(np.int32)
        )

    def try_largest(self, logits: Tensor, rows: Int32Array, views: ColumnViews, token_store: Tensor) -> None:
        """Draw in every way, to compile and to take the memory once."""
        for asked in _EVERY_WAY:
            self.add_rows(
                tuple(
                    NewRow(
                        row=row,
                        token_ids=np.zeros(1, dtype=np.int32),
                        num_prompt_tokens=1,
                        num_computed_tokens=0,
                        sampling=asked,
                    )
                    for row in np.unique(rows).tolist()
                )
            )
            self.sample(logits, rows, views, token_store)
        self._masked(logits, np.arange(len(rows)), np.full((len(rows), -(-self._vocab_size // 32)), -1, dtype=np.int32))
        self.forget(rows)

    def _draw(self, logits: Tensor, views: ColumnViews, token_store: Tensor, needs: SamplingNeeds) -> None:
        count = len(logits)
        token_ids, status = self._drawn[:, :count]
        rows, positions = views.sampled_row[:count], views.sampled_position[:count]
        sample(
            logits,
            rows,
            positions,
            self._columns,
            token_store,
            self._workspace,
            token_ids,
            status,
            variant=needs.variant,
            adjusted=needs.adjusted,
        )
        store_sampled(token_ids, rows, positions, token_store)

    def _logprobs(
        self, logits: Tensor, token_ids: Tensor, top_places: np.ndarray
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        own, normalisers = self._own_logprobs[:, : len(token_ids)]
        row_logprobs(logits, token_ids, self._workspace, own, normalisers)
        if not len(top_places):
            return fetched(self._runtime, own), None
        # Always the same width: the choice between equal tokens must not depend on other rows.
        width = min(MAX_LOGPROBS, self._vocab_size)
        where = self._sent(top_places)
        ids, values = top_logprobs(logits.index_select(0, where), width, normalisers.index_select(0, where))
        return fetched(self._runtime, own), (fetched(self._runtime, ids), fetched(self._runtime, values))

    def _masked(self, logits: Tensor, places: np.ndarray, words: np.ndarray) -> Tensor:
        """Copy: log probabilities are of the model's own distribution."""
        masked = logits.clone()
        exclude(masked, self._sent(places), self._sent(words))
        return masked

    def _sent(self, values: np.ndarray) -> Tensor:
        return sent(self._runtime, values)


_DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 10, "top_p": 0.9, "min_p": 0.01},
)
_ADJUSTMENTS: tuple[dict[str, Any], ...] = (
    {},
    {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": ((0, 1.0),),
        "logprobs": MAX_LOGPROBS,
    },
)
_EVERY_WAY = tuple([SamplingParams(**draw, **adjustment) for draw in _DRAWS for adjustment in _ADJUSTMENTS])
"""Adjusted logits are float32, so that each kind of draw has two variants of its kernels with a model of 16 bits."""
