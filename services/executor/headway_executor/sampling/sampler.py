"""Draw the next token of each row: one torch implementation for every device.

Owns: sampling state, the draw. Must not know: steps, blocks, the model.

**A row's token depends only on its own logits, parameters, seed and position, bit for bit.** The order of
floating-point sums may change with the shape of the batch. So the float32 softmax ``p``, which works row by row, first
becomes integer weights, whose sums are exact in float64. ``headway_kernels.gpu.sampling.sample`` has the rule.

Order: repetition, presence and frequency penalties; logit bias; the ``min_tokens`` mask; the constraint's mask;
temperature; top-k; top-p; min-p.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.sampling.constraints.rows import StepMasks
from headway_executor.sampling.philox import uniforms
from headway_executor.sampling.sampling_columns import SamplingColumns, SamplingEntries
from headway_kernels.gpu.sampling.layout import ENTRIES, LOGPROBS, PENALTIES, RANDOM
from headway_proto.columns import Int32Array
from headway_proto.sampling import MAX_LOGPROBS, SamplingParams
from headway_proto.step import ERRORED_ROW, RowError, RowLogprobs

_CONSTRAINED = 1 << 16
"""A flag beside those of the layout: this row has a mask in this step."""

_FORCED = 1 << 17
"""Another: the mask leaves a single token, whatever its logits are."""

_ADJUSTED = PENALTIES | ENTRIES | _CONSTRAINED
_NOWHERE = np.zeros(0, dtype=np.int64)

_FIRST_WIDTH = 64
_WIDER = 16
"""Truncation examines this many best tokens first, then 16 times as many, until they suffice."""

_SCALE_BITS = 52
"""The weight of probability 1 is 2 to this power: float64 then holds every sum of a row exactly."""

BAD_LOGITS = "the model's logits for this row are NaN, infinite, or exclude every token"
"""The error of a row that can draw nothing."""

_HostIndex = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """``token_ids`` int64, ``[n]``; ``ERRORED_ROW`` for failed rows."""

    token_ids: Tensor
    logprobs: tuple[RowLogprobs, ...]
    errors: tuple[RowError, ...]


class Sampler:
    """Sampling state of up to ``max_num_rows`` rows."""

    def __init__(self, *, vocab_size: int, max_num_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # Only a device uses the pool of entries; here they stay with their row. The pool is large enough even if every
        # gap in it is just too small.
        self._columns = SamplingColumns(
            vocab_size=vocab_size, max_num_rows=max_num_rows, entry_capacity=2 * max_num_rows * vocab_size
        )
        self._entries: dict[int, SamplingEntries] = {}

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self._vocab_size

    def add_row(self, row: int, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        """Give ``row`` to a request, with valid parameters (``headway_proto.sampling.violations``)."""
        entries = self._columns.set_row(row, sampling, num_prompt_tokens)
        self._entries.pop(row, None)
        if entries is not None:
            self._entries[row] = entries

    def sample(
        self, logits: Tensor, rows: Tensor, positions: Tensor, token_ids: Tensor, masks: StepMasks | None = None
    ) -> SampledTokens:
        """Draw one token per row of ``logits`` (floating, ``[n, vocab_size]``, not modified).

        ``rows`` and ``positions`` (of the drawn tokens) int64, ``[n]``; a row may occur at several positions.
        ``token_ids`` integer, ``[max rows, max length]``. A row with NaN or infinite logits gets ``ERRORED_ROW`` and an
        error.
        """
        host_rows: _HostIndex = rows.cpu().numpy()
        flags = self._columns["flags"][host_rows]
        if masks is not None and len(masks):
            flags[masks.places] |= _CONSTRAINED
        if not flags.any():
            drawn, usable = _argmax(logits)
            return _collect(drawn, usable, host_rows, ())
        host_positions: _HostIndex = positions.cpu().numpy()
        drawn, usable = self._draw(logits, flags, host_rows, host_positions, token_ids, masks)
        logprobs = self._logprobs(logits, flags, host_rows, drawn, usable)
        return _collect(drawn, usable, host_rows, logprobs)

    def _draw(
        self,
        logits: Tensor,
        flags: NDArray[np.int32],
        rows: _HostIndex,
        positions: _HostIndex,
        token_ids: Tensor,
        masks: StepMasks | None,
    ) -> tuple[Tensor, Tensor]:
        forced = _NOWHERE
        if masks is not None and len(masks):
            forced = masks.places[masks.only >= 0]
        needs = flags & (_ADJUSTED | RANDOM)
        needs[forced] = _FORCED
        processed = np.flatnonzero(needs & ~_FORCED)
        if not len(processed) and not len(forced):
            return _argmax(logits)
        plain = np.flatnonzero(needs == 0)
        drawn = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        usable = torch.empty(len(rows), dtype=torch.bool, device=logits.device)
        if len(plain):
            where = self._to_device(plain)
            drawn[where], usable[where] = _argmax(logits.index_select(0, where))
        if masks is not None and len(forced):
            where = self._to_device(forced)
            drawn[where] = self._to_device(masks.only[masks.only >= 0])
            usable[where] = logits[where, drawn[where]].isfinite()
        if not len(processed):
            return drawn, usable
        where = self._to_device(processed)
        working = logits.index_select(0, where).float()
        self._adjust(working, flags[processed], rows[processed], positions[processed], token_ids)
        if masks is not None and len(masks):
            choosing = masks.only < 0
            self._mask(working, np.searchsorted(processed, masks.places[choosing]), masks.words[choosing])
        drawn[where], usable[where] = self._draw_processed(
            working, flags[processed], rows[processed], positions[processed]
        )
        return drawn, usable

    def _draw_processed(
        self, working: Tensor, flags: NDArray[np.int32], rows: _HostIndex, positions: _HostIndex
    ) -> tuple[Tensor, Tensor]:
        random = np.flatnonzero(flags & RANDOM)
        if not len(random):
            return _argmax(working)
        if len(random) == len(rows):
            return self._draw_random(working, rows, positions)
        drawn, usable = _argmax(working)
        where = self._to_device(random)
        drawn[where], usable[where] = self._draw_random(working.index_select(0, where), rows[random], positions[random])
        return drawn, usable

    def _adjust(
        self,
        working: Tensor,
        flags: NDArray[np.int32],
        rows: _HostIndex,
        positions: _HostIndex,
        token_ids: Tensor,
    ) -> None:
        penalised = np.flatnonzero(flags & PENALTIES)
        if len(penalised):
            where = self._to_device(penalised)
            working[where] = self._penalise(
                working.index_select(0, where), rows[penalised], positions[penalised], token_ids
            )
        having = np.flatnonzero(flags & ENTRIES)
        if len(having):
            self._apply_entries(working, having, rows[having], positions[having])

    def _mask(self, working: Tensor, places: _HostIndex, words: Int32Array) -> None:
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        excluded = self._to_device(bits == 0)
        if len(places) == len(working):
            working.masked_fill_(excluded, -torch.inf)
            return
        for number, place in enumerate(places.tolist()):
            working[place].masked_fill_(excluded[number], -torch.inf)

    def _apply_entries(self, working: Tensor, places: _HostIndex, rows: _HostIndex, positions: _HostIndex) -> None:
        entries = [self._entries[row] for row in rows.tolist()]
        num_entries = [len(entry.token_ids) for entry in entries]
        stored = np.concatenate([entry.token_ids for entry in entries])
        too_short = positions - self._columns["num_prompt_tokens"][rows] < self._columns["min_tokens"][rows]
        excluded = (stored < 0) & np.repeat(too_short, num_entries)
        index = self._to_device(np.repeat(places, num_entries))
        token_ids = self._to_device(np.where(stored < 0, ~stored, stored).astype(np.int64))
        biases = self._to_device(np.concatenate([entry.biases for entry in entries]))
        biased = working[index, token_ids] + biases
        working[index, token_ids] = biased.masked_fill_(self._to_device(excluded), -torch.inf)

    def _penalise(self, working: Tensor, rows: _HostIndex, positions: _HostIndex, token_ids: Tensor) -> Tensor:
        longest = max(1, int(positions.max()))
        history = token_ids[:, :longest].index_select(0, self._to_device(rows)).long()
        place = torch.arange(longest, device=working.device)
        held = place < self._to_device(positions)[:, None]
        # Repeats of the first token pad the shorter rows. The store may hold ERRORED_ROW, as such a row may run once
        # more before the scheduler takes it out; the clamp keeps it and its neighbours alive.
        history = torch.where(held, history, history[:, :1]).clamp_(0, self._vocab_size - 1)

        repetition = self._column("repetition", rows)
        seen = working.gather(1, history)
        working.scatter_(1, history, torch.where(seen > 0, seen / repetition, seen * repetition))

        generated = held & (place >= self._column("num_prompt_tokens", rows))
        counts = torch.zeros_like(working).scatter_add_(1, history, generated.to(working.dtype))
        presence, frequency = self._column("presence", rows), self._column("frequency", rows)
        return working - frequency * counts - presence * (counts > 0)

    def _draw_random(self, working: Tensor, rows: _HostIndex, positions: _HostIndex) -> tuple[Tensor, Tensor]:
        probabilities, usable = _probabilities(working, self._column("temperature", rows))
        uniform = self._to_device(uniforms(self._columns["seed"][rows], positions))[:, None]
        is_ranked = (self._columns["top_k"][rows] > 0) | (self._columns["top_p"][rows] < 1.0)
        if is_ranked.all():
            return self._draw_ranked(probabilities, uniform, rows), usable
        if not is_ranked.any():
            return self._draw_unranked(probabilities, uniform, rows), usable
        drawn = torch.empty(len(rows), dtype=torch.int64, device=working.device)
        for places, draw in (
            (np.flatnonzero(is_ranked), self._draw_ranked),
            (np.flatnonzero(~is_ranked), self._draw_unranked),
        ):
            where = self._to_device(places)
            drawn[where] = draw(probabilities.index_select(0, where), uniform.index_select(0, where), rows[places])
        return drawn, usable

    def _draw_unranked(self, probabilities: Tensor, uniform: Tensor, rows: _HostIndex) -> Tensor:
        if self._columns["min_p"][rows].any():
            least = self._column("min_p", rows) * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return _invert(_integer_weights(probabilities), uniform)

    def _draw_ranked(self, probabilities: Tensor, uniform: Tensor, rows: _HostIndex) -> Tensor:
        """A row is settled once a few best tokens hold all that it keeps: this needs no sort."""
        drawn = torch.empty(len(rows), dtype=torch.int64, device=probabilities.device)
        open_rows = np.arange(len(rows))
        width = max(_FIRST_WIDTH, 1 << int(self._columns["top_k"][rows].max()).bit_length())
        while len(open_rows):
            width = min(width, self._vocab_size)
            where = self._to_device(open_rows)
            best = probabilities.index_select(0, where).topk(width, dim=-1)
            settled, picked = self._pick(best.values, best.indices, uniform.index_select(0, where), rows[open_rows])
            drawn[where[settled]] = picked[settled]
            open_rows = open_rows[~settled.cpu().numpy()]
            width *= _WIDER
        return drawn

    def _pick(
        self, probabilities: Tensor, token_ids: Tensor, uniform: Tensor, rows: _HostIndex
    ) -> tuple[Tensor, Tensor]:
        """Pick among each row's best tokens, ``[m, width]``, in any order.

        Return ``(settled, picked)``, both ``[m]``; only settled picks count.
        """
        width = token_ids.shape[1]
        top_k, top_p = self._column("top_k", rows), self._column("top_p", rows)
        token_ids, probabilities = _rank(token_ids, probabilities, self._vocab_size)

        weights = _integer_weights(probabilities)
        weights = torch.where((top_k == 0) | (torch.arange(width, device=weights.device) < top_k), weights, 0)
        cumulative = weights.cumsum(-1)
        # With a top-k, all of the weight that it left is among the candidates.
        mass = torch.where(top_k > 0, cumulative[:, -1:], 1 << _SCALE_BITS).double()
        enough = top_p * mass
        kept = (weights > 0) & ((cumulative - weights).double() < enough)
        kept &= probabilities >= self._column("min_p", rows) * probabilities[:, :1]

        # topk chooses freely among equals at the edge, so the kept tokens must outweigh the edge.
        least_kept = probabilities.masked_fill(~kept, torch.inf).amin(-1)
        settled = (((top_k > 0) | (cumulative[:, -1:].double() >= enough)).squeeze(1)) & (
            least_kept > probabilities[:, -1]
        )
        kept_weights = weights.masked_fill(~kept, 0)
        if width == self._vocab_size:
            by_id = torch.zeros_like(kept_weights).scatter_(1, token_ids, kept_weights)
            return torch.ones_like(settled), _invert(by_id, uniform)
        in_order = torch.where(kept, token_ids, self._vocab_size).sort(dim=-1)
        place = _invert(kept_weights.gather(1, in_order.indices), uniform)
        return settled, in_order.values.gather(1, place[:, None]).squeeze(1)

    def _logprobs(
        self, logits: Tensor, flags: NDArray[np.int32], rows: _HostIndex, drawn: Tensor, usable: Tensor
    ) -> tuple[RowLogprobs, ...]:
        asking = np.flatnonzero((flags & LOGPROBS != 0) & usable.cpu().numpy())
        if not len(asking):
            return ()
        where = self._to_device(asking)
        distribution = logits.index_select(0, where).float().log_softmax(-1)
        own = distribution.gather(1, drawn.index_select(0, where)[:, None]).squeeze(1).tolist()
        wanted = self._columns.num_logprobs(rows[asking])
        if wanted.any():
            # Always the same width: the choice between equal tokens must not depend on other rows.
            best = distribution.topk(min(MAX_LOGPROBS, self._vocab_size), dim=-1)
            top_ids, top_logprobs = best.indices.tolist(), best.values.tolist()
        else:
            top_ids = top_logprobs = [()] * len(asking)
        return tuple(
            RowLogprobs(row, logprob, tuple(ids[:count]), tuple(values[:count]))
            for row, logprob, ids, values, count in zip(
                rows[asking].tolist(), own, top_ids, top_logprobs, wanted.tolist(), strict=True
            )
        )

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def _column(self, name: str, rows: _HostIndex) -> Tensor:
        return self._to_device(self._columns[name][rows])[:, None]


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of the largest logits per row (NaN counts as largest), and whether it is finite.

    On the host, numpy's argmax is some thirty times as fast as torch's.
    """
    if logits.device.type == "cpu":
        values = logits.detach().float().numpy()
        places = values.argmax(-1)
        return torch.from_numpy(places), torch.from_numpy(np.isfinite(values[np.arange(len(places)), places]))
    best = logits.argmax(-1)
    return best, logits.gather(1, best[:, None]).squeeze(1).isfinite()


