"""A whole plan: what is asked, what was found, and why nothing was. Must not know: layout, files."""

from collections.abc import Sequence
from math import ceil
from typing import Literal

import msgspec

from headway.flags.settings import ConfigurationError
from headway_lab.percentiles import rounded
from headway_lab.plan.algorithms import OnTrial, Pair, Planner, System
from headway_lab.plan.cluster import DEFAULT_GB_S, Cluster, HandOff, hand_off
from headway_lab.plan.goodput import Goal, Outcome
from headway_lab.plan.instance import Phase
from headway_lab.plan.options import FAST, MEAN_GAP, PlanOptions
from headway_lab.plan.workload import Workload, make_workload
from headway_lab.simulate.world import accelerator_and_model

SPLIT: Literal["split"] = "split"
TOGETHER: Literal["together"] = "together"


_LEAST_SHARE_OF_RATE = 0.25
"""All devices together need not be able to serve less than this share of the rate."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. ``split``: executors for prefill and for decode; ``together``: executors that do both.

    ``transfer_bandwidth``: bytes per second of a hand-off; ``hand_off``: of a prompt of mean length.
    """

    options: PlanOptions
    cluster: Cluster
    workload: Workload
    outcomes: list[Outcome]
    pairs: list[Pair]
    split: System | None
    together: System | None
    transfer_bandwidth: float
    hand_off: HandOff

    @property
    def algorithm(self) -> int:
        """The number of DistServe's algorithm."""
        return 1 if self.options.interconnect == FAST else 2

    @property
    def better(self) -> Literal["split", "together"]:
        """Which of both serves the rate, then with fewer devices, then with more requests per device."""
        if self.split is None or self.together is None:
            return TOGETHER if self.split is None else SPLIT
        return SPLIT if self._merit(self.split) >= self._merit(self.together) else TOGETHER

    def serves(self, system: System) -> bool:
        """Whether it reaches the rate within the objectives."""
        return system.check.rate >= self.options.rate and system.check.meets(self.options.attainment)

    @property
    def is_enough(self) -> bool:
        """Whether the better one serves the rate."""
        system = self.split if self.better == SPLIT else self.together
        return system is not None and self.serves(system)

    def _merit(self, system: System) -> tuple[bool, float, int, float]:
        return (self.serves(system), system.check.rate, -system.num_devices, system.per_device)


def make_plan(options: PlanOptions, on_trial: OnTrial) -> Plan:
    """Search.

    Raises:
        ConfigurationError: the model fits nowhere, or nothing keeps the objectives.
    """
    cluster = make_cluster(options)
    shape = cluster.shape
    workload = make_workload(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        variation=options.variation,
        objectives=options.objectives,
        context_length=shape.context_length,
        seed=options.seed,
    )
    # Algorithm 2 keeps hand-offs inside a node.
    bandwidth = cluster.node_bandwidth if options.interconnect == FAST else cluster.link_bandwidth
    goal = Goal(
        workload=workload,
        attainment=options.attainment,
        gaps=options.gaps,
        least_requests=options.num_requests,
        transfer_token_s=hand_off(shape, 1, bandwidth).seconds,
        least_rate=_LEAST_SHARE_OF_RATE * options.rate / options.devices,
    )
    planner = Planner(cluster, options, goal, on_trial)
    together = planner.together()
    split = planner.split_by_phase() if options.interconnect == FAST else planner.split_by_node()
    outcomes = [planner.outcomes[key] for key in sorted(planner.outcomes, key=_order)]
    if split is None and together is None:
        raise ConfigurationError(_why_nothing(options, outcomes))
    return Plan(
        options=options,
        cluster=cluster,
        workload=workload,
        outcomes=outcomes,
        pairs=planner.pairs,
        split=split,
        together=together,
        transfer_bandwidth=rounded(bandwidth),
        hand_off=hand_off(shape, round(workload.mean_prompt_tokens), bandwidth),
    )


def make_cluster(options: PlanOptions) -> Cluster:
    """Return the options' devices.

    Raises:
        ConfigurationError: the model fits on no degrees.
    """
    accelerator, shape = accelerator_and_model(options.model, options.hardware, options.hardware_file)
    cluster = Cluster(
        accelerator=accelerator,
        shape=shape,
        most_devices=options.devices,
        devices_per_node=options.devices_per_node,
        most_stages=options.most_stages,
        node_bandwidth=(options.transfer_bandwidth_gb_s or DEFAULT_GB_S[options.interconnect]) * 1e9,
        block_size=options.block_size,
    )
    if not cluster.fitting_degrees():
        raise ConfigurationError(
            f"--model: {shape.name} is not allowed, since it fits into no executor of at most {options.devices} x "
            f"{accelerator.name}, {options.devices_per_node} a node; allowed: more --devices, or a smaller model"
        )
    return cluster


def why_no_split(plan: Plan) -> str:
    """Return in words why no executors of their own serve prefill or decode."""
    for phase, place, objective in ((Phase.PREFILL, 0, "first token"), (Phase.DECODE, 1, "gaps")):
        outcomes = [outcome for outcome in plan.outcomes if outcome.phase is phase]
        if outcomes and all(outcome.missed for outcome in outcomes):
            best_ms = min(outcome.alone_ms[place] for outcome in outcomes)
            alone = f"a request alone needs {best_ms:.1f} ms at best"
            handed = ", hand-off included" * (phase is Phase.DECODE)
            return f"no executor for {phase.value} keeps the objective on the {objective}: {alone}{handed}"
    return f"no such system of at most {plan.options.devices} x {plan.cluster.accelerator.name} keeps both objectives"


def _why_nothing(options: PlanOptions, outcomes: Sequence[Outcome]) -> str:
    for place, phase, flag, objective_ms in (
        (0, Phase.PREFILL, "--ttft-slo-ms", options.ttft_slo_ms),
        (1, Phase.DECODE, "--itl-slo-ms", options.itl_slo_ms),
    ):
        alone_ms = [outcome.alone_ms[place] for outcome in outcomes if outcome.phase in {phase, Phase.BOTH}]
        if alone_ms and min(alone_ms) > objective_ms:
            return (
                f"{flag}: {objective_ms} is not allowed, since no executor keeps it even with one request at a time; "
                f"allowed: at least {ceil(min(alone_ms))}"
            )
    gaps = "" if options.gaps == MEAN_GAP else ", --gaps mean"
    return (
        f"--rate: {options.rate:g} is not allowed, since no system of at most {options.devices} x {options.hardware} keeps both objectives; "
        f"allowed: a lower rate, more --devices, longer objectives{gaps}"
    )


def _order(key: tuple[Phase, tuple[int, int], bool]) -> tuple[int, tuple[int, int], bool]:
    phase, degrees, crosses_nodes = key
    return list(Phase).index(phase), degrees, crosses_nodes
