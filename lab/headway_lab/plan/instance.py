"""One kind of executor by what it does: its costs, its scheduler's settings, its runs, and bounds of what it can do.

- *Prefill* answers with the first token; the rest of the request is not its work.
- *Decode* gets requests whose prompt is computed, and their first token. Its blocks are taken as on arrival, but the
  prompt costs nothing: each request begins as one token behind a full cache.
- *Both* runs whole requests, with token budgets that keep the objectives (``budget=slo``).

Each run is ``headway simulate``'s: the real scheduler core on a virtual device.

Left out: an executor for prefill frees a request's blocks at the first token, not when they are pulled; and a request that
decode preempts misses its objective rather than being computed again, since that is another executor's work.
"""

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.measurement import TimeColumns
from headway_lab.plan.cluster import Degrees
from headway_lab.simulate.collector import RunCollector, bubble_share
from headway_lab.simulate.device import StepCosts, VirtualDevice
from headway_lab.simulate.loop import NoProgress, Simulation
from headway_lab.simulate.roofline import Roofline, StepTime
from headway_lab.simulate.stations import InTurn, Station
from headway_lab.workload.arrivals import OpenArrivals
from headway_lab.workload.requests import SAMPLED_TOKENS, Objectives, PlannedRequest, PromptSource, rng_of
from headway_proto.columns import Int32Array
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_HOST_BANDWIDTH = 1e9  # nothing is swapped


class Phase(Enum):
    """What an executor does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class DecodeCosts:
    """A prompt's chunk costs what its last token does: the cache before it is there."""

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self.model_name = roofline.model_name
        self.device_name = roofline.device_name
        self.swap_time = roofline.swap_time

    def step_time(
        self, num_scheduled_tokens: Int32Array, num_computed_tokens: Int32Array, num_samples: int
    ) -> StepTime:
        """See ``Roofline.step_time``."""
        before = num_computed_tokens + num_scheduled_tokens - 1
        return self._roofline.step_time(np.ones_like(before), before, num_samples)


class Run(NamedTuple):
    """Latencies in seconds, float64, shape ``[requests]``; infinite for what was not answered.

    ``first_s``: from the arrival to the first token of this run. ``longest_gap_s``: between two of its further tokens.
    ``gaps_s``: the sum of these gaps. ``mean_step_s``: from a step's start to its end. ``single_gaps_s``: every gap,
    shape ``[gaps]``; ``gap_owners``: its request's place. ``bubble_share``: see ``collector.bubble_share``.
    """

    first_s: FloatArray
    longest_gap_s: FloatArray
    gaps_s: FloatArray
    mean_step_s: float
    single_gaps_s: FloatArray
    gap_owners: IntArray
    bubble_share: float


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """An executor of one phase, with its devices."""

    phase: Phase
    degrees: Degrees
    roofline: Roofline
    limits: SchedulerLimits
    capacity: ExecutorCapacity

    @property
    def num_batches(self) -> int:
        """The lanes, among which decodes are divided."""
        return self.capacity.num_lanes

    @property
    def costs(self) -> StepCosts:
        """What its steps take."""
        return DecodeCosts(self.roofline) if self.phase is Phase.DECODE else self.roofline

    def run(self, requests: Sequence[PlannedRequest], times_s: FloatArray, seed: int, num_executors: int = 1) -> Run:
        """Run requests that arrive at ``times_s``, in seconds, on executors that get them in turn.

        An answer of one token has nothing to decode: its latencies there are 0.
        """
        is_sent = np.array([self.phase is not Phase.DECODE or one.num_output_tokens > 1 for one in requests])
        sent = [
            self._own_part(requests[place], number) for number, place in enumerate(np.flatnonzero(is_sent).tolist())
        ]
        latencies = np.zeros((3, len(requests)))
        mean_step_s = bubbles = 0.0
        single_gaps_s, gap_owners = np.empty(0), np.empty(0, dtype=np.int64)
        if sent:
            stations = [self._station(seed, number) for number in range(num_executors)]
            measurement = RunCollector(len(sent))
            arrivals = OpenArrivals(sent, times_s[is_sent].tolist())
            prompts = PromptSource(seed, self.capacity.vocab_size)
            with suppress(NoProgress):  # What waits for ever is not answered.
                Simulation(InTurn(stations), arrivals, prompts, measurement).run()
            times = measurement.measurement().times
            latencies[:, is_sent] = self._latencies(times, measurement.preempted())
            single_gaps_s, gap_owners = times.gaps_s, np.flatnonzero(is_sent)[times.gap_owners]
            bubbles = bubble_share(measurement.steps)
            mean_step_s = float(np.mean([step.end_s - step.start_s for step in measurement.steps] or [0.0]))
        first_s, longest_gap_s, gaps_s = latencies
        return Run(first_s, longest_gap_s, gaps_s, mean_step_s, single_gaps_s, gap_owners, bubbles)

    def _station(self, seed: int, number: int) -> Station:
        rng = rng_of(seed, SAMPLED_TOKENS, number)
        device = VirtualDevice(self.costs, self.capacity, rng, host_bandwidth=_HOST_BANDWIDTH)
        return Station(Scheduler(self.limits, self.capacity), device)

    def _own_part(self, request: PlannedRequest, number: int) -> PlannedRequest:
        request, objectives = msgspec.structs.replace(request, number=number), request.objectives
        if self.phase is Phase.PREFILL:
            objectives = Objectives(ttft_slo_ms=objectives.ttft_slo_ms)
            return msgspec.structs.replace(request, num_output_tokens=1, objectives=objectives)
        if self.phase is Phase.DECODE:
            return msgspec.structs.replace(
                request,
                num_prompt_tokens=request.num_prompt_tokens + 1,
                num_output_tokens=request.num_output_tokens - 1,
                objectives=Objectives(itl_slo_ms=objectives.itl_slo_ms),
            )
        return request

    def _latencies(self, times: TimeColumns, preempted: list[int]) -> FloatArray:
        """Return first tokens, longest gaps and sums of gaps, shape ``[3, requests]``."""
        latencies = np.zeros((3, len(times.arrival_s)))
        first_s, longest_s, sum_s = latencies
        first_s[:] = times.first_token_s - times.arrival_s
        np.maximum.at(longest_s, times.gap_owners, times.gaps_s)
        np.add.at(sum_s, times.gap_owners, times.gaps_s)
        latencies[:, ~times.is_answered] = np.inf
        if self.phase is Phase.DECODE:
            latencies[1:, preempted] = np.inf
        return latencies