def _probabilities(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``softmax(logits / temperature)``; an unusable row becomes flat."""
    # Shifting before dividing keeps the largest logit at exactly 0: tiny temperatures cannot overflow it.
    probabilities = logits.sub(logits.amax(-1, keepdim=True)).div_(temperature).softmax(-1)
    usable = probabilities[:, 0].isfinite()
    if not bool(usable.all()):
        probabilities[~usable] = 1.0 / probabilities.shape[1]
    return probabilities, usable


def _rank(token_ids: Tensor, probabilities: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    # Keys order by probability, then by lower token id, and are distinct. Floats that are not negative order as their
    # bits do; these are 31, so an id fits beside them into an int64.
    id_bits = (vocab_size - 1).bit_length()
    highest_id = (1 << id_bits) - 1
    keys = (probabilities.view(torch.int32).long() << id_bits) | (highest_id - token_ids)
    keys = keys.sort(dim=-1, descending=True).values
    return highest_id - (keys & highest_id), (keys >> id_bits).int().view(torch.float32)


def _integer_weights(probabilities: Tensor) -> Tensor:
    return probabilities.mul(2.0**_SCALE_BITS).long()


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return where the cumulative weights pass ``uniform`` of their total, ``[m]``.

    ``weights`` int64, ``[m, k]``, not all zero in a row; ``uniform`` float64, ``[m, 1]``.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum((uniform * total.double()).long(), total - 1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _collect(drawn: Tensor, usable: Tensor, rows: _HostIndex, logprobs: tuple[RowLogprobs, ...]) -> SampledTokens:
    if bool(usable.all()):
        return SampledTokens(drawn, logprobs, ())
    errors = tuple(RowError(int(row), BAD_LOGITS) for row in rows[~usable.cpu().numpy()])
    return SampledTokens(drawn.masked_fill(~usable, ERRORED_ROW), logprobs, errors)
