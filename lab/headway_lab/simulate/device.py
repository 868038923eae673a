"""The executor's end of the step protocol, with a cost model in place of the model. Must not know: requests, queues.

The executor's own batch state refuses an impossible diff and returns the digests that the scheduler checks.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import StepBatch
from headway_executor.batch.batch_state import BatchState
from headway_executor.batch.block_moves import BlockMoves
from headway_executor.block_store.suspects import SuspectBlocks
from headway_lab.simulate.roofline import StepTime
from headway_lab.simulate.transfers import Fetch, VirtualTransfers
from headway_proto.columns import Int32Array, decode_column, encode_column, encode_columns
from headway_proto.step import DIGEST_INTERVAL_STEPS, BackendInfo, ExecutorOutput, SchedulerOutput
from headway_proto.wording import shown
from headway_scheduler.core.state.limits import ExecutorCapacity

SLOWDOWN_NOTATION = "AT_S:FACTOR"
_NEVER = -1


class Slowdown(msgspec.Struct, frozen=True):
    """From ``at_s`` on, steps take ``factor`` times as long."""

    at_s: float
    factor: float


class Disturbance:
    """Factors on a step's time: lognormal noise of mean 1, and the latest slowdown."""

    def __init__(self, noise: float, slowdowns: Sequence[Slowdown], rng: np.random.Generator) -> None:
        self._sigma = float(np.sqrt(np.log1p(noise**2)))
        self._slowdowns = sorted(slowdowns, key=lambda slowdown: slowdown.at_s)
        self._rng = rng

    def factor(self, start_s: float) -> float:
        """Return the factor for a step at ``start_s``."""
        factor = 1.0
        for slowdown in self._slowdowns:
            if slowdown.at_s <= start_s:
                factor = slowdown.factor
        if self._sigma:
            factor *= float(np.exp(self._sigma * self._rng.standard_normal() - self._sigma**2 / 2))
        return factor


class StepRecord(NamedTuple):
    """One step; times in seconds. ``num_decodes`` of its rows run one token and sample.

    ``swap_s`` of its time moved ``num_swapped_blocks`` to or from the host. For ``overlap_s`` of it an earlier step was
    in other stages of the pipeline. Before it, ``pull_s`` brought blocks of other executors. It kept the ``num_stages``
    stages busy for ``stages_s`` in sum.
    """

    start_s: float
    end_s: float
    num_tokens: int
    num_rows: int
    num_decodes: int
    num_swapped_blocks: int
    swap_s: float
    overlap_s: float = 0.0
    pull_s: float = 0.0
    num_stages: int = 1
    stages_s: float = 0.0


class StepCosts(Protocol):
    """A model of a step's cost; see ``Roofline``."""

    @property
    def model_name(self) -> str: ...  # noqa: D102 - as the executor announces it

    @property
    def device_name(self) -> str: ...  # noqa: D102 - likewise

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """Return a step's time; see ``Roofline.step_time``."""

    def swap_time(self, num_blocks: int, block_size: int, host_bandwidth: float) -> float:
        """Return the seconds to move blocks to or from the host."""


