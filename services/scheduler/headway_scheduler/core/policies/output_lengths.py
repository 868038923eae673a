"""How many tokens a request will still produce, learned from those that ended before it.

Owns: survival curves of the number of output tokens, and which curve a request belongs to.
Must not know: rows, blocks, queues, or what a prediction is used for.

One curve holds all requests, one those of a tenant, one those of a tenant whose prompts have a similar length (the same
power of two). A curve is a life table: lengths fall into bins, six to an octave, and each bin has a hazard, the share
of the requests that reach it and end in it. A request that was cut (at ``max_tokens``, aborted, failed) tells only that
its length is more than it had: it counts among those at risk as far as it came, and never as an end. This is the
product-limit estimate (Kaplan and Meier, "Nonparametric estimation from incomplete observations", JASA 53, 1958) over
grouped ages. Where the classic life table counts a case that is lost in the middle of a bin as half a case (Cutler and
Ederer, "Maximum utilization of the life table method in analyzing survival", J. Chronic Diseases 8, 1958), here it
counts by the part of the bin that it came through: limits on the output are no accidents spread over the bin. Powers of
two, the usual limits, are edges of bins. Within a bin, ends are taken as evenly spread.

Shrinkage, not a switch: a curve's hazard is the mean of its own observations and ``_PARENT_WEIGHT`` imagined ones that
follow the next wider curve (the posterior mean under a beta prior; credibility in the actuaries' word). A new tenant
starts as the average one and becomes itself with each request that ends; no answer jumps because a narrow curve
comes to be trusted, and in the tail, where even a busy tenant has few cases, the wider curve speaks.

What is not known stays the worst case. Nothing is assumed beyond what was observed: past the longest request that is
known to have gone on, survival stays where it is, up to the limit. So when every request was cut at 100 tokens, one
with a limit of 1,000 is expected to take 1,000, and one with a limit of 50 is expected to take 50. Of a request to whose
age fewer than ``_LEAST_AT_RISK`` others are known to have come, no length is predicted.

Two questions are answered: how many tokens a request will probably have in the end (``predicted_output``), and how
probable it is that it still runs after so many steps (``chances_to_go_on``).

Old observations fade by half every ``half_life`` newer ones of the same curve. Just after the start, short outputs are
over-represented, because long ones have not ended yet; only time corrects that.

Everything depends on the order of ``curve_of`` and ``observe`` alone: asking changes no later answer.
"""

from collections import OrderedDict
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.integer[Any]]
FloatArray: TypeAlias = NDArray[np.float64]

ALL_REQUESTS = 0
"""The curve of all requests. It is never dropped."""

_LONGEST = 1 << 20
"""Lengths above are not told apart."""
_BINS_PER_OCTAVE = 6
_PARENT_WEIGHT = 8.0
_LEAST_AT_RISK = 8.0
_LARGEST_WEIGHT = 2.0**64
_MOST_UNPUBLISHED = 64
_UNPUBLISHED_SHARE = 16
"""At most a sixteenth of what a prediction could know does not show in it yet."""
_LEAST_SURVIVAL = 1e-9
"""Below, the difference of two sums over a survival function has no digits left."""
_CHANCES = 1024.0
"""Chances are multiples of one over this."""
_NO_BUCKET = -1
_MADE_AT_ONCE = 64
"""Curves whose tables are made together. The allocator returns columns of more to the system each time, and each curve
then takes twice as long."""

_ENDED, _EXPOSURE = range(2)
_CONSTANT, _LINEAR, _SQUARE, _IS_KNOWN = range(4)


def _bin_edges() -> NDArray[np.int64]:
    """0, then the powers of the sixth root of two, rounded, to ``_LONGEST``."""
    octaves = _LONGEST.bit_length() - 1
    powers = 2.0 ** (np.arange(octaves * _BINS_PER_OCTAVE + 1) / _BINS_PER_OCTAVE)
    return np.concatenate(([0], np.unique(np.rint(powers)))).astype(np.int64)


_EDGES = _bin_edges()
_WIDTHS = np.diff(_EDGES)
_BIN_OF_AGE = np.repeat(np.arange(len(_EDGES), dtype=np.uint8), np.concatenate((_WIDTHS, [1])))
"""Ages from ``_LONGEST`` on are in a bin of their own, of which nothing is known. A mebibyte, the same for all."""


