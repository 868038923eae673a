"""DistServe's placement (Zhong et al., "DistServe", OSDI 2024, section 4), and executors that do everything beside it.

- *Algorithm 1*, for fast links between nodes: each phase chooses its degrees alone, by the goodput of one executor, and
  has as many executors as the rate needs.
- *Algorithm 2*, for slow links: an executor for prefill and one for decode share nodes, so that keys and values move inside
  a node. If one node is too small, each holds the same part of the layers of both. The pair's goodput counts.

Both choose the fewest devices for the rate, then the most goodput per device. The paper compares goodput per device alone
and rounds up afterwards; for high rates this is the same. A chosen system is run as a whole. Since a request must keep both
objectives, executors are added until enough requests do.
"""

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

import msgspec

from headway_lab.percentiles import rounded
from headway_lab.plan.bounds import CEILING_MARGIN
from headway_lab.plan.cluster import Cluster, Degrees
from headway_lab.plan.executors import make_instance
from headway_lab.plan.goodput import (
    Goal,
    Outcome,
    Trial,
    appraise,
    highest_rate,
    searched,
)
from headway_lab.plan.instance import Instance, Phase
from headway_lab.plan.options import PlanOptions
from headway_lab.plan.system import Check, check_split, check_together, trial_of

_MOST_ADDED = 8

OnTrial = Callable[[str, Trial], None]
"""Gets what is tried, in words, and the trial."""


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """Executors of one phase. ``goodput``: of each, in requests per second."""

    phase: Phase
    degrees: Degrees
    goodput: float
    num_executors: int

    @property
    def num_devices(self) -> int:
        """Of all of them."""
        return self.num_executors * self.degrees.num_devices


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Executors that serve a rate, and the run that shows it.

    ``per_device``: requests per second and device of such executors in their ideal proportion.
    """

    roles: list[Role]
    per_device: float
    check: Check

    @property
    def num_devices(self) -> int:
        """Of all roles."""
        return sum(role.num_devices for role in self.roles)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Algorithm 2's unit. ``goodput``: requests per second of both together, None if none."""

    prefill: Degrees
    decode: Degrees
    num_nodes: int
    ceiling: float
    goodput: float | None = None
    trials: list[Trial] = []

    @property
    def num_devices(self) -> int:
        """Of both."""
        return self.prefill.num_devices + self.decode.num_devices


class Need(NamedTuple):
    """Orders executors: the fewest devices for the rate, then the most goodput per device."""

    num_devices: int
    per_device: float


def need(rate: float, goodput: float, num_devices: int) -> Need:
    """Return what ``rate`` needs of executors with this goodput and so many devices; smaller is better."""
    return Need(num_executors_for(rate, goodput) * num_devices, -goodput / num_devices)


def num_executors_for(rate: float, goodput: float) -> int:
    """Return how many executors reach ``rate``; the rounding of a quotient adds none."""
    return max(ceil(rate / goodput - 1e-9), 1)


