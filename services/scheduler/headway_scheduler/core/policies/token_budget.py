"""The token budgets by name: how many prompt tokens may run beside the decodes of a step.

Owns: the policies, the safety margin, and their registry. Must not know: requests, queues, blocks, clocks.

- ``fixed``: the rest of ``max_num_batched_tokens`` (Agrawal et al., Sarathi-Serve, OSDI 2024, section 4: a profile
  finds it).
- ``slo``: as many as keep the predicted step within the inter-token objective. ``StepTimeModel`` learns the profile
  online.

Both spare the rows that run here when requests come whose executor was lost: these are computed again beside rows that
lost nothing. Without an objective to keep, such a step may take a tenth longer than its decodes alone.

``slo`` adds to the prediction:

- *A margin*: the 99th percentile of actual over predicted time, by stochastic approximation (Robbins and Monro, 1951)
  as in Angelopoulos, Candes and Tibshirani, "Conformal PID control for time series prediction", 2023: up by 99 parts
  after a step beyond it, down by 1 part otherwise. So one step in a hundred is beyond it, whatever the model's bias.
  Urgent requests use it up.
- *No extrapolation*: a step is at most twice as large as one that has worked.
- *Whole tiles*: a step that cuts a prompt has a multiple of 128 tokens, or of 64 below 256. With 128-token tiles,
  matrix products take as long for 576 tokens as for 640.
- *Progress*: at least 64 prompt tokens run, so prompts never starve.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from headway_scheduler.core.policies.step_time import PERSISTENT_RUN, StepTimeModel, is_step_time
from headway_scheduler.core.state.step_shape import StepShape

SMALL_TILE_TOKENS = 64
"""The least allotment, and the tile of steps below ``LEAST_OF_LARGE_TILES``."""
LARGE_TILE_TOKENS = 128
LEAST_OF_LARGE_TILES = 256
FIRST_STEP_TOKENS = 256
"""The largest step while nothing is known."""
_GROWTH = 2
"""A step is at most so many times as large as one that has worked."""
_SPARING_SHARE = 0.1
"""What prompts that a loss has brought may add to a step, as a share of the time of its decodes."""


class PromptLoad(NamedTuple):
    """The prompt tokens that could run beside ``decoding``, whose tightest objective is ``objective_s``.

    ``num_computed_tokens``: of the first prompt. ``num_left``: an upper bound of the waiting prompt tokens.
    ``is_urgent``: a first token is about to be late.
    """

    decoding: StepShape
    objective_s: float | None
    num_computed_tokens: int
    num_left: int
    is_urgent: bool


class JoiningRow(NamedTuple):
    """A row with ``num_context_tokens`` that would decode beside ``decoding``.

    ``objective_s`` is the tightest of all.
    """

    decoding: StepShape
    objective_s: float | None
    num_context_tokens: int


class TokenBudget(Protocol):
    """It asks for the load only if needed, since that costs time."""

    @property
    def needs_step_times(self) -> bool: ...  # whether it must learn from each step with a prompt

    @property
    def margin(self) -> float: ...  # the factor of predictions before they are compared with an objective

    def step_tokens(self, most: int, ask: Callable[[], PromptLoad | None], *, spares: bool = False) -> int:
        """Return the most tokens of a step with prompts. ``ask`` returns None if nothing decodes.

        ``spares``: prompts that a loss has brought run beside rows that were here.
        """

    def admits_more(self, ask: Callable[[], JoiningRow]) -> bool:
        """Whether one more row may decode without making all late."""

    def observe(self, shape: StepShape, duration_s: float, objective_s: float | None) -> None:
        """Learn from a step, as the model of step times does."""


class FixedBudget:
    """``max_num_batched_tokens``, whatever it costs."""

    margin = 1.0
    needs_step_times = False

    def __init__(self, max_num_batched_tokens: int, step_time: StepTimeModel) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._step_time = step_time

    def step_tokens(self, most: int, ask: Callable[[], PromptLoad | None], *, spares: bool = False) -> int:
        most = min(most, self._max_num_batched_tokens)
        load = ask() if spares else None
        return most if load is None else min(most, _sparing_tokens(self._step_time, load, most))

    def admits_more(self, ask: Callable[[], JoiningRow]) -> bool:
        del ask
        return True

    def observe(self, shape: StepShape, duration_s: float, objective_s: float | None) -> None:
        del objective_s
        self._step_time.observe(shape, duration_s)


class TailRatio:
    """The 99th percentile of actual over predicted time, at least 1.

    A correction follows the mean deviation from 1, so it suits quiet and noisy devices, and no outlier counts more.
    """

    _PERCENTILE = 0.99
    _LARGEST = 1.5
    _SMALLEST_DEVIATION = 0.01
    _DEVIATION_GAIN = 0.03

    def __init__(self) -> None:
        self.value = 1.03
        self._deviation = 0.02
        self._before: deque[float] = deque(maxlen=PERSISTENT_RUN)

    def observe(self, ratio: float) -> None:
        """Add the ratio of a step."""
        self._before.append(self.value)
        deviation = min(abs(ratio - 1.0), 3 * self._deviation)
        self._deviation = max(
            self._deviation + self._DEVIATION_GAIN * (deviation - self._deviation), self._SMALLEST_DEVIATION
        )
        is_beyond = ratio > self.value
        correction = self._deviation * (is_beyond - (1.0 - self._PERCENTILE))
        self.value = min(max(self.value + correction, 1.0), self._LARGEST)

    def forget_run(self) -> None:
        """Undo the last steps: the device has changed its speed."""
        if self._before:
            self.value = min(self.value, self._before[0])
            self._before.clear()


class SloBudget:
    """The largest allotment whose step is predicted to keep the objective."""

    needs_step_times = True

    def __init__(self, max_num_batched_tokens: int, step_time: StepTimeModel) -> None:
        self._max_num_batched_tokens = max_num_batched_tokens
        self._step_time = step_time
        self._tail = TailRatio()
        self._largest_learned = 0
        """Tokens of the largest step that the model has learned from and that kept its objective."""

    @property
    def margin(self) -> float:
        return self._tail.value

    def step_tokens(self, most: int, ask: Callable[[], PromptLoad | None], *, spares: bool = False) -> int:
        load = ask()
        if load is None:
            return most
        if load.objective_s is None and spares:
            return min(most, _sparing_tokens(self._step_time, load, most))
        return min(most, load.decoding.num_rows + self.prompt_tokens(load))

    def prompt_tokens(self, load: PromptLoad) -> int:
        """Return the largest allotment that keeps the objective, or the least one.

        All tokens count as one prompt's, the worst case for attention.
        """
        decoding, objective_s, _, num_left, is_urgent = load
        most = max(self._max_num_batched_tokens - decoding.num_tokens, 0)
        if objective_s is None:
            return most
        least = min(SMALL_TILE_TOKENS, most)
        trusted = max(FIRST_STEP_TOKENS, _GROWTH * self._largest_learned) - decoding.num_tokens
        most = max(min(most, trusted), least)
        limit_s = objective_s if is_urgent else objective_s / self._tail.value
        if num_left <= most and (num_left <= least or _fits(self._step_time, load, num_left, limit_s)):
            return num_left
        return max(_tokens_of_whole_tiles(self._step_time, load, most, limit_s), least)

    def admits_more(self, ask: Callable[[], JoiningRow]) -> bool:
        """The least allotment of prompt tokens must fit as well."""
        decoding, objective_s, num_context_tokens = ask()
        if objective_s is None or not decoding.num_rows:
            return True
        joined = StepShape(
            decoding.num_tokens + 1 + SMALL_TILE_TOKENS,
            decoding.num_rows + 1,
            decoding.num_context_tokens + num_context_tokens,
            decoding.num_prefill_pairs,
        )
        predicted_s = self._step_time.predict_s(joined)
        return predicted_s is None or predicted_s * self._tail.value <= objective_s

    def observe(self, shape: StepShape, duration_s: float, objective_s: float | None) -> None:
        """The tail learns before the model does."""
        if not is_step_time(duration_s):
            return
        # Only steps near the objective may come to miss it; the others would only dilute the tail.
        predicted_s = self._step_time.predict_s(shape)
        if objective_s is not None and predicted_s is not None and predicted_s >= objective_s / 2:
            self._tail.observe(duration_s / predicted_s)
        num_shifts = self._step_time.num_shifts
        self._step_time.observe(shape, duration_s)
        if self._step_time.num_shifts != num_shifts:
            self._tail.forget_run()
        # The model ignores the first steps; they must not count as learned.
        if self._step_time.predict_s(shape) is not None and (objective_s is None or duration_s <= objective_s):
            self._largest_learned = max(self._largest_learned, shape.num_tokens)


def _sparing_tokens(step_time: StepTimeModel, load: PromptLoad, most: int) -> int:
    """The tokens of a step that takes little longer than its decodes alone, of ``most`` or less."""
    num_decodes = load.decoding.num_tokens
    alone_s = step_time.predict_s(load.decoding)
    if alone_s is None or step_time.prefill_s(1, 0) is None:
        return FIRST_STEP_TOKENS
    limit_s = alone_s * (1.0 + _SPARING_SHARE)
    if load.num_left <= most - num_decodes and _fits(step_time, load, load.num_left, limit_s):
        return most
    fitting = _tokens_of_whole_tiles(step_time, load, max(most - num_decodes, 0), limit_s)
    return num_decodes + max(fitting, SMALL_TILE_TOKENS)


def _tokens_of_whole_tiles(step_time: StepTimeModel, load: PromptLoad, most: int, limit_s: float) -> int:
    """The most tokens of a prompt that is cut: with the decodes, they are a number of tiles. Below 0 if none fits."""
    num_decodes, tile = load.decoding.num_tokens, SMALL_TILE_TOKENS
    fitting, beyond = num_decodes // tile, (num_decodes + most) // tile + 1
    while beyond - fitting > 1:
        tiles = (fitting + beyond) // 2
        if _fits(step_time, load, tiles * tile - num_decodes, limit_s):
            fitting = tiles
        else:
            beyond = tiles
    num_tokens = fitting * tile
    if num_tokens > LEAST_OF_LARGE_TILES:
        num_tokens -= num_tokens % LARGE_TILE_TOKENS
    return num_tokens - num_decodes


def _fits(step_time: StepTimeModel, load: PromptLoad, num_tokens: int, limit_s: float) -> bool:
    predicted_s = step_time.predict_s(load.decoding.with_prompt(num_tokens, load.num_computed_tokens))
    return predicted_s is None or predicted_s <= limit_s


TOKEN_BUDGETS: dict[str, Callable[[int, StepTimeModel], TokenBudget]] = {"fixed": FixedBudget, "slo": SloBudget}
"""From ``max_num_batched_tokens`` and the model of step time to a budget; a budget serves one scheduler."""