class OutputLengths:
    """At most ``max_curves`` curves (a power of two, 4 or more); the least recently used is dropped for a new one.

    A curve is named by an integer, an entry of an int64 column. The name of a dropped curve stays valid: it stands for
    ``ALL_REQUESTS`` from then on. Memory is bounded, about 8 KiB for each curve in use and
    one more for each of the steps that ``chances_to_go_on`` is asked for.

    Ages, lengths and limits are numbers of output tokens, 0 or more.
    """

    def __init__(self, *, max_curves: int = 1024, half_life: int = 512, is_used: bool = True) -> None:
        assert max_curves >= 4
        assert max_curves & (max_curves - 1) == 0
        self._is_used = is_used
        self._edges, self._widths, self._bin_of_age = _EDGES, _WIDTHS, _BIN_OF_AGE
        self._num_bins = len(self._widths)
        self._growth = 2.0 ** (1 / half_life)
        self._slot_mask = max_curves - 1

        self._slot_of_key: OrderedDict[tuple[str, int], int] = OrderedDict()
        """(tenant, prompt bucket), least recently used first. A tenant's own curve is used after those of its prompts,
        so none of them outlives it."""
        self._num_slots = 1
        self._num_dropped = 0
        self._names = np.arange(max_curves, dtype=np.int64)
        self._parents = np.zeros(max_curves, dtype=np.intp)
        self._levels = np.zeros(max_curves, dtype=np.intp)

        # Untouched pages of these cost no memory.
        bins, edges = self._num_bins, self._num_bins + 1
        self._weights = np.zeros((max_curves, 2, bins))
        """Weight of the requests that ended in each bin; of those that ended there or came through, and for those that
        were cut in the middle a part of it."""
        self._newest_weight = np.ones(max_curves)
        """Weights grow instead of old ones fading, which would touch every bin at each observation."""

        # What answers are made of: a copy of the above as it was at an observation, never as it is at a question.
        self._published_weights = np.zeros((max_curves, 2, bins))
        self._published_newest_weight = np.ones(max_curves)
        self._unpublished: list[int] = []
        """The slots that were changed since."""
        self._num_observed = 0
        self._num_published = 0

        # Made of the copy, when asked for.
        self._is_stale = np.ones(max_curves, dtype=np.bool_)
        self._hazards = np.zeros((max_curves, bins))
        self._is_known = np.zeros((max_curves, bins), dtype=np.bool_)
        self._table = np.zeros((max_curves * edges, 4))
        """Per curve and bin: the survival function's sum from 0 to an age in that bin, as a polynomial of the age."""
        self._steps = np.empty(0, dtype=np.int64)
        self._chances = np.empty((0, 0))
        """Per curve and bin, where ``_has_chances``: of going on for so many steps."""
        self._has_chances = np.zeros(max_curves * edges, dtype=np.bool_)

    def curve_of(self, tenant: str, num_prompt_tokens: int) -> int:
        """The curve that a request belongs to, for as long as it lives. Makes it if there is none."""
        if not self._is_used:
            return ALL_REQUESTS
        bucket = num_prompt_tokens.bit_length()
        tenant_slot = self._use(tenant, _NO_BUCKET, parent=ALL_REQUESTS, level=1)
        slot = self._use(tenant, bucket, parent=tenant_slot, level=2)
        self._slot_of_key.move_to_end((tenant, _NO_BUCKET))
        return int(self._names[slot])

    def observe(self, curve: int, num_output_tokens: int, *, is_censored: bool) -> None:
        """Take in a request that ended by itself after ``num_output_tokens``, or (``is_censored``) that was cut there.

        It shows in the answers no later than ``_MOST_UNPUBLISHED`` observations on.
        """
        if num_output_tokens <= 0 or not self._is_used:
            return
        slot = self._slot_of(curve)
        self._weigh_in(slot, num_output_tokens, is_censored=is_censored)
        while slot != ALL_REQUESTS:
            slot = int(self._parents[slot])
            self._weigh_in(slot, num_output_tokens, is_censored=is_censored)
        self._num_observed += 1
        num_unpublished = self._num_observed - self._num_published
        if num_unpublished >= min(_MOST_UNPUBLISHED, 1 + self._num_published // _UNPUBLISHED_SHARE):
            self._publish()

    def chances_to_go_on(
        self, curves: IntArray, num_generated: IntArray, limits: IntArray, steps: NDArray[np.int64]
    ) -> FloatArray:
        """The probability that a request has not ended after further ``steps`` (``[m]``), float64 ``[n, m]``.

        Multiples of 1 / 1024, so that sums of them are exact. 0 from the limit on. Of requests that have outlived all that
        is known: as likely as not to become twice as old (at any age, so that the chance after ``t`` steps is
        ``age / (age + t)``: Pareto's tail with exponent 1), as heavy as a tail gets. 0 where nothing is known at all: the
        caller has to say what that means. ``curves``, ``num_generated`` and ``limits`` (``max_tokens``) have shape ``[n]``.

        All ages in a bin get the answer for its middle, which is kept until something new shows, or until ``steps`` is
        another array.
        """
        slots = self._slots_of(curves)
        self._bring_up_to_date(slots)
        if steps is not self._steps:
            self._steps = steps
            self._chances = np.empty((len(self._table), len(steps)))
            self._has_chances[:] = False
        ages = np.asarray(num_generated, dtype=np.int64)
        cells = self._bin_of_age.take(ages, mode="clip") + slots * (self._num_bins + 1)
        has_chances = self._has_chances.take(cells)
        if not has_chances.all():
            self._make_chances(np.unique(cells[~has_chances]))
        chances = self._chances.take(cells, axis=0)
        chances *= steps < (limits - ages)[:, None]
        return chances

    def predicted_output(self, curve: int, num_generated: int, limit: int) -> int | None:
        """The expected number of output tokens in all, rounded up, at most ``limit``; None where nothing is known.

        The mean is that of the smaller of length and limit, given that the request has not ended so far.
        """
        if not self._num_observed:
            return None
        slot = self._slot_of(curve)
        if self._is_stale[slot]:
            self._bring_up_to_date(np.array([slot], dtype=np.intp))
        _, linear, square, is_known = self._entry(slot, num_generated)
        if not is_known:
            return None
        end = max(limit, num_generated)
        survival = linear + (2 * num_generated + 1) * square
        expected = (self._survival_sum(slot, end) - self._survival_sum(slot, num_generated)) / survival
        return min(end, num_generated + int(np.ceil(expected - 1e-9)))

    # Curves by name.

    def _use(self, tenant: str, bucket: int, *, parent: int, level: int) -> int:
        """The slot of a key, which is now the most recently used."""
        key = (tenant, bucket)
        slot = self._slot_of_key.get(key)
        if slot is None:
            slot = self._free_slot()
            self._slot_of_key[key] = slot
            self._parents[slot] = parent
            self._levels[slot] = level
        else:
            self._slot_of_key.move_to_end(key)
        return slot

    def _free_slot(self) -> int:
        if self._num_slots <= self._slot_mask:
            self._num_slots += 1
            return self._num_slots - 1
        _, slot = self._slot_of_key.popitem(last=False)
        self._num_dropped += 1
        self._names[slot] += self._slot_mask + 1
        self._weights[slot] = 0
        self._newest_weight[slot] = 1
        self._published_weights[slot] = 0
        self._published_newest_weight[slot] = 1
        self._is_stale[slot] = True
        return slot

    def _slot_of(self, curve: int) -> int:
        slot = curve & self._slot_mask
        return slot if self._names[slot] == curve else ALL_REQUESTS

    def _slots_of(self, curves: IntArray) -> NDArray[np.intp]:
        slots = (curves & self._slot_mask).astype(np.intp, copy=False)
        return np.where(self._names[slots] == curves, slots, ALL_REQUESTS) if self._num_dropped else slots

    # From observations to weights.

    def _weigh_in(self, slot: int, length: int, *, is_censored: bool) -> None:
        weight = self._newest_weight[slot] * self._growth
        weights = self._weights[slot]
        ended, exposure = weights[_ENDED], weights[_EXPOSURE]
        if not is_censored and length <= _LONGEST:
            last = self._bin_of_age[length - 1]
            ended[last] += weight
            exposure[: last + 1] += weight
        else:
            cut_in = self._bin_of_age[min(length, _LONGEST)]
            exposure[:cut_in] += weight
            if cut_in < self._num_bins:
                exposure[cut_in] += weight * ((length - self._edges[cut_in]) / self._widths[cut_in])
        if weight > _LARGEST_WEIGHT:  # a power of two, so that no bit is lost
            weights /= _LARGEST_WEIGHT
            weight /= _LARGEST_WEIGHT
        self._newest_weight[slot] = weight
        self._unpublished.append(slot)

    def _publish(self) -> None:
        """Let what was observed show."""
        changed = np.unique(np.array(self._unpublished, dtype=np.intp))
        self._published_weights[changed] = self._weights[changed]
        self._published_newest_weight[changed] = self._newest_weight[changed]
        self._num_published = self._num_observed
        self._unpublished.clear()
        self._is_stale[: self._num_slots] = True

    # From weights to tables.

    def _bring_up_to_date(self, slots: NDArray[np.intp]) -> None:
        """Make the tables of ``slots`` of what is published, wider curves first."""
        stale = slots[self._is_stale[slots]]
        if not len(stale):
            return
        is_wanted = np.zeros(len(self._is_stale), dtype=np.bool_)
        is_wanted[ALL_REQUESTS] = True
        is_wanted[stale] = True
        is_wanted[self._parents[stale]] = True
        is_wanted &= self._is_stale
        for level in range(3):
            chosen = (is_wanted & (self._levels == level)).nonzero()[0]
            for start in range(0, len(chosen), _MADE_AT_ONCE):
                self._make_hazards(chosen[start : start + _MADE_AT_ONCE])
                self._make_tables(chosen[start : start + _MADE_AT_ONCE])
            self._is_stale[chosen] = False

    def _make_hazards(self, slots: NDArray[np.intp]) -> None:
        weights, newest_weight = self._published_weights[slots], self._published_newest_weight[slots, None]
        ended, exposure, parents = weights[:, _ENDED], weights[:, _EXPOSURE], self._parents[slots]
        has_parent = (slots != ALL_REQUESTS)[:, None]
        self._is_known[slots] = (exposure >= _LEAST_AT_RISK * newest_weight) | (self._is_known[parents] & has_parent)
        parent_weight = _PARENT_WEIGHT * has_parent * newest_weight
        hazards = self._hazards[parents]
        hazards *= parent_weight
        hazards += ended
        exposure += parent_weight
        # Where nobody came further, both are sums of the same numbers in the same order, and the hazard is exactly 1.
        # Where nobody came at all, it is 0.
        hazards /= np.maximum(exposure, np.finfo(np.float64).tiny)
        self._hazards[slots] = hazards

    def _make_tables(self, slots: NDArray[np.intp]) -> None:
        """The survival function at whole ages is linear within a bin; its sum up to an age is quadratic."""
        survival = np.ones((len(slots), self._num_bins + 1))
        passing = 1 - self._hazards[slots]
        np.maximum(passing, 0, out=passing)
        np.cumprod(passing, axis=1, out=survival[:, 1:])
        before, after = survival[:, :-1], survival[:, 1:]
        sums = np.zeros_like(survival)
        np.cumsum(before * ((self._widths + 1) / 2) + after * ((self._widths - 1) / 2), axis=1, out=sums[:, 1:])
        slope = np.zeros_like(survival)
        np.divide(before - after, self._widths, out=slope[:, :-1])
        square = slope * -0.5
        linear = survival + slope * (self._edges + 0.5)
        self._has_chances.reshape(-1, self._num_bins + 1)[slots] = False
        table = self._table.reshape(-1, self._num_bins + 1, 4)
        table[slots, :, _CONSTANT] = sums - self._edges * (linear + self._edges * square)
        table[slots, :, _LINEAR] = linear
        table[slots, :, _SQUARE] = square
        table[slots, :-1, _IS_KNOWN] = self._is_known[slots] & (before > _LEAST_SURVIVAL)

    def _make_chances(self, cells: NDArray[np.intp]) -> None:
        bins = cells % (self._num_bins + 1)
        first_cells = cells - bins
        middles = self._edges[bins]
        middles[bins < self._num_bins] += self._widths[bins[bins < self._num_bins]] // 2
        later = middles[:, None] + self._steps
        entries = self._table[self._bin_of_age.take(later, mode="clip") + first_cells[:, None]]
        survival_later = entries[..., _LINEAR] + (2 * later + 1) * entries[..., _SQUARE]
        now = self._table[cells]
        survival = now[:, _LINEAR] + (2 * middles + 1) * now[:, _SQUARE]
        is_known = now[:, _IS_KNOWN] > 0
        chances = survival_later / np.where(is_known, survival, 1.0)[:, None]
        unknown = (~is_known).nonzero()[0]
        if len(unknown):
            is_known_at_all = self._table[first_cells[unknown], _IS_KNOWN] > 0
            old = (middles[unknown] * is_known_at_all)[:, None]
            chances[unknown] = old / (old + self._steps)
        self._chances[cells] = np.rint(chances * _CHANCES) / _CHANCES
        self._has_chances[cells] = True

    # Single answers.

    def _entry(self, slot: int, age: int) -> list[float]:
        cell = slot * (self._num_bins + 1) + int(self._bin_of_age[min(age, _LONGEST)])
        entry: list[float] = self._table[cell].tolist()
        return entry

    def _survival_sum(self, slot: int, age: int) -> float:
        constant, linear, square, _ = self._entry(slot, age)
        return constant + age * (linear + age * square)
