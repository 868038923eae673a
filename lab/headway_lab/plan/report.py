"""The text and JSON of a plan. The same flags give the same bytes of JSON."""

from collections import Counter
from typing import Any

import msgspec

from headway.terminal.tables import aligned
from headway_lab.plan.algorithms import Role, System
from headway_lab.plan.goodput import Outcome
from headway_lab.plan.instance import Phase
from headway_lab.plan.options import MEAN_GAP
from headway_lab.plan.search import SPLIT, Plan, why_no_split
from headway_lab.reports import rate_cell

JSON_SCHEMA = 1
_COLUMNS = ("executor for", "degrees", "devices", "goodput req/s", "per device", "alone ms", "")
_NOT_SEARCHED = {
    "ttft": "not searched, since one request alone gets its first token too late",
    "itl": "not searched, since one request alone has too long gaps",
    "": "not searched, since by their costs they need no fewer devices",
}
_GIB, _MIB = 1 << 30, 1 << 20


def title(plan: Plan) -> str:
    """Return what was asked, in one line."""
    options = plan.options
    gaps = "mean gaps" if options.gaps == MEAN_GAP else "gaps"
    context = plan.cluster.shape.context_length
    cut_share = plan.workload.cut_share
    cut = f", {100 * cut_share:.2g}% of them cut to the context of {context} tokens" if cut_share else ""
    return (
        f"{plan.cluster.shape.name} on {plan.cluster.accelerator.name}, {options.devices_per_node} a node, "
        f"{options.interconnect} interconnect; {options.rate:g} requests/s{cut}, {100 * options.attainment:g}% within "
        f"{options.ttft_slo_ms} ms to the first token and {gaps} of {options.itl_slo_ms} ms; seed {options.seed}"
    )


def text(plan: Plan) -> str:
    """Return the whole report."""
    lines = [title(plan), "", *_table(plan), ""]
    if plan.pairs:
        lines += [*_pairs(plan), ""]
    lines += [f"split      {_answer(plan, plan.split)}", f"together   {_answer(plan, plan.together)}"]
    lines += [f"hand-off   {_hand_off(plan)}", f"better     {_verdict(plan)}"]
    return "\n".join((*lines, ""))


def _table(plan: Plan) -> list[str]:
    chosen = {
        (role.phase, role.degrees)
        for system in (plan.split, plan.together)
        if system is not None
        for role in system.roles
    }
    searched = [outcome for outcome in plan.outcomes if outcome.trials]
    lines = aligned(
        [_COLUMNS, *(_row(outcome, is_chosen=(outcome.phase, outcome.degrees) in chosen) for outcome in searched)],
        left=(0, 1, 6),
    )
    rest = [outcome for outcome in plan.outcomes if not outcome.trials]
    for missed, words in _NOT_SEARCHED.items():
        counts = Counter(outcome.phase.value for outcome in rest if outcome.missed == missed)
        if counts:
            lines.append(f"{words}: " + ", ".join(f"{count} for {phase}" for phase, count in counts.items()))
    return lines


def _row(outcome: Outcome, *, is_chosen: bool) -> tuple[str, ...]:
    first_ms, gap_ms = outcome.alone_ms
    alone = {Phase.PREFILL: f"{first_ms:.1f}", Phase.DECODE: f"{gap_ms:.1f}"}
    return (
        outcome.phase.value,
        outcome.degrees.label + ", across nodes" * outcome.crosses_nodes + " *" * is_chosen,
        str(outcome.degrees.num_devices),
        rate_cell(outcome.goodput),
        rate_cell(outcome.per_device) if outcome.goodput else "-",
        alone.get(outcome.phase, f"{first_ms:.1f}/{gap_ms:.1f}"),
        "misses them under load" if outcome.missed else "",
    )


def _pairs(plan: Plan) -> list[str]:
    rows: list[tuple[str, ...]] = [("prefill", "with decode", "nodes", "devices", "goodput req/s", "per device")]
    searched = [pair for pair in plan.pairs if pair.goodput]
    rows += [
        (
            pair.prefill.label,
            pair.decode.label,
            str(pair.num_nodes),
            str(pair.num_devices),
            rate_cell(pair.goodput),
            rate_cell((pair.goodput or 0.0) / pair.num_devices),
        )
        for pair in searched
    ]
    return aligned(rows, left=(0, 1)) if searched else ["no pair of executors on the same nodes keeps the objectives"]


