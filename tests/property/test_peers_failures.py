"""What has hung or starved other schedulers, one story each: here everybody ends.

Each story runs against the executor's own mirror of the rows, so that a step that could not be executed fails at once.
"""

import numpy as np
import pytest

from core_driver import CoreDriver
from headway_scheduler.core.admission.making_way import MAX_WAYS_MADE
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.memory.preemption import PREEMPTIONS
from headway_scheduler.core.memory.swapping import NO_MOVES
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import RequestStatus

REALTIME, HIGH, NORMAL, LOW = 1, 2, 3, 4
BLOCK_SIZE = 4


def capacity_of(num_blocks: int, *, max_model_len: int = 0, num_host_blocks: int = 0) -> ExecutorCapacity:
    return ExecutorCapacity(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len or num_blocks * BLOCK_SIZE + 1,
        vocab_size=64,
        max_num_rows=32,
        num_host_blocks=num_host_blocks,
        swap_us_per_block=1.0,
    )


def beat(run: CoreDriver) -> None:
    """Fill the pipe with steps, then answer the oldest."""
    run.now += 0.01
    while run.schedule() is not None:
        pass
    if run.num_in_flight:
        run.update()


def run_to_the_end(run: CoreDriver, most_beats: int) -> None:
    for _ in range(most_beats):
        if not run.core.num_unfinished:
            break
        beat(run)
    assert run.core.num_unfinished == 0
    while run.num_in_flight:
        run.update()
    assert run.schedule() is None
    assert run.core.pool.num_free == run.core.pool.num_blocks
    assert run.core.swapping.num_free_host_blocks == run.core.swapping.num_host_blocks


