"""Whatever the policies, a request that was accepted ends, in pools that barely hold the largest one."""

from collections.abc import Callable

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_driver import CoreDriver
from drawn_examples import FACTOR
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.memory.preemption import PREEMPTIONS
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.policies.token_budget import TOKEN_BUDGETS
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

MAX_MODEL_LEN = 24
NUM_REQUESTS = 16
MOST_BEATS = 4000

Lengths = Callable[[np.random.Generator], tuple[int, int]]

WORKLOADS: dict[str, Lengths] = {
    "mixed": lambda rng: (int(rng.integers(1, MAX_MODEL_LEN)), int(rng.integers(1, MAX_MODEL_LEN))),
    "long prompts": lambda rng: (MAX_MODEL_LEN - 1 - int(rng.integers(0, 3)), 2),
    "long outputs": lambda rng: (1 + int(rng.integers(0, 3)), MAX_MODEL_LEN),
    "each as large as the pool": lambda rng: (int(rng.integers(1, MAX_MODEL_LEN)), MAX_MODEL_LEN),
}


@settings(max_examples=100 * FACTOR, suppress_health_check=[HealthCheck.too_slow])
@given(
    limits=st.builds(
        SchedulerLimits,
        batching=st.sampled_from(sorted(BATCHING_POLICIES)),
        reserve=st.sampled_from(sorted(RESERVATIONS)),
        order=st.sampled_from(sorted(ORDERS)),
        budget=st.sampled_from(sorted(TOKEN_BUDGETS)),
        preemption=st.sampled_from(sorted(PREEMPTIONS)),
        aging_s=st.sampled_from([0.1, 30.0]),
        default_itl_slo_ms=st.sampled_from([0, 1, 50]),
        protect_itl=st.booleans(),
        max_decode_only_steps=st.sampled_from([0, 1, 4]),
        prefix_aware=st.booleans(),
        max_num_batched_tokens=st.integers(1, 40),
        max_num_seqs=st.integers(1, 8),
        max_steps_in_flight=st.integers(0, 4),
        enable_prefix_caching=st.booleans(),
    ),
    block_size=st.sampled_from([1, 2, 4]),
    spare_blocks=st.integers(0, 8),
    workload=st.sampled_from(sorted(WORKLOADS)),
    num_host_blocks=st.sampled_from([0, 2, 64]),
    all_top_priority=st.booleans(),
    cancel_share=st.sampled_from([0.0, 0.02]),
    num_lanes=st.sampled_from([1, 1, 2, 3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_request_ends(
    limits: SchedulerLimits,
    block_size: int,
    spare_blocks: int,
    workload: str,
    num_host_blocks: int,
    all_top_priority: bool,
    cancel_share: float,
    num_lanes: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    capacity = ExecutorCapacity(
        num_blocks=-(-(MAX_MODEL_LEN - 1) // block_size) + spare_blocks,
        block_size=block_size,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=8,
        max_num_rows=12,
        num_host_blocks=num_host_blocks,
        swap_us_per_block=1.0,
        num_lanes=num_lanes,
    )
    run = CoreDriver(limits, capacity)
    cancelled: set[int] = set()
    wanted: dict[int, int] = {}
    # Many times what the slowest combination takes, so that whoever is not done by then never will be.
    for beat in range(MOST_BEATS):
        if beat % 3 == 0 and len(wanted) < NUM_REQUESTS:
            num_prompt_tokens, max_tokens = WORKLOADS[workload](rng)
            priority = 1 if all_top_priority else int(rng.integers(1, 5))
            run.add(
                len(wanted),
                num_prompt_tokens,
                max_tokens,
                priority=priority,
                tenant=str(rng.integers(0, 3)),
                ttft_slo_ms=int(rng.choice([0, 50, 5000])),
            )
            wanted[len(wanted)] = min(max_tokens, MAX_MODEL_LEN - num_prompt_tokens)
        if rng.random() < cancel_share:
            victim = int(rng.integers(0, len(wanted)))
            cancelled.add(victim)
            run.abort(victim)
        run.now += 0.01 * float(rng.random())
        while run.schedule() is not None:
            pass
        if run.num_in_flight:
            run.now += 0.01 * float(rng.random())
            run.update(move_time_us=int(rng.integers(0, 3)))
        elif len(wanted) == NUM_REQUESTS:
            break
    assert run.core.num_unfinished == 0
    assert run.core.pool.num_free == capacity.num_blocks
    for handle in wanted.keys() - cancelled:
        assert run.num_output_tokens[handle] == wanted[handle]
    has_class_preemption = limits.order == "priority" or any(request for request in wanted)
    if limits.reserve == "full" and not has_class_preemption:
        assert run.core.counters.num_preemptions == 0