def _answer(plan: Plan, system: System | None) -> str:
    if system is None:
        return why_no_split(plan) if plan.split is None else "no executor that does both keeps the objectives"
    check = system.check
    roles = " + ".join(map(_role, system.roles))
    carried = f"{check.rate:g} requests/s" if check.rate >= plan.options.rate else f"only {check.rate:.2f} requests/s"
    return (
        f"{roles}: {_devices(system.num_devices)}, {system.per_device:.2f} requests/s per device at most; "
        f"at {carried} {100 * check.share:.1f}% keep both objectives"
    )


def _role(role: Role) -> str:
    does = "" if role.phase is Phase.BOTH else f" for {role.phase.value}"
    return f"{role.num_executors} executor{'s' * (role.num_executors > 1)}{does} {role.degrees.label}"


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def _hand_off(plan: Plan) -> str:
    cost = plan.hand_off
    size = f"{cost.num_bytes / _GIB:.2f} GiB" if cost.num_bytes >= _GIB else f"{cost.num_bytes / _MIB:.0f} MiB"
    line = (
        f"{size} for a prompt of {round(plan.workload.mean_prompt_tokens)} tokens, the mean: {cost.seconds * 1e3:.1f} ms at "
        f"{plan.transfer_bandwidth / 1e9:g} GB/s"
    )
    if plan.split is None or not plan.split.check.decode_step_ms:
        return line
    return f"{line}, {cost.seconds * 1e3 / plan.split.check.decode_step_ms:.1f} of a decode step's {plan.split.check.decode_step_ms:.1f} ms"


def _verdict(plan: Plan) -> str:
    split, together = plan.split, plan.together
    if split is None or together is None:
        return f"{plan.better}, since nothing else keeps the objectives{_shortage(plan)}"
    best, other = (split, together) if plan.better == SPLIT else (together, split)
    is_equal = best.num_devices == other.num_devices
    words = f"{plan.better}: {_devices(best.num_devices)} {'each' if is_equal else f'instead of {other.num_devices}'}, "
    words += f"{best.per_device:.2f} requests/s per device at most instead of {other.per_device:.2f}"
    return words + _shortage(plan)


def _shortage(plan: Plan) -> str:
    if plan.is_enough:
        return ""
    return f"; --devices {plan.options.devices} is not enough for this rate and these objectives"


def as_json(plan: Plan) -> bytes:
    """Return the whole plan."""
    options: dict[str, Any] = msgspec.structs.asdict(plan.options)
    document = {
        "schema": JSON_SCHEMA,
        "options": {name: value for name, value in options.items() if name not in {"json", "deployment", "png"}},
        "accelerator": plan.cluster.accelerator,
        "model": plan.cluster.shape,
        "executors": [_outcome_json(outcome) for outcome in plan.outcomes],
        "pairs": [
            {
                **msgspec.structs.asdict(pair),
                "prefill": pair.prefill._asdict(),
                "decode": pair.decode._asdict(),
                "num_devices": pair.num_devices,
            }
            for pair in plan.pairs
        ],
        "algorithm": plan.algorithm,
        "split": _system_json(plan.split),
        "together": _system_json(plan.together),
        "better": plan.better,
        "is_enough": plan.is_enough,
        "hand_off": {
            "prompt_tokens": round(plan.workload.mean_prompt_tokens),
            "bytes": plan.hand_off.num_bytes,
            "seconds": plan.hand_off.seconds,
            "bytes_per_s": plan.transfer_bandwidth,
        },
    }
    return msgspec.json.encode(document) + b"\n"


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {**msgspec.structs.asdict(outcome), "degrees": outcome.degrees._asdict()}


def _system_json(system: System | None) -> dict[str, Any] | None:
    if system is None:
        return None
    roles = [{**msgspec.structs.asdict(role), "degrees": role.degrees._asdict()} for role in system.roles]
    return {**msgspec.structs.asdict(system), "roles": roles, "num_devices": system.num_devices}