@pytest.mark.parametrize("preemption", sorted(PREEMPTIONS))
@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("batching", sorted(BATCHING_POLICIES))
def test_requests_as_large_as_the_pool(batching: str, order: str, preemption: str) -> None:
    for reserve in sorted(RESERVATIONS):
        limits = SchedulerLimits(
            batching=batching,
            order=order,
            preemption=preemption,
            reserve=reserve,
            max_num_batched_tokens=7,
            max_num_seqs=4,
        )
        run = CoreDriver(limits, capacity_of(6, num_host_blocks=6))
        for handle in range(6):
            num_prompt_tokens = (1, 24, 12)[handle % 3]
            run.add(handle, num_prompt_tokens, 100, priority=1 + handle % 4, begins_with=2 + handle)
        run_to_the_end(run, 2000)
        assert sorted(run.finished) == list(range(6))
        assert all(run.num_output_tokens[handle] == 25 - (1, 24, 12)[handle % 3] for handle in range(6))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_pool_full_of_half_prefilled_prompts(preemption: str) -> None:
    """Each class starts before the prompts under way of the one below; together they want far more than there is."""
    limits = SchedulerLimits(
        order="priority", reserve="none", preemption=preemption, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    run = CoreDriver(limits, capacity_of(16, num_host_blocks=16))
    for handle, priority in enumerate((LOW, NORMAL, HIGH, REALTIME)):
        run.add(handle, 50, 5, priority=priority)
        run.next_steps(2)
    assert len(run.core._epoch.prefilling) == 4
    assert run.core.pool.num_free == 0
    run.add(4, 50, 5, priority=LOW)
    run_to_the_end(run, 300)
    assert run.finished == [3, 2, 1, 0, 4]


def test_everybody_at_top_priority_is_as_if_there_were_no_classes() -> None:
    stories = []
    for order, priority in (("priority", REALTIME), ("fcfs", NORMAL)):
        rng = np.random.default_rng(4)
        limits = SchedulerLimits(
            order=order, reserve="none", max_num_batched_tokens=24, max_num_seqs=6, aging_s=float("inf")
        )
        run = CoreDriver(limits, capacity_of(20, num_host_blocks=20))
        for handle in range(30):
            run.add(handle, int(rng.integers(1, 40)), int(rng.integers(1, 30)), priority=priority)
        stories.append((run.all_steps(), run.core.counters.num_preemptions))
    assert stories[0] == stories[1]
    assert stories[0][1] > 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("reason", ["blocks", "class"])
def test_cancels_while_preempted(reason: str, depth: int, preemption: str) -> None:
    """Cancelled in every beat after the one that preempted it, the first of them with its blocks still to be copied."""
    for delay in range(4):
        limits = SchedulerLimits(
            order="priority",
            reserve="none",
            preemption=preemption,
            max_num_seqs=4 if reason == "blocks" else 2,
            max_steps_in_flight=depth,
            enable_prefix_caching=False,
        )
        run = CoreDriver(limits, capacity_of(12, num_host_blocks=12))
        run.add(0, 18, 24)
        run.add(1, 18, 24, priority=LOW)
        if reason == "class":
            beat(run)
            run.add(2, 4, 4, priority=REALTIME)
        while not run.core.counters.num_preemptions:
            run.schedule()
            if not run.core.counters.num_preemptions and run.num_in_flight == depth:
                run.update()
        assert run.request(1).status is RequestStatus.PREEMPTED
        for _ in range(delay):
            beat(run)
        num_others = run.core.num_unfinished - 1
        run.abort(1)
        assert run.core.num_unfinished == num_others
        run_to_the_end(run, 200)
        assert run.num_output_tokens[0] == 24


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_preemption_after_which_there_is_nothing_to_run(is_cancelled: bool) -> None:
    """The first waits for its last token, the second finds no block and makes way: no step is sent with its copy."""
    limits = SchedulerLimits(preemption="swap", reserve="none", max_steps_in_flight=2, enable_prefix_caching=False)
    run = CoreDriver(limits, capacity_of(4, num_host_blocks=4))
    run.add(0, 8, 1)
    run.add(1, 8, 8, begins_with=2)
    assert run.schedule() == {0: 8, 1: 8}
    assert run.schedule() is None
    assert run.request(1).num_swapped_tokens == 8
    assert run.core.swapping.num_free_host_blocks == 2
    if is_cancelled:
        run.abort(1)
        assert run.schedule() is None
        assert run.core.swapping.num_free_host_blocks == 4
        assert run.core.swapping.take_moves(1) == NO_MOVES
    assert run.update() == [0]
    if not is_cancelled:
        assert run.schedule() == {1: 1}
        assert run.sent is not None
        assert run.sent.swap_out != b""
        assert run.sent.swap_in != b""
    run_to_the_end(run, 20)
    assert run.num_output_tokens[1] == (0 if is_cancelled else 8)


def test_preempted_requests_do_not_bounce() -> None:
    """Between a comeback and the next preemption at least the headroom of the comeback is filled with new tokens.

    A preempted request comes back only if ``_headroom`` blocks stay free, and nobody is preempted before the pool is
    empty. So what was free after the last comeback has been taken since, and not by a comeback: each block by tokens
    that were never computed before. All requests together have only so many blocks of tokens, V; so with g as the least
    headroom of all comebacks nobody is preempted more than 1 + V / g times, however long the pressure lasts.
    """
    rng = np.random.default_rng(11)
    limits = SchedulerLimits(
        reserve="none",
        preemption="recompute",
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        max_steps_in_flight=1,
        enable_prefix_caching=False,
    )
    run = CoreDriver(limits, capacity_of(64, max_model_len=128))
    core = run.core
    num_requests = 120
    wanted = [(int(rng.integers(1, 30)), int(rng.integers(10, 90))) for _ in range(num_requests)]
    filled = [0] * num_requests
    most_preemptions = 0
    headrooms: list[int] = []
    filled_before_comeback, headroom, before = 0, 0, 0
    started: set[int] = set()
    for number in range(10_000):
        if number < num_requests:
            run.add(number, *wanted[number])
        num_running_before = set(run.running)
        num_preemptions, num_live = core.counters.num_preemptions, core.num_running
        waiting = {
            request.new.origin.handle: core.admission.headroom(request)
            for request in core._state.waiting.queue.in_order()
        }
        if run.schedule() is None:
            break
        for row in core.rows.live_rows().tolist():
            handle = core.rows.request_in(row).new.origin.handle
            filled[handle] = max(filled[handle], -(-int(core.rows.num_computed_tokens[row]) // BLOCK_SIZE))
        total = sum(filled)
        if core.counters.num_preemptions > num_preemptions and headrooms:
            assert total - filled_before_comeback >= headroom
        running = set(run.running)
        comebacks = [handle for handle in running - num_running_before if handle in started]
        if comebacks and num_live:
            # The headroom of the last of them, when it came; those before it made it no smaller.
            filled_before_comeback, headroom = before, min(waiting[handle] for handle in comebacks)
            headrooms.append(headroom)
        started |= running
        before = total
        most_preemptions = max(
            [most_preemptions, *(core.rows.request_in(row).num_preemptions for row in core.rows.live_rows().tolist())]
        )
        run.update()
    assert core.num_unfinished == 0
    assert core.counters.num_preemptions > 20
    least = min(headrooms)
    assert least >= 1
    num_blocks = sum(-(-(prompt + output) // BLOCK_SIZE) for prompt, output in wanted)
    assert most_preemptions <= 1 + num_blocks // least
    # What comes out is far below what can be proved, because headrooms double.
    assert most_preemptions <= 6


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_whoever_overtakes_is_not_made_to_give_its_blocks_to_each_of_those_it_has_overtaken(order: str) -> None:
    rng = np.random.default_rng(3)
    limits = SchedulerLimits(
        order=order,
        reserve="none",
        preemption="recompute",
        max_num_batched_tokens=256,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    run = CoreDriver(limits, capacity_of(512, max_model_len=512))
    most_preemptions: dict[int, int] = {}
    for number in range(5000):
        if number % 4 == 0 and len(run.num_output_tokens) < 200:
            for _ in range(100 if number == 0 else 1):
                handle = len(run.num_output_tokens)
                run.add(
                    handle,
                    int(rng.integers(5, 200)),
                    int(rng.integers(5, 150)),
                    priority=NORMAL,
                    tenant=str(handle % 3),
                    ttft_slo_ms=int(rng.choice([0, 10_000, 30_000])),
                )
        beat(run)
        for request in run.core._state.waiting.queue.in_order():
            most_preemptions[request.arrival] = request.num_preemptions
        if not run.core.num_unfinished:
            break
    assert run.core.num_unfinished == 0
    assert run.core.counters.num_preemptions > 30
    assert max(most_preemptions.values()) <= 5


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("reserve", sorted(RESERVATIONS))
def test_a_low_request_that_comes_among_realtime_ones_without_end(reserve: str, preemption: str, depth: int) -> None:
    """Twice as many REALTIME requests come as can be served, for ever; the LOW one grows old, starts and stays."""
    limits = SchedulerLimits(
        order="priority",
        reserve=reserve,
        preemption=preemption,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_steps_in_flight=depth,
        aging_s=0.5,
    )
    run = CoreDriver(limits, capacity_of(16, num_host_blocks=16))
    handle = 1
    for number in range(600):
        if number == 20:
            run.add(0, 20, 30, priority=LOW)
        for _ in range(2 if number % 3 == 0 else 0):
            run.add(handle, 9, 6, priority=REALTIME, begins_with=2 + handle % 60)
            handle += 1
        beat(run)
        if 0 in run.finished:
            break
    assert 0 in run.finished
    assert run.num_output_tokens[0] == 30
    assert run.core.num_waiting > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("reserve", sorted(RESERVATIONS))
def test_one_low_request_among_realtime_ones_without_end(reserve: str, preemption: str, depth: int) -> None:
    """Twice as many REALTIME requests come as can be served, for ever; the LOW one makes way, grows old, and finishes."""
    limits = SchedulerLimits(
        order="priority",
        reserve=reserve,
        preemption=preemption,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_steps_in_flight=depth,
        aging_s=0.5,
    )
    run = CoreDriver(limits, capacity_of(16, num_host_blocks=16))
    run.add(0, 20, 30, priority=LOW)
    low = run.request(0)
    handle = 1
    for number in range(600):
        for _ in range(2 if number % 3 == 0 and number else 0):
            run.add(handle, 9, 6, priority=REALTIME, begins_with=2 + handle % 60)
            handle += 1
        beat(run)
        if 0 in run.finished:
            break
    assert 0 in run.finished
    assert run.num_output_tokens[0] == 30
    assert 1 <= low.num_ways_made <= MAX_WAYS_MADE
    assert run.core.num_waiting > 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_low_request_makes_way_only_so_often(preemption: str, depth: int) -> None:
    """Whenever it has come back, another REALTIME request wants its row; at last it keeps it."""
    limits = SchedulerLimits(order="priority", preemption=preemption, max_num_seqs=1, max_steps_in_flight=depth)
    run = CoreDriver(limits, capacity_of(16, num_host_blocks=16))
    run.add(0, 20, 30, priority=LOW)
    low = run.request(0)
    handle = 1
    for _ in range(200):
        beat(run)
        if low.status is RequestStatus.RUNNING and run.core.num_waiting == 0:
            run.add(handle, 3, 2, priority=REALTIME, begins_with=2 + handle % 60)
            handle += 1
        if 0 in run.finished:
            break
    assert 0 in run.finished
    assert low.num_ways_made == low.num_preemptions == MAX_WAYS_MADE
    run_to_the_end(run, 50)


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_one_request_among_urgent_ones_without_end(order: str) -> None:
    """Everybody else has an objective that it is about to miss, comes from another tenant, and is shorter."""
    limits = SchedulerLimits(
        order=order, reserve="none", max_num_seqs=3, max_num_batched_tokens=16, aging_s=0.5, preemption="swap"
    )
    run = CoreDriver(limits, capacity_of(16, num_host_blocks=16))
    handle = 1
    for number in range(900):
        if number == 20:
            run.add(0, 20, 30, priority=LOW, tenant="patient")
        for _ in range(2 if number % 3 == 0 else 0):
            run.add(handle, 9, 6, priority=REALTIME, tenant="busy", ttft_slo_ms=5, begins_with=2 + handle % 60)
            handle += 1
        beat(run)
        if 0 in run.finished:
            break
    assert 0 in run.finished
    assert run.num_output_tokens[0] == 30
    assert run.core.num_waiting > 0


def test_a_prompt_under_way_is_not_starved_by_a_higher_class_that_fills_every_step() -> None:
    """Each step has room for one prompt, and a REALTIME one comes with each; the LOW one has started before them."""
    limits = SchedulerLimits(
        order="priority",
        aging_s=1.0,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        max_steps_in_flight=1,
        enable_prefix_caching=False,
    )
    run = CoreDriver(limits, capacity_of(64))
    run.add(0, 23, 1, priority=4)
    for number in range(1, 41):
        assert run.schedule() is not None
        run.now += 0.1
        run.update()
        run.add(number, 8, 1, priority=1)
    assert 0 in run.finished
    assert len(run.finished) >= 36
