"""A model of step times, learned from the steps that ran.

Owns: the model and its coefficients. Must not know: requests, objectives, clocks, or the device.

A step's time is a sum over its shape. Coefficients are at least 0, so more work never predicts less time::

    constant + rows + tokens + tokens beyond 128 + tokens beyond 256 + context + pairs of prefill attention

Up to a knee a step is bound by reading weights, beyond it by arithmetic. The knee of data-centre accelerators lies
between 128 and 256 tokens (operations per byte: about 140 on A100, 180 on H200, 260 on H100).

Learning is recursive least squares with four changes:

- *Relative errors*: both sides are divided by the prediction, since noise grows with the duration.
- *Directional forgetting* (Kulhavy, Automatica 23(5), 1987): evidence fades only along the features of the new step, or
  an hour of decodes would erase the cost of prompts. The diagonal grows up to a ceiling, so that no mixture of
  coefficients is believed for ever (Bittanti, Bolzern and Campi, Automatica 26(5), 1990).
- *Clipped residuals* (Huber, "Robust estimation of a location parameter", 1964). ``PERSISTENT_RUN`` of one sign in a
  row are believed: the device has probably changed its speed, so the covariance is widened along the coefficients,
  which then scale alike.
- *Constraints*: coefficients are projected to 0 or above in the metric of the covariance, which moves the least known
  ones (Simon and Chia, IEEE Trans. AES 38(1), 2002).

Plain floats are faster than numpy here, and the same on every machine.
"""

from math import sqrt
from operator import mul
from typing import NamedTuple, TypeAlias

from headway_scheduler.core.state.step_shape import StepShape, prefill_pairs

FIRST_KNEE_TOKENS = 128
SECOND_KNEE_TOKENS = 256

# Units of the features, so that coefficients are of similar size.
_ROWS_UNIT = 1 / 128
_TOKENS_UNIT = 1 / 1024
_CONTEXT_UNIT = 1 / 2**17
_PAIRS_UNIT = 1 / 2**21

WARM_UP_STEPS = 3
"""First steps are ignored: they compile kernels and fill allocators."""
_MEMORY = 0.95
"""The share of old evidence along a step's features that stays after it: about 20 such steps count."""
_PRIOR_VARIANCE = 1e3
"""Of each coefficient, in squares of the first duration and of the noise: anything is possible."""
PERSISTENT_RUN = 4
"""After so many clipped residuals of one sign in a row, they are believed."""
_DRIFT_INTERVAL_STEPS = 32
_DRIFT_VARIANCE = 1e-2
"""Added to each coefficient's every interval, in squares of the step's duration and of the noise, below a ceiling."""
_DRIFT_CEILING = 1.0
_SPEED_VARIANCE = 25.0
"""Of the change of the device's speed, in squares of the noise, once it is believed that there was one."""
_CLIP = 3.0
"""Residuals beyond so many standard deviations are clipped."""
_SMALLEST_NOISE = 0.01
_LARGEST_NOISE = 0.50
"""With more, a wrong model would take its own errors for noise."""
_FIRST_NOISE = 0.10
_NOISE_GAIN = 0.03
_FIRST_ERROR = 0.50
_ERROR_GAIN = 0.03
"""The gain of the mean error, which operators see and which says how far predictions are trusted."""
_MEAN_TO_DEVIATION = 1.2533
"""The standard deviation of a normal variable over the mean of its absolute value: sqrt(pi / 2)."""
_LARGEST_ERROR = 9.0
"""A believed step counts as ten times its prediction at most."""
_TINY = 1e-9
_SHORTEST_S = 1e-6
"""No step is shorter, and no prediction is."""
_LONGEST_S = 3600.0

_NUM_FEATURES = 7
_Row: TypeAlias = tuple[float, ...]
"""One number per feature."""


def is_step_time(duration_s: float) -> bool:
    """Whether a step can take so long; not NaN."""
    return _SHORTEST_S <= duration_s <= _LONGEST_S


def _features(shape: StepShape) -> _Row:
    num_tokens, num_rows, num_context_tokens, num_prefill_pairs = shape
    return (
        1.0,
        num_rows * _ROWS_UNIT,
        num_tokens * _TOKENS_UNIT,
        (num_tokens - FIRST_KNEE_TOKENS) * _TOKENS_UNIT if num_tokens > FIRST_KNEE_TOKENS else 0.0,
        (num_tokens - SECOND_KNEE_TOKENS) * _TOKENS_UNIT if num_tokens > SECOND_KNEE_TOKENS else 0.0,
        num_context_tokens * _CONTEXT_UNIT,
        num_prefill_pairs * _PAIRS_UNIT,
    )


