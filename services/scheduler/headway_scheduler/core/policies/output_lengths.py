"""The expected output of a request, learned from requests that ended.

Owns: survival curves of output lengths, and the curve of each request. Must not know: rows, blocks, or queues.

One curve holds all requests, one those of a tenant, one those of a tenant with prompts of similar length (the same
power of two). A curve is a life table: lengths fall into bins, six per octave, and a bin's hazard is the share of the
requests reaching it that end in it. A request that was cut (at ``max_tokens``, aborted, failed) is at risk up to its
length and is no end: the product-limit estimate (Kaplan and Meier, JASA 53, 1958) over grouped ages. The classic table
counts a cut inside a bin as half a case (Cutler and Ederer, J. Chronic Diseases 8, 1958). Here the passed part of the
bin counts, since limits are not spread over a bin. Powers of two, the usual limits, are bin edges.

Shrinkage: a hazard averages its own observations and ``_PARENT_WEIGHT`` imagined ones of the next wider curve (the
posterior mean under a beta prior). So a new tenant starts as the average one, and answers do not jump.

Beyond the longest known request, survival stays constant up to the limit: if all requests were cut at 100 tokens, a
limit of 1,000 predicts 1,000. No length is predicted at an age that fewer than ``_LEAST_AT_RISK`` others reached.

Observations fade by half every ``half_life`` newer ones of their curve. Questions change no later answer.
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
"""Longer lengths share one bin."""
_BINS_PER_OCTAVE = 6
_PARENT_WEIGHT = 8.0
_LEAST_AT_RISK = 8.0
_LARGEST_WEIGHT = 2.0**64
_MOST_UNPUBLISHED = 64
_UNPUBLISHED_SHARE = 16
"""At most a sixteenth of the observations does not show in answers yet."""
_LEAST_SURVIVAL = 1e-9
"""Below this, the difference of two sums over a survival function has no digits left."""
_CHANCES = 1024.0
"""Chances are multiples of one over this."""
_NO_BUCKET = -1
_MADE_AT_ONCE = 64
"""Curves whose tables are made together. With more, the allocator returns memory to the system each time, and a curve
takes twice as long."""

_ENDED, _EXPOSURE = range(2)
_CONSTANT, _LINEAR, _SQUARE, _IS_KNOWN = range(4)


def _bin_edges() -> NDArray[np.int64]:
    octaves = _LONGEST.bit_length() - 1
    powers = 2.0 ** (np.arange(octaves * _BINS_PER_OCTAVE + 1) / _BINS_PER_OCTAVE)
    return np.concatenate(([0], np.unique(np.rint(powers)))).astype(np.int64)


_EDGES = _bin_edges()
_WIDTHS = np.diff(_EDGES)
_BIN_OF_AGE = np.repeat(np.arange(len(_EDGES), dtype=np.uint8), np.concatenate((_WIDTHS, [1])))
"""Ages from ``_LONGEST`` on have their own bin, of which nothing is known. It takes a mebibyte and is shared."""


class OutputLengths:
    """At most ``max_curves`` curves (a power of two, 4 or more). A new one replaces the least recently used.

    A curve's name fits an int64 column. The name of a dropped curve means ``ALL_REQUESTS``. A curve takes 8 KiB, and 1
    KiB for each of the steps of ``chances_to_go_on``. Unless ``is_used``, nothing is learned.
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
        so none outlives it."""
        self._num_slots = 1
        self._num_dropped = 0
        self._names = np.arange(max_curves, dtype=np.int64)
        self._parents = np.zeros(max_curves, dtype=np.intp)
        self._levels = np.zeros(max_curves, dtype=np.intp)

        # Untouched pages of these cost no memory.
        bins, edges = self._num_bins, self._num_bins + 1
        self._weights = np.zeros((max_curves, 2, bins))
        """The weight of requests that ended in each bin, and of those that reached it. A request that was cut inside a
        bin counts in part."""
        self._newest_weight = np.ones(max_curves)
        """New weights grow. If old ones faded instead, each observation would touch every bin."""

        # Answers use a copy of the above, made at an observation and never at a question.
        self._published_weights = np.zeros((max_curves, 2, bins))
        self._published_newest_weight = np.ones(max_curves)
        self._unpublished: list[int] = []
        """The slots that changed since that copy."""
        self._num_observed = 0
        self._num_published = 0

        # Made from the copy at a question.
        self._is_stale = np.ones(max_curves, dtype=np.bool_)
        self._hazards = np.zeros((max_curves, bins))
        self._is_known = np.zeros((max_curves, bins), dtype=np.bool_)
        self._table = np.zeros((max_curves * edges, 4))
        """Per curve and bin: the sum of the survival function from 0 to an age, as a polynomial of the age."""
        self._steps = np.empty(0, dtype=np.int64)
        self._chances = np.empty((0, 0))
        """Per curve and bin, where ``_has_chances``: the chance to go on for so many steps."""
        self._has_chances = np.zeros(max_curves * edges, dtype=np.bool_)

    def curve_of(self, tenant: str, num_prompt_tokens: int) -> int:
        """Return the curve of a request."""
        if not self._is_used:
            return ALL_REQUESTS
        bucket = num_prompt_tokens.bit_length()
        tenant_slot = self._use(tenant, _NO_BUCKET, parent=ALL_REQUESTS, level=1)
        slot = self._use(tenant, bucket, parent=tenant_slot, level=2)
        self._slot_of_key.move_to_end((tenant, _NO_BUCKET))
        return int(self._names[slot])

    def observe(self, curve: int, num_output_tokens: int, *, is_censored: bool) -> None:
        """Learn from a request that ended after ``num_output_tokens``, or was cut there (``is_censored``).

        It shows after at most ``_MOST_UNPUBLISHED`` observations.
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
        """Return the probabilities, float64 ``[n, m]``, that requests still run after ``steps`` (``[m]``).

        ``curves``, ``num_generated`` and ``limits`` (``max_tokens``) have shape ``[n]``. Answers are multiples of 1 /
        1024, so sums are exact. They are 0 from the limit on, and where nothing is known. A request older than all
        known ones goes on for ``t`` steps with chance ``age / (age + t)`` (Pareto's tail with exponent 1).

        All ages in a bin share an answer, which is kept until new observations show or ``steps`` is another array.
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
        """Return the mean output in all, up to ``limit``, rounded up; None if nothing is known."""
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
        changed = np.unique(np.array(self._unpublished, dtype=np.intp))
        self._published_weights[changed] = self._weights[changed]
        self._published_newest_weight[changed] = self._newest_weight[changed]
        self._num_published = self._num_observed
        self._unpublished.clear()
        self._is_stale[: self._num_slots] = True

    # From weights to tables.

    def _bring_up_to_date(self, slots: NDArray[np.intp]) -> None:
        """Wider curves come first."""
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
        # If no request came further, both are sums of the same numbers in the same order, and the hazard is exactly 1.
        # If none came at all, it is 0.
        hazards /= np.maximum(exposure, np.finfo(np.float64).tiny)
        self._hazards[slots] = hazards

    def _make_tables(self, slots: NDArray[np.intp]) -> None:
        """Survival is linear within a bin, so its sum is quadratic."""
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