class VirtualDevice:
    """Runs one step after the other.

    A pipeline's first stage takes the next step as soon as it is free, if the step needs no token that an earlier one
    has still to draw: steps of different lanes and chunks of prompts may follow each other through the stages. A step waits before a stage that is busy with the one before. So short and long steps leave bubbles, and many
    equal ones start at the slowest stage's intervals. Sends go on beside arithmetic. Blocks are moved before the first
    stage starts.

    ``host_bandwidth``: bytes per second between each device and the host. ``lengths``: output tokens at which requests
    stop, by the seed of their sampling. ``acceptance``: probability that a proposed token is right if those before it
    were; proposals cost nothing. Without ``transfers``, no blocks go to other executors or come from them.
    """

    def __init__(
        self,
        costs: StepCosts,
        capacity: ExecutorCapacity,
        rng: np.random.Generator,
        *,
        host_bandwidth: float,
        disturbance: Disturbance | None = None,
        lengths: Mapping[int, int] | None = None,
        acceptance: float = 0.0,
        transfers: VirtualTransfers | None = None,
    ) -> None:
        self._transfers = transfers
        self._suspects = SuspectBlocks(capacity.block_size)
        self._acceptance = acceptance
        self._costs = costs
        self._vocab_size = capacity.vocab_size
        self._rng = rng
        self._swap_block_s = costs.swap_time(1, capacity.block_size, host_bandwidth)
        self._disturbance = disturbance
        self._lengths = lengths or {}
        self._stop_token_id = stop_token_of(capacity.vocab_size)
        # By row: how many tokens are computed when the stop token is drawn.
        self._stops_at = np.full(capacity.max_num_rows, _NEVER, dtype=np.int64)
        self._state = BatchState(self._info(capacity))
        self._steps: deque[tuple[StepRecord, ExecutorOutput]] = deque()
        self._stages_free_s = [0.0]
        """When each stage has done its part of the newest step."""
        self._drawn_s = np.zeros(capacity.max_num_rows)
        """By row: when its newest token is there. Used with several stages."""

    @property
    def next_end_s(self) -> float | None:
        """The end of the oldest unanswered step, if any."""
        return self._steps[0][0].end_s if self._steps else None

    def take(self, output: SchedulerOutput, now: float) -> None:
        """Accept a step.

        Raises:
            ImpossibleDiff: the scheduler contradicts earlier steps.
        """
        batch, moves = self._state.apply(output)
        fetch = self._fetch(moves, now)
        stale_rows = self._suspects.stale_rows(batch, moves, None if fetch is None else fetch.blocks)
        sampling = batch.samples != 0
        num_samples = int(np.count_nonzero(sampling))
        start_s = max(now, self._stages_free_s[0], now if fetch is None else fetch.ready_s)
        if len(self._stages_free_s) > 1:
            start_s = self._with_tokens_s(batch, start_s)
        factor = 1.0 if self._disturbance is None else self._disturbance.factor(start_s)
        num_tokens = batch.num_scheduled_tokens
        if batch.num_speculative_tokens is not None:
            num_tokens = num_tokens + batch.num_speculative_tokens
            num_samples += int(batch.num_speculative_tokens.sum())
        time = self._costs.step_time(num_tokens, batch.num_computed_tokens, num_samples)
        num_swapped_blocks = _num_swapped(moves)
        swap_s = factor * num_swapped_blocks * self._swap_block_s
        end_before_s = self._stages_free_s[-1]
        end_s = self._run(time, factor, start_s, swap_s)
        if time.stages_s:
            self._drawn_s[batch.rows[sampling]] = end_s
        record = StepRecord(
            start_s=start_s,
            end_s=end_s,
            num_tokens=output.total_num_scheduled_tokens,
            num_rows=len(batch.rows),
            num_decodes=int(np.count_nonzero(sampling & (batch.num_scheduled_tokens == 1))),
            num_swapped_blocks=num_swapped_blocks,
            swap_s=swap_s,
            overlap_s=max(end_before_s - start_s, 0.0),
            pull_s=0.0 if fetch is None else fetch.ready_s - now,
            num_stages=max(len(time.stages_s), 1),
            stages_s=swap_s + factor * (sum(time.stages_s) if time.stages_s else time.total_s),
        )
        if moves is not None and self._transfers is not None:
            self._transfers.written(moves.swap_out[1], start_s + swap_s)
            self._transfers.export(moves.exports[1], end_s)
        answer = ExecutorOutput(
            epoch=output.epoch,
            step=output.step,
            sampled_token_ids=encode_column(self._draw(batch, sampling)),
            device_time_us=round(factor * time.total_s * 1e6),
            state_digest=self._state.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None,
            move_time_us=round(swap_s * 1e6),
            stale_rows=encode_column(stale_rows) if len(stale_rows) else b"",
        )
        if batch.num_speculative_tokens is not None:
            answer = self._accept(batch, batch.num_speculative_tokens, answer)
        self._steps.append((record, answer))

    def answer(self) -> tuple[StepRecord, ExecutorOutput]:
        """End the oldest step."""
        return self._steps.popleft()

    def _fetch(self, moves: BlockMoves | None, now: float) -> Fetch | None:
        if moves is None or not moves.pulls:
            return None
        assert self._transfers is not None
        return self._transfers.fetch(moves.pulls, now)

    def _with_tokens_s(self, batch: StepBatch, start_s: float) -> float:
        """Return when a step can start that needs the tokens its rows have drawn."""
        for new in batch.new_rows:
            self._drawn_s[new.row] = 0.0
        return max(start_s, float(self._drawn_s[batch.rows].max(initial=0.0)))

    def _run(self, time: StepTime, factor: float, start_s: float, swap_s: float) -> float:
        """Send a step through the stages; return its end."""
        if not time.stages_s:
            self._stages_free_s[0] = start_s + factor * time.total_s + swap_s
            return self._stages_free_s[0]
        if len(self._stages_free_s) == 1:
            self._stages_free_s = [0.0] * len(time.stages_s)
        return pass_stages(self._stages_free_s, time, start_s + swap_s, factor)

    def _info(self, capacity: ExecutorCapacity) -> BackendInfo:
        name = self._costs.model_name
        return BackendInfo(
            backend="roofline",
            device=self._costs.device_name,
            dtype="bfloat16",
            model_name=name,
            model_fingerprint=name,
            num_blocks=capacity.num_blocks,
            block_size=capacity.block_size,
            max_model_len=capacity.max_model_len,
            vocab_size=capacity.vocab_size,
            eos_token_ids=(),
            max_num_rows=capacity.max_num_rows,
            num_host_blocks=capacity.num_host_blocks,
            swap_us_per_block=capacity.swap_us_per_block,
            max_speculative_tokens=capacity.max_speculative_tokens,
            num_lanes=capacity.num_lanes,
            host_pool=capacity.host_pool,
            block_addresses=capacity.block_addresses,
        )

    def _accept(self, batch: StepBatch, num_proposed: Int32Array, answer: ExecutorOutput) -> ExecutorOutput:
        asked = np.flatnonzero(num_proposed)
        rows, proposed = batch.rows[asked], num_proposed[asked]
        right = self._rng.random((len(rows), int(proposed.max()))) < self._acceptance
        right[np.arange(right.shape[1]) >= proposed[:, None]] = False
        accepted = right.cumprod(axis=1).sum(axis=1).astype(np.int32)
        self._state.accept(np.stack((rows, proposed, accepted)))
        further = self._rng.integers(0, self._stop_token_id, size=int(accepted.sum()), dtype=np.int32)
        # These are the places of the tokens that end an answer.
        owner = np.repeat(np.arange(len(rows)), accepted)
        places = np.arange(len(owner)) - (np.cumsum(accepted) - accepted)[owner]
        positions = batch.num_computed_tokens[asked][owner] + batch.num_scheduled_tokens[asked][owner] + places + 1
        further[positions == self._stops_at[rows[owner]]] = self._stop_token_id
        behind = np.searchsorted(batch.rows[batch.samples != 0], rows[owner]) + 1
        token_ids = np.insert(decode_column(answer.sampled_token_ids), behind, further)
        return msgspec.structs.replace(
            answer,
            sampled_token_ids=encode_column(token_ids),
            accepted_tokens=encode_columns((rows, proposed, accepted)),
        )

    def _draw(self, batch: StepBatch, sampling: NDArray[np.bool_]) -> Int32Array:
        """Draw tokens; the stop token comes at a known length."""
        num_samples = int(np.count_nonzero(sampling))
        if not self._lengths:
            return self._rng.integers(0, self._vocab_size, size=num_samples, dtype=np.int32)
        for new in batch.new_rows:
            length = self._lengths.get(new.sampling.seed)
            self._stops_at[new.row] = _NEVER if length is None else new.num_prompt_tokens + length - 1
        token_ids = self._rng.integers(0, self._stop_token_id, size=num_samples, dtype=np.int32)
        num_computed = (batch.num_computed_tokens + batch.num_scheduled_tokens)[sampling]
        token_ids[num_computed == self._stops_at[batch.rows[sampling]]] = self._stop_token_id
        return token_ids


