"""A plan as a file that ``headway serve`` and ``headway cluster up`` run. Must not know: searching, launching."""

from headway_lab.plan.algorithms import Role
from headway_lab.plan.options import PlanOptions
from headway_lab.plan.report import title
from headway_lab.plan.search import SPLIT, Plan


def as_deployment(plan: Plan) -> str:
    """Return the better system as TOML, with comments that say what the search cannot know."""
    system = plan.split if plan.better == SPLIT else plan.together
    assert system is not None
    check = system.check
    lines = [
        f"# {title(plan)}",
        f"# {system.num_devices} device{'s' * (system.num_devices > 1)}; at {check.rate:g} requests/s {100 * check.share:.1f}% keep both objectives.",
        "# Run it with headway serve --config, or headway cluster up --config: docs/cluster.md.",
        "",
        "[serve]",
        f'# model = "/models/mine"    # the checkpoint of {plan.cluster.shape.name}; without it, the demo model is served',
        "",
        *_scheduler(plan.options),
        "",
        *_executor(plan.options),
    ]
    for role in system.roles:
        lines += ["", *_table(role)]
    return "\n".join((*lines, ""))


def _scheduler(options: PlanOptions) -> list[str]:
    return [
        "[scheduler]",
        f"default_ttft_slo_ms = {options.ttft_slo_ms}",
        f"default_itl_slo_ms = {options.itl_slo_ms}",
        f"max_num_batched_tokens = {options.max_num_batched_tokens}",
        f"max_num_seqs = {options.max_num_seqs}",
        'budget = "slo"           # as many prompt tokens beside decodes as the objective of gaps leaves room for',
    ]


def _executor(options: PlanOptions) -> list[str]:
    of_its_own = "# what --hardware-file describes" if options.hardware_file else f"# {options.hardware}"
    return [
        "[executor]",
        f'# device = "cuda"         {of_its_own}; for NVIDIA devices also backend = "triton"',
        f"max_num_batched_tokens = {options.max_num_batched_tokens}",
        f"max_num_seqs = {options.max_num_seqs}",
        f"block_size = {options.block_size}",
    ]


def _table(role: Role) -> list[str]:
    lines = [
        "[[executors]]",
        f'role = "{role.phase.value}"',
        f"count = {role.num_executors}                # each carries {role.goodput:.2f} requests/s",
        f"# max = {2 * role.num_executors}                # in a cluster: may grow with the load",
    ]
    degrees = role.degrees
    if degrees.tensor_parallel > 1:
        lines.append(f"tensor_parallel = {degrees.tensor_parallel}")
    if degrees.pipeline_parallel > 1:
        lines.append(f"pipeline_parallel = {degrees.pipeline_parallel}")
    return lines