def _diagonal(variance: float) -> list[_Row]:
    rows = []
    for place in range(_NUM_FEATURES):
        row = [0.0] * _NUM_FEATURES
        row[place] = variance
        rows.append(tuple(row))
    return rows


class StepTimeFigures(NamedTuple):
    """A model for operators, in seconds per unit. ``relative_error``: mean of abs(actual / predicted - 1)."""

    num_observed: int
    num_shifts: int
    relative_error: float
    constant_s: float
    row_s: float
    token_s: float
    token_beyond_128_s: float
    token_beyond_256_s: float
    context_token_s: float
    prefill_pair_s: float


class StepTimeModel:
    """The model of one device. ``num_shifts`` counts changes of its speed."""

    def __init__(self) -> None:
        self.num_shifts = 0
        self.relative_error = _FIRST_ERROR
        """The mean of abs(actual / predicted - 1). It begins large: what a few steps have taught is not trusted yet."""
        self._num_observed = 0
        self._knows_prefill = False
        self._coefficients: _Row = (0.0,) * _NUM_FEATURES
        # In squares of the noise, whose own scale is kept apart.
        self._covariance = _diagonal(_PRIOR_VARIANCE)
        self._prior_variance = _PRIOR_VARIANCE
        self._noise = _FIRST_NOISE
        self._run = 0  # of clipped residuals: how many in a row, with their sign

    @property
    def figures(self) -> StepTimeFigures | None:
        """Return what it has learned; None until ``predict_s`` answers."""
        if self._num_observed <= WARM_UP_STEPS:
            return None
        constant, row, token, beyond_first, beyond_second, context, pair = self._coefficients
        return StepTimeFigures(
            num_observed=self._num_observed,
            num_shifts=self.num_shifts,
            relative_error=self.relative_error,
            constant_s=constant,
            row_s=row * _ROWS_UNIT,
            token_s=token * _TOKENS_UNIT,
            token_beyond_128_s=beyond_first * _TOKENS_UNIT,
            token_beyond_256_s=beyond_second * _TOKENS_UNIT,
            context_token_s=context * _CONTEXT_UNIT,
            prefill_pair_s=pair * _PAIRS_UNIT,
        )

    def predict_s(self, shape: StepShape) -> float | None:
        """Return the seconds of a step; None until one after ``WARM_UP_STEPS`` was observed."""
        if self._num_observed <= WARM_UP_STEPS:
            return None
        num_tokens, num_rows, num_context_tokens, num_prefill_pairs = shape
        constant, row, token, beyond_first, beyond_second, context, pair = self._coefficients
        tokens = token * num_tokens
        if num_tokens > FIRST_KNEE_TOKENS:
            tokens += beyond_first * (num_tokens - FIRST_KNEE_TOKENS)
            if num_tokens > SECOND_KNEE_TOKENS:
                tokens += beyond_second * (num_tokens - SECOND_KNEE_TOKENS)
        duration_s = (
            constant
            + row * _ROWS_UNIT * num_rows
            + tokens * _TOKENS_UNIT
            + context * _CONTEXT_UNIT * num_context_tokens
            + pair * _PAIRS_UNIT * num_prefill_pairs
        )
        return max(duration_s, _SHORTEST_S)

    def prefill_s(self, num_tokens: int, num_computed_tokens: int) -> float | None:
        """Return the seconds that ``num_tokens`` of a prompt add to steps; None if no prompt was observed.

        The steps count as beyond the knee, so every token pays its arithmetic.
        """
        if not self._knows_prefill:
            return None
        _, _, token, beyond_first, beyond_second, context, pair = self._coefficients
        return (
            (token + beyond_first + beyond_second) * _TOKENS_UNIT * num_tokens
            + context * _CONTEXT_UNIT * num_computed_tokens
            + pair * _PAIRS_UNIT * prefill_pairs(num_tokens, num_computed_tokens)
        )

    def observe(self, shape: StepShape, duration_s: float) -> None:
        """Learn from a step. Impossible durations are ignored."""
        if not is_step_time(duration_s) or shape.num_tokens <= 0:
            return
        self._num_observed += 1
        if self._num_observed <= WARM_UP_STEPS:
            return
        features = _features(shape)
        if self._num_observed == WARM_UP_STEPS + 1:
            self._begin(duration_s)
        if features[6]:
            self._knows_prefill = True
        predicted_s = max(sum(map(mul, self._coefficients, features)), _SHORTEST_S)
        self.relative_error += _ERROR_GAIN * (abs(duration_s / predicted_s - 1.0) - self.relative_error)
        # Relative to the prediction; less so where it is far too long, or its own size would make the evidence count less.
        unit_s = min(predicted_s, max(2.0 * duration_s, predicted_s / 8.0))
        inverse = 1.0 / unit_s
        _, f1, f2, f3, f4, f5, f6 = features
        scaled = (inverse, f1 * inverse, f2 * inverse, f3 * inverse, f4 * inverse, f5 * inverse, f6 * inverse)
        gains, variance = self._spread(scaled)
        error = (duration_s - predicted_s) * inverse
        limit = _CLIP * self._noise * sqrt(1.0 + variance)
        if -limit <= error <= limit:
            self._run = 0
        elif self._is_believed(error):
            if variance < _SPEED_VARIANCE:
                self._widen_along_coefficients()
                gains, variance = self._spread(scaled)
            error = min(error, _LARGEST_ERROR)
        else:
            error = limit if error > 0 else -limit
        self._noise += _NOISE_GAIN * (_MEAN_TO_DEVIATION * abs(error) / sqrt(1.0 + variance) - self._noise)
        self._noise = min(max(self._noise, _SMALLEST_NOISE), _LARGEST_NOISE)
        self._update(gains, variance, error)
        if self._num_observed % _DRIFT_INTERVAL_STEPS == 0:
            self._drift(unit_s * unit_s)

    def _begin(self, duration_s: float) -> None:
        self._coefficients = (duration_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        self._prior_variance = _PRIOR_VARIANCE * duration_s * duration_s
        self._covariance = _diagonal(self._prior_variance)

    def _is_believed(self, error: float) -> bool:
        """Count a residual beyond the limit."""
        sign = 1 if error > 0 else -1
        self._run = self._run + sign if self._run * sign > 0 else sign
        if abs(self._run) < PERSISTENT_RUN:
            return False
        if abs(self._run) == PERSISTENT_RUN:
            self.num_shifts += 1
        return True

    def _spread(self, scaled: _Row) -> tuple[_Row, float]:
        """The covariance times ``scaled``, and the prediction's variance."""
        a, b, c, d, e, f, g = scaled
        gains: _Row = tuple(
            [p * a + q * b + r * c + s * d + t * e + u * f + v * g for p, q, r, s, t, u, v in self._covariance]
        )
        variance = sum(map(mul, scaled, gains))
        if variance > 0.0:
            return gains, variance
        # Rounding has cost the matrix its sign; start from the coefficients as they are.
        self._covariance = _diagonal(self._prior_variance)
        return self._spread(scaled)

    def _drift(self, unit: float) -> None:
        for place, row in enumerate(self._covariance):
            if row[place] < _DRIFT_CEILING * unit:
                self._covariance[place] = (*row[:place], row[place] + _DRIFT_VARIANCE * unit, *row[place + 1 :])

    def _widen_along_coefficients(self) -> None:
        coefficients = self._coefficients
        self._covariance = [
            tuple([entry + _SPEED_VARIANCE * left * right for entry, right in zip(row, coefficients, strict=True)])
            for row, left in zip(self._covariance, coefficients, strict=True)
        ]

    def _update(self, gains: _Row, variance: float, error: float) -> None:
        step = error / (1.0 + variance)
        h0, h1, h2, h3, h4, h5, h6 = gains
        c0, c1, c2, c3, c4, c5, c6 = self._coefficients
        coefficients = (
            c0 + step * h0,
            c1 + step * h1,
            c2 + step * h2,
            c3 + step * h3,
            c4 + step * h4,
            c5 + step * h5,
            c6 + step * h6,
        )
        # Kulhavy's weight of the new evidence: 0 where it just replaces what is forgotten, below where it is weaker.
        weight = _MEMORY - (1.0 - _MEMORY) / variance
        if weight:
            k = 1.0 / (1.0 / weight + variance)
            self._covariance = [
                (p - (w := k * h) * h0, q - w * h1, r - w * h2, s - w * h3, t - w * h4, u - w * h5, v - w * h6)
                for (p, q, r, s, t, u, v), h in zip(self._covariance, gains, strict=True)
            ]
        self._coefficients = coefficients if min(coefficients) >= 0.0 else self._at_least_zero(coefficients)

    def _at_least_zero(self, coefficients: _Row) -> _Row:
        """The best coefficients with the negative ones at 0."""
        values = list(coefficients)
        # Each entry: a place held at 0, and how all coefficients move with it while those before it are held.
        held: list[tuple[int, list[float]]] = []
        while True:
            lowest = min(values)
            if lowest >= 0.0:
                return tuple(values)
            place = values.index(lowest)
            direction = list(self._covariance[place])
            for other, known in held:
                share = direction[other] / known[other]
                direction = [entry - share * move for entry, move in zip(direction, known, strict=True)]
            if direction[place] > _TINY * self._covariance[place][place]:
                share = lowest / direction[place]
                values = [value - share * move for value, move in zip(values, direction, strict=True)]
                held.append((place, direction))
            for other, _ in held:
                values[other] = 0.0
            values[place] = 0.0
