"""The settings with which Headway would run an executor of a phase and degrees."""

import msgspec

from headway_lab.plan.bounds import fullest_batch
from headway_lab.plan.cluster import Degrees
from headway_lab.plan.instance import Instance, Phase
from headway_lab.plan.options import PlanOptions
from headway_lab.plan.workload import Workload
from headway_lab.simulate.roofline import Roofline
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

_ANY_PROMPT = 1 << 24
"""The prompts that decode gets are computed, so no budget cuts them."""


def make_instance(
    phase: Phase, degrees: Degrees, roofline: Roofline, options: PlanOptions, workload: Workload
) -> Instance:
    """Return an executor of at least one KV block.

    A pipeline has as many lanes as stages: chunks of prompts follow each other through it, and decodes are divided among
    the lanes, none of which gets more rows than memory and the objective on gaps allow.
    """
    num_stages = degrees.pipeline_parallel
    limits = SchedulerLimits(
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=False,  # no two prompts of a plan are alike
    )
    if phase is Phase.BOTH:
        limits = msgspec.structs.replace(limits, budget="slo")
    elif phase is Phase.DECODE:
        limits = msgspec.structs.replace(limits, max_num_batched_tokens=_ANY_PROMPT)
    instance = Instance(
        phase=phase,
        degrees=degrees,
        roofline=roofline,
        limits=limits,
        capacity=ExecutorCapacity(
            num_blocks=roofline.num_blocks(options.block_size),
            block_size=options.block_size,
            max_model_len=roofline.shape.context_length,
            vocab_size=roofline.shape.vocab_size,
            max_num_rows=options.max_num_seqs,
            num_lanes=num_stages,
        ),
    )
    if phase is not Phase.DECODE or num_stages == 1:
        return instance
    most = max(num_stages * fullest_batch(instance, workload), 1)
    return msgspec.structs.replace(instance, limits=msgspec.structs.replace(limits, max_num_seqs=most))