class Planner:
    """The search. Executors are searched once, by phase, degrees and whether their stages cross nodes."""

    def __init__(self, cluster: Cluster, options: PlanOptions, goal: Goal, on_trial: OnTrial) -> None:
        self.outcomes: dict[tuple[Phase, Degrees, bool], Outcome] = {}
        self.pairs: list[Pair] = []
        self._cluster = cluster
        self._options = options
        self._goal = goal
        self._on_trial = on_trial

    # ------------------------------------------------------------------------------------------------ one executor

    def appraise(self, phase: Phase, degrees: Degrees, *, crosses_nodes: bool) -> Outcome:
        """Return what is known of an executor; its costs at least."""
        key = (phase, degrees, crosses_nodes)
        if key not in self.outcomes:
            outcome = appraise(self._instance(*key), self._goal)
            self.outcomes[key] = msgspec.structs.replace(outcome, crosses_nodes=crosses_nodes)
        return self.outcomes[key]

    def search(self, phase: Phase, degrees: Degrees, *, crosses_nodes: bool) -> Outcome:
        """Return an executor's outcome with its goodput."""
        outcome = self.appraise(phase, degrees, crosses_nodes=crosses_nodes)
        if outcome.missed or outcome.goodput is not None:
            return outcome
        key = (phase, degrees, crosses_nodes)

        def on_trial(trial: Trial) -> None:
            self._on_trial(f"{phase.value} {degrees.label}", trial)

        found = searched(self._instance(*key), outcome, self._goal, on_trial)
        self.outcomes[key] = found
        return found

    def best_of(self, phase: Phase) -> Outcome | None:
        """Return the best executor of a phase by itself (Algorithm 1, lines 3 to 13), if any keeps the objectives."""
        appraised = [
            (degrees, self._crosses(degrees), self.appraise(phase, degrees, crosses_nodes=self._crosses(degrees)))
            for degrees in self._cluster.fitting_degrees()
        ]
        best: Outcome | None = None
        for degrees, crosses, outcome in sorted(appraised, key=lambda entry: self._hope(entry[2])):
            if outcome.missed or (best is not None and self._hope(outcome) >= self._need(best)):
                continue
            found = self.search(phase, degrees, crosses_nodes=crosses)
            if found.goodput and (best is None or self._need(found) < self._need(best)):
                best = found
        return best

    # ------------------------------------------------------------------------------------------------------ systems

    def split_by_phase(self) -> System | None:
        """Return Algorithm 1's system, if there is one within the most devices."""
        prefill, decode = self.best_of(Phase.PREFILL), self.best_of(Phase.DECODE)
        if prefill is None or decode is None:
            return None
        goodputs = (self._sendable(prefill.goodput or 0.0), decode.goodput or 0.0)
        instances = [self._instance(one.phase, one.degrees, self._crosses(one.degrees)) for one in (prefill, decode)]
        return self._grown(instances, goodputs, is_pair=False)

    def split_by_node(self) -> System | None:
        """Return Algorithm 2's system, if there is one within the most devices."""
        best: Pair | None = None
        for pair in sorted(self._all_pairs(), key=self._hope_of_pair):
            if best is not None and self._hope_of_pair(pair) >= self._need_of_pair(best):
                continue
            found = self._search_pair(pair, best)
            self.pairs.append(found)
            if found.goodput and (best is None or self._need_of_pair(found) < self._need_of_pair(best)):
                best = found
        if best is None or best.goodput is None:
            return None
        return self._grown(self._instances_of(best), (best.goodput, best.goodput), is_pair=True)

    def together(self) -> System | None:
        """Return the best system of executors that do everything, if there is one within the most devices."""
        best = self.best_of(Phase.BOTH)
        if best is None:
            return None
        instance = self._instance(Phase.BOTH, best.degrees, self._crosses(best.degrees))
        return self._grown([instance], (best.goodput or 0.0,), is_pair=False)

    # ------------------------------------------------------------------------------------------------------- details

    def _instance(self, phase: Phase, degrees: Degrees, crosses_nodes: bool) -> Instance:
        roofline = self._cluster.roofline(degrees, crosses_nodes=crosses_nodes)
        return make_instance(phase, degrees, roofline, self._options, self._goal.workload)

    def _crosses(self, degrees: Degrees) -> bool:
        return self._cluster.crosses_nodes(degrees.num_devices)

    def _hope(self, outcome: Outcome) -> Need:
        return need(self._options.rate, CEILING_MARGIN * outcome.ceiling, outcome.degrees.num_devices)

    def _need(self, outcome: Outcome) -> Need:
        return need(self._options.rate, outcome.goodput or 0.0, outcome.degrees.num_devices)

    def _hope_of_pair(self, pair: Pair) -> Need:
        return need(self._options.rate, pair.ceiling, pair.num_devices)

    def _need_of_pair(self, pair: Pair) -> Need:
        return need(self._options.rate, pair.goodput or 0.0, pair.num_devices)

    def _sendable(self, goodput: float) -> float:
        """An executor for prefill cannot be faster than its link."""
        transfer_s = self._goal.transfer_token_s * self._goal.workload.mean_prompt_tokens
        return min(goodput, 1.0 / transfer_s) if transfer_s else goodput

    def _all_pairs(self) -> Iterator[Pair]:
        """Yield the pairs of which neither executor misses an objective by itself."""
        fitting = self._cluster.fitting_degrees()
        for prefill in fitting:
            for decode in fitting:
                num_nodes = self._cluster.nodes_of_pair(prefill, decode)
                if num_nodes is None:
                    continue
                outcomes = [
                    self.appraise(phase, degrees, crosses_nodes=num_nodes > 1)
                    for phase, degrees in ((Phase.PREFILL, prefill), (Phase.DECODE, decode))
                ]
                if not any(outcome.missed for outcome in outcomes):
                    ceiling = CEILING_MARGIN * min(outcome.ceiling for outcome in outcomes)
                    yield Pair(prefill=prefill, decode=decode, num_nodes=num_nodes, ceiling=rounded(ceiling))

    def _instances_of(self, pair: Pair) -> list[Instance]:
        crosses = pair.num_nodes > 1
        parts = ((Phase.PREFILL, pair.prefill), (Phase.DECODE, pair.decode))
        return [self._instance(phase, degrees, crosses) for phase, degrees in parts]

    def _search_pair(self, pair: Pair, best: Pair | None) -> Pair:
        """Return the pair with its goodput, or with a lower ceiling if it cannot be better than ``best``.

        Both together keep no more than the worse of them, so its goodput is the next ceiling.
        """
        crosses = pair.num_nodes > 1
        for phase, degrees in ((Phase.PREFILL, pair.prefill), (Phase.DECODE, pair.decode)):
            goodput = self.search(phase, degrees, crosses_nodes=crosses).goodput
            if not goodput:
                return pair
            pair = msgspec.structs.replace(pair, ceiling=min(pair.ceiling, self._sendable(goodput)))
            if best is not None and self._hope_of_pair(pair) >= self._need_of_pair(best):
                return pair
        prefill, decode = self._instances_of(pair)

        def take(rate: float) -> Trial:
            return trial_of(check_split(prefill, 1, decode, 1, self._goal, rate))

        def on_trial(trial: Trial) -> None:
            self._on_trial(f"{pair.prefill.label} with {pair.decode.label}", trial)

        least_rate = self._goal.least_rate * pair.num_devices
        first_rate = max(pair.ceiling, least_rate)
        goodput, trials = highest_rate(first_rate, least_rate, self._goal.attainment, take, on_trial)
        return msgspec.structs.replace(pair, goodput=goodput, trials=trials)

    def _grown(self, instances: Sequence[Instance], goodputs: Sequence[float], *, is_pair: bool) -> System | None:
        """Return the system that serves the rate, or as much of it as the most devices can."""
        sizes = [instance.degrees.num_devices for instance in instances]
        most, rate = self._options.devices, self._options.rate
        counts = _counts(rate, goodputs, is_pair=is_pair)
        if _total(counts, sizes) > most:
            rate = _rate_of(most, sizes, goodputs, is_pair=is_pair)
            if not rate:
                return None
            counts = _counts(rate, goodputs, is_pair=is_pair)
        check = self._check(instances, counts, rate)
        for _ in range(_MOST_ADDED):
            grown = _one_more(counts, check, is_pair=is_pair)
            if check.meets(self._goal.attainment) or _total(grown, sizes) > most:
                break
            counts = grown
            check = self._check(instances, counts, rate)
        per_device = 1.0 / sum(size / goodput for size, goodput in zip(sizes, goodputs, strict=True))
        roles = [
            Role(phase=instance.phase, degrees=instance.degrees, goodput=goodput, num_executors=count)
            for instance, goodput, count in zip(instances, goodputs, counts, strict=True)
        ]
        return System(roles=roles, per_device=rounded(per_device), check=check)

    def _check(self, instances: Sequence[Instance], counts: Sequence[int], rate: float) -> Check:
        if len(instances) == 1:
            check = check_together(instances[0], counts[0], self._goal, rate)
        else:
            check = check_split(instances[0], counts[0], instances[1], counts[1], self._goal, rate)
        self._on_trial("the whole system", trial_of(check))
        return check


def _total(counts: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


def _counts(rate: float, goodputs: Sequence[float], *, is_pair: bool) -> list[int]:
    counts = [num_executors_for(rate, goodput) for goodput in goodputs]
    return [max(counts)] * len(counts) if is_pair else counts


def _rate_of(most: int, sizes: Sequence[int], goodputs: Sequence[float], *, is_pair: bool) -> float:
    """Return the highest rate that ``most`` devices can serve by goodputs; 0: they are too few."""
    rates = {count * goodput for goodput in goodputs for count in range(1, most + 1)}
    return max((rate for rate in rates if _total(_counts(rate, goodputs, is_pair=is_pair), sizes) <= most), default=0.0)


def _one_more(counts: Sequence[int], check: Check, *, is_pair: bool) -> list[int]:
    """Add an executor to the phase of which more requests miss the objective, or a pair."""
    if is_pair or len(counts) == 1:
        return [count + 1 for count in counts]
    is_prefill = check.ttft_share < check.itl_share
    return [counts[0] + is_prefill, counts[1] + (not is_prefill)]
