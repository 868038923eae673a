"""What the core learns and foresees, written to be read: lists of what was seen, looked through for each answer.

Owns: the executable specification of output lengths, of the demand for memory, of step times, and of who speculates.
Must not know: how the core keeps any of it. Nothing is imported from there; each number stands here once more.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]

# ------------------------------------------------------------------------------------------------------ output lengths

LONGEST = 1 << 20
EDGES = sorted({0, *(round(2 ** (sixth / 6)) for sixth in range(20 * 6 + 1))})
"""Of the bins into which lengths fall: six to an octave."""

Curve = tuple[tuple[object, ...], ...]
"""Whose observations count: of all, of a tenant, of a tenant's prompts of similar length; the widest first."""

EVERYBODY: Curve = ((),)


class SpecifiedLengths:
    """A life table (Kaplan and Meier, over grouped ages) per curve, each shrunk towards the next wider one."""

    def __init__(self, half_life: int = 512) -> None:
        self.half_life = half_life
        self.seen: list[tuple[Curve, int, bool]] = []
        self.num_shown = 0
        """How many of them answers are made of."""
        self._made: dict[tuple[Curve, int], tuple[float, bool, float]] = {}

    def curve_of(self, tenant: str, num_prompt_tokens: int) -> Curve:
        octave = math.floor(math.log2(num_prompt_tokens)) if num_prompt_tokens else -1
        return ((), (tenant,), (tenant, octave))

    def observe(self, curve: Curve, length: int, *, is_censored: bool) -> None:
        """It ended after ``length`` tokens, or was cut there. What shows is at most 64, or a sixteenth, behind."""
        if length > 0:
            self.seen.append((curve, length, is_censored))
            if len(self.seen) - self.num_shown >= min(64, 1 + self.num_shown // 16):
                self.num_shown = len(self.seen)
                self._made.clear()

    def _bin(self, curve: Curve, place: int) -> tuple[float, bool, float]:
        """Of a bin: the share of those who reach it that end in it, whether enough are known to have come so far, and the
        share of all who come to its end.
        """
        if (curve, place) not in self._made:
            hazard, is_known = self._hazard(curve, place)
            before = self._bin(curve, place - 1)[2] if place else 1.0
            self._made[curve, place] = hazard, is_known and before > 1e-9, before * (1 - hazard)
        return self._made[curve, place]

    def _hazard(self, curve: Curve, place: int) -> tuple[float, bool]:
        start, end = EDGES[place], EDGES[place + 1]
        ended = at_risk = 0.0
        own = [entry for entry in self.seen[: self.num_shown] if curve[-1] in entry[0]]
        for age, (_, length, is_censored) in enumerate(reversed(own)):
            weight = 0.5 ** (age / self.half_life)
            if is_censored:
                at_risk += weight * min(max((length - start) / (end - start), 0.0), 1.0)
            elif length > start:
                at_risk += weight
                ended += weight if length <= end else 0.0
        is_known = at_risk >= 8
        if len(curve) > 1:  # eight imagined requests that follow the next wider curve
            wider, is_wider_known = self._hazard(curve[:-1], place)
            ended, at_risk, is_known = ended + 8 * wider, at_risk + 8, is_known or is_wider_known
        return (ended / at_risk if at_risk else 0.0), is_known

    def survival(self, curve: Curve, age: int) -> float:
        """The share of requests that come to more than ``age`` tokens; ends are spread evenly over a bin."""
        place = self._bin_of(age)
        start, end = EDGES[place], EDGES[place + 1]
        before = self._bin(curve, place - 1)[2] if place else 1.0
        return before * (1 - self._bin(curve, place)[0] * (age - start) / (end - start))

    def is_known(self, curve: Curve, age: int) -> bool:
        return self._bin(curve, self._bin_of(age))[1]

    def predicted_output(self, curve: Curve, age: int, limit: int) -> int | None:
        """The mean of the smaller of length and limit, of those who have come to ``age``."""
        if not self.is_known(curve, age):
            return None
        later = sum(self.survival(curve, time) for time in range(age, limit))
        return min(max(limit, age), age + math.ceil(later / self.survival(curve, age) - 1e-9))

    def chances_to_go_on(self, curve: Curve, age: int, limit: int, steps: list[int]) -> list[float]:
        """Of not having ended after so many further steps, in parts of 1024; as of the middle of its bin."""
        place = self._bin_of(age)
        middle = EDGES[place] + (EDGES[place + 1] - EDGES[place]) // 2
        chances = []
        for step in steps:
            if step >= limit - age:
                chance = 0.0
            elif self.is_known(curve, age):
                chance = self.survival(curve, middle + step) / self.survival(curve, middle)
            elif self.is_known(curve, 0):  # it has outlived all that is known
                chance = middle / (middle + step)
            else:
                chance = 0.0
            chances.append(round(chance * 1024) / 1024)
        return chances

    @staticmethod
    def _bin_of(age: int) -> int:
        return bisect_right(EDGES, age) - 1


# ------------------------------------------------------------------------------------------------------------- memory


def specified_horizons(block_size: int, max_tokens: int) -> list[int]:
    """Whole blocks ahead, two to an octave: 1, 2, 3, 4, 6, 8, 12 and so on."""
    most = max(max_tokens // block_size, 1)
    powers = [1 << power for power in range(most.bit_length())]
    return [count * block_size for count in sorted({*powers, *(3 * power // 2 for power in powers)}) if count <= most]


class SpecifiedForecast:
    """Requests, each with its tokens and its chances to run after each horizon."""

    def __init__(self, block_size: int, horizons: list[int]) -> None:
        self.block_size = block_size
        self.horizons = horizons
        self.running: list[tuple[int, list[float]]] = []

    def add(self, num_tokens: int, chances: list[float]) -> None:
        self.running.append((num_tokens, chances))

    def peak_with(self, num_tokens: int, chances: list[float]) -> int:
        """Blocks that will do for all, if one more starts now: for everybody soon, for most of them later."""
        soon = sum(self._blocks(tokens) + (row[0] > 0) for tokens, row in self.running)
        soon += self._blocks(num_tokens) + 1 if chances[0] else self._blocks(num_tokens + 1)
        return max(soon, *self._later([*self.running, (num_tokens, chances)]))

    def _later(self, requests: list[tuple[int, list[float]]]) -> list[int]:
        """At each horizon the mean and one and a half standard deviations: each is there, or is not, by its chance."""
        demand = []
        for place, steps in enumerate(self.horizons):
            mean = variance = Fraction(0)
            for num_tokens, chances in requests:
                chance, blocks = Fraction(chances[place]), self._blocks(num_tokens + steps)
                mean += chance * blocks
                variance += chance * (1 - chance) * blocks**2
            demand.append(math.ceil(float(mean) + 1.5 * math.sqrt(variance)))
        return demand

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


# --------------------------------------------------------------------------------------------------------- step times


@dataclass(frozen=True)
class Step:
    """What a step has to do: tokens and rows, positions computed before, pairs of query and key in prompts."""

    tokens: int
    rows: int
    context: int
    pairs: int = 0

    def features(self) -> Column:
        units = [1, 128, 1024, 1024, 1024, 1 << 17, 1 << 21]
        beyond = [max(self.tokens - 128, 0), max(self.tokens - 256, 0)]
        return np.array([1, self.rows, self.tokens, *beyond, self.context, self.pairs]) / units


class SpecifiedStepTimes:
    """Recursive least squares of relative errors, in the matrices of the papers that the core's module names."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.num_shifts = 0
        self.knows_prompts = False
        self.coefficients = np.zeros(7)
        self.covariance = np.zeros((7, 7))
        self.noise = 0.10
        self.run = 0
        """Strange steps in a row: longer ones above 0, shorter ones below."""

    def predict_s(self, step: Step) -> float | None:
        """None while only the first three steps, which warm up, are known."""
        return None if self.num_seen <= 3 else max(float(self.coefficients @ step.features()), 1e-6)

    def prefill_s(self, num_tokens: int, num_computed: int) -> float | None:
        """What a prompt adds to steps that are beyond both knees."""
        if not self.knows_prompts:
            return None
        pairs = sum(num_computed + place + 1 for place in range(num_tokens))
        more = Step(10_000 + num_tokens, 1, num_computed, pairs).features() - Step(10_000, 1, 0, 0).features()
        return float(self.coefficients @ more)

    def observe(self, step: Step, duration_s: float) -> None:
        if not 1e-6 <= duration_s <= 3600 or step.tokens <= 0:
            return
        self.num_seen += 1
        if self.num_seen <= 3:
            return
        if self.num_seen == 4:
            self.coefficients[0] = duration_s
            self.covariance = np.eye(7) * 1e3 * duration_s**2
        self.knows_prompts |= step.pairs > 0
        predicted_s = self.predict_s(step)
        assert predicted_s is not None
        unit = min(predicted_s, max(2 * duration_s, predicted_s / 8))
        direction = step.features() / unit
        error = self._clipped((duration_s - predicted_s) / unit, direction)
        variance = self._variance(direction)
        spread = 1.2533 * abs(error) / math.sqrt(1 + variance)
        self.noise = min(max(self.noise + 0.03 * (spread - self.noise), 0.01), 0.5)
        self._learn(direction, variance, error)
        if self.num_seen % 32 == 0:
            small = np.diag(self.covariance) < unit**2
            self.covariance += np.diag(small * 0.01 * unit**2)

    def _variance(self, direction: Column) -> float:
        return float(direction @ self.covariance @ direction)

    def _clipped(self, error: float, direction: Column) -> float:
        """An error of more than three deviations is cut; the fourth in a row is believed: the device has changed."""
        variance = self._variance(direction)
        limit = 3 * self.noise * math.sqrt(1 + variance)
        if abs(error) <= limit:
            self.run = 0
            return error
        sign = 1 if error > 0 else -1
        self.run = sign + (self.run if self.run * sign > 0 else 0)
        if abs(self.run) < 4:
            return sign * limit
        self.num_shifts += abs(self.run) == 4
        if variance < 25:
            self.covariance += 25 * np.outer(self.coefficients, self.coefficients)
        return min(error, 9.0)

    def _learn(self, direction: Column, variance: float, error: float) -> None:
        gain = self.covariance @ direction
        self.coefficients = self.coefficients + gain * error / (1 + variance)
        # Kulhavy: 0.95 of the evidence along this direction is left, that of the others stays as it is.
        weight = 0.95 - 0.05 / variance
        if weight:
            self.covariance = self.covariance - np.outer(gain, gain) / (1 / weight + variance)
        held: list[int] = []
        unbounded = self.coefficients
        while self.coefficients.min() < 0:
            # Simon and Chia: the best coefficients with those that would be negative at 0.
            held.append(int(self.coefficients.argmin()))
            among = self.covariance[np.ix_(held, held)]
            self.coefficients = unbounded - self.covariance[:, held] @ np.linalg.solve(among, unbounded[held])
            self.coefficients[held] = 0.0


# -------------------------------------------------------------------------------------------------------- speculation


@dataclass(eq=False)
class SpecifiedRecord:
    """What is known of one request's proposals. ``resumes_at``: computed tokens from which on it may speculate again."""

    may_speculate: bool = True
    wants: int = 4
    is_proven: bool = False
    misses: int = 0
    accepted: float = 0.0
    proposed: float = 0.0
    pause: int | None = None
    """Of the next time that it does not pay; None while there was none."""
    search: int = 4
    resumes_at: float = 0

    def __post_init__(self) -> None:
        if not self.may_speculate:
            self.resumes_at = math.inf


class SpecifiedSpeculation:
    """For whom speculation pays. ``step_times`` may know nothing: then it costs nothing."""

    def __init__(self, most: int, step_times: SpecifiedStepTimes) -> None:
        self.most = most
        self.step_times = step_times
        self.first_pause = 16
        self.proposal_s: float | None = None

    def choose(
        self, candidates: list[tuple[SpecifiedRecord, int]], decoding: Step, number: int, objective_s: float | None
    ) -> list[int]:
        """Tokens for each candidate (its record, its computed tokens) in step ``number``. Who only tries does so in one
        step of sixteen, or of as many as there are rows, or beside somebody for whom it pays.
        """
        proven = [(record, computed) for record, computed in candidates if record.is_proven]
        pays = bool(proven) and self._pays([record for record, _ in proven], decoding, objective_s)
        if not pays:
            for record, computed in proven:
                self._stop(record, computed)
            if number % min(16, decoding.rows):
                return [0] * len(candidates)
        return [min(record.wants, self.most) * (computed >= record.resumes_at) for record, computed in candidates]

    def _pays(self, proven: list[SpecifiedRecord], decoding: Step, objective_s: float | None) -> bool:
        """What is accepted is worth one and a half times the time that everybody waits for it, and nobody is late by it."""
        num_proposed = round(sum(record.proposed for record in proven))
        alone_s = self.step_times.predict_s(decoding)
        if alone_s is not None:
            if self.proposal_s is not None:
                with_s = alone_s + num_proposed * self.proposal_s
            else:
                more = Step(decoding.tokens + num_proposed, decoding.rows, decoding.context, decoding.pairs)
                with_s = self.step_times.predict_s(more) or alone_s
            earned_s = sum(record.accepted for record in proven) * alone_s / decoding.rows
            if earned_s < 1.5 * (with_s - alone_s):
                return False
            if objective_s is not None and alone_s <= objective_s < with_s:
                return False
        for record in proven:
            if record.accepted >= 0.5:
                self.first_pause = record.pause = 16
                record.search = 4
        return True

    def record_step(self, step: Step, duration_s: float, num_proposed: int) -> None:
        """What proposals have cost beside the step: a running mean, and never more than two steps each."""
        alone_s = self.step_times.predict_s(step)
        if num_proposed and alone_s is not None and 1e-6 <= duration_s <= 3600:
            cost_s = min(max(duration_s - alone_s, 0) / num_proposed, 2 * alone_s)
            self.proposal_s = cost_s if self.proposal_s is None else 0.8 * self.proposal_s + 0.2 * cost_s

    def learn(self, record: SpecifiedRecord, computed: int, *, allowed: int, proposed: int, accepted: int) -> None:
        record.accepted = 0.7 * record.accepted + 0.3 * accepted
        record.proposed = 0.7 * record.proposed + 0.3 * proposed
        if accepted:
            record.is_proven, record.misses = True, 0
            if accepted < proposed:
                record.wants = accepted + 1
            elif proposed == allowed:
                record.wants = min(max(record.wants, 2 * allowed), self.most)
        elif proposed:
            record.misses += 1
            record.wants = max(record.wants // 2, 1)
        if record.is_proven:
            if record.accepted < 0.2:
                self._stop(record, computed)
        elif not proposed:
            record.resumes_at = computed + record.search
            record.search = min(2 * record.search, 48)
        elif record.misses == 2:
            self._stop(record, computed)

    def _stop(self, record: SpecifiedRecord, computed: int) -> None:
        """It pauses, each time for twice as long; the first time as long as the others' experience says."""
        if record.pause is None:
            record.pause = self.first_pause
            self.first_pause = min(2 * self.first_pause, 512)
        record.resumes_at = computed + record.pause
        record.pause = min(2 * record.pause, 512)
        record.is_proven, record.misses = False, 0