def pass_stages(free_s: list[float], time: StepTime, start_s: float, factor: float = 1.0) -> float:
    """Send a step through several stages; return its end.

    ``free_s``: when each stage is done with the step before; afterwards, with this one. ``factor``: on the step's time.
    """
    send_s = factor * time.send_s / (len(free_s) - 1)
    arrival_s = start_s
    for stage, stage_s in enumerate(time.stages_s):
        free_s[stage] = max(arrival_s, free_s[stage]) + factor * stage_s
        arrival_s = free_s[stage] + send_s
    return free_s[-1]


def stop_token_of(vocab_size: int) -> int:
    """Return the last token of the vocabulary."""
    return vocab_size - 1


def parse_slowdowns(texts: Sequence[str]) -> tuple[Slowdown, ...]:
    """Read slowdowns, ``AT_S:FACTOR`` each.

    Raises:
        ValueError: one is not a time and a positive factor.
    """
    return tuple(_slowdown(text) for text in texts)


def _slowdown(text: str) -> Slowdown:
    at_s, _, factor = text.partition(":")
    try:
        slowdown = Slowdown(float(at_s), float(factor))
    except ValueError:
        slowdown = Slowdown(-1.0, 0.0)
    if not (0 <= slowdown.at_s < float("inf") and 0 < slowdown.factor <= 1e6):
        raise ValueError(
            f"{shown(text)} is not allowed; allowed: {SLOWDOWN_NOTATION}, seconds from 0 and a factor above 0, "
            "at most 1e6"
        )
    return slowdown


def _num_swapped(moves: BlockMoves | None) -> int:
    return 0 if moves is None else moves.swap_out.shape[1] + moves.swap_in.shape[1]
