"""What the scheduler decides under each policy, one decision a test, told by who runs when."""

import pytest

from core_driver import CoreDriver
from headway_proto.columns import decode_columns
from headway_scheduler.core.admission.admission import MAX_PASSED_OVER
from headway_scheduler.core.admission.making_way import MAX_WAYS_MADE
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import RequestStatus

REALTIME, HIGH, NORMAL, LOW = 1, 2, 3, 4
BLOCK_SIZE = 4


def start(
    num_blocks: int = 100,
    *,
    num_host_blocks: int = 0,
    max_num_batched_tokens: int = 64,
    max_steps_in_flight: int = 1,
    enable_prefix_caching: bool = False,
    **limits: object,
) -> CoreDriver:
    """A core without work; blocks of four tokens."""
    return CoreDriver(
        SchedulerLimits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=max_steps_in_flight,
            enable_prefix_caching=enable_prefix_caching,
            **limits,  # type: ignore[arg-type]
        ),
        ExecutorCapacity(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=num_blocks * BLOCK_SIZE,
            vocab_size=64,
            max_num_rows=64,
            num_host_blocks=num_host_blocks,
            swap_us_per_block=1.0,
        ),
    )


def moves_of(column: bytes) -> list[tuple[int, int]]:
    """Pairs of blocks that a step moves."""
    if not column:
        return []
    sources, destinations = decode_columns(column, 2)
    return list(zip(sources.tolist(), destinations.tolist(), strict=True))


def starts(run: CoreDriver, most_steps: int = 1000) -> list[int]:
    """The requests in the order in which they start, until all have ended."""
    order: list[int] = []
    for _ in range(most_steps):
        if not run.core.num_unfinished:
            return order
        step = run.schedule() or {}
        order += [handle for handle in step if handle not in order]
        run.update()
    raise AssertionError("no end")


class TestClasses:
    def test_realtime_takes_the_row_of_a_low_request(self) -> None:
        run = start(order="priority", max_num_seqs=3)
        for handle, priority in enumerate((HIGH, LOW, LOW)):
            run.add(handle, 4, 20, priority=priority)
        run.next_steps(2)
        run.add(3, 4, 20, priority=REALTIME)
        run.next_steps(1)
        assert run.running == [0, 1, 3]
        assert run.request(2).status is RequestStatus.PREEMPTED

    def test_realtime_takes_the_blocks_of_low_requests_and_no_more_than_it_needs(self) -> None:
        run = start(12, order="priority", reserve="prompt")
        for handle in range(3):
            run.add(handle, 14, 8, priority=LOW)
        run.next_steps(1)
        assert run.core.pool.num_free == 0
        run.add(3, 7, 4, priority=REALTIME)
        run.next_steps(1)
        assert run.running == [0, 1, 3]

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_realtime_starts_at_once_whatever_is_in_flight(self, depth: int) -> None:
        run = start(12, order="priority", reserve="prompt", max_steps_in_flight=depth)
        for handle in range(3):
            run.add(handle, 13, 30, priority=LOW)
        for _ in range(6):
            while run.schedule() is not None:
                pass
            run.update()
        run.add(3, 7, 4, priority=REALTIME)
        for _ in range(depth + 1):
            run.schedule()
            run.update()
        assert 3 in run.running

    def test_nobody_is_preempted_if_that_would_not_be_enough_blocks(self) -> None:
        run = start(12, order="priority", reserve="prompt")
        run.add(0, 30, 8, priority=REALTIME)
        run.add(1, 8, 8, priority=LOW)
        run.next_steps(2)
        run.add(2, 30, 8, priority=REALTIME)
        run.next_steps(3)
        assert run.running == [0, 1]
        assert run.core.counters.num_preemptions == 0

    def test_nobody_is_preempted_for_its_own_class(self) -> None:
        run = start(order="priority", max_num_seqs=2)
        for handle in range(3):
            run.add(handle, 4, 20, priority=HIGH)
        run.next_steps(4)
        assert run.running == [0, 1]

    def test_a_request_that_has_made_way_often_enough_does_so_no_more(self) -> None:
        run = start(order="priority", max_num_seqs=1)
        run.add(0, 4, 60, priority=LOW)
        low = run.request(0)
        for handle in range(1, MAX_WAYS_MADE + 2):
            run.next_steps(1)
            assert run.running == [0]
            run.add(handle, 4, 1, priority=REALTIME)
            run.next_steps(1)
        assert low.num_ways_made == MAX_WAYS_MADE
        assert run.running == [0]
        assert run.core.num_waiting == 1

    def test_a_realtime_prompt_gets_the_budget_before_a_low_one_under_way(self) -> None:
        run = start(order="priority", max_num_batched_tokens=16)
        run.add(0, 100, 4, priority=LOW)
        run.next_steps(2)
        run.add(1, 24, 4, priority=REALTIME)
        assert run.next_steps(3) == [{1: 16}, {0: 8, 1: 8}, {0: 15, 1: 1}]

    def test_without_ranked_classes_a_prompt_under_way_goes_on(self) -> None:
        run = start(order="fcfs", max_num_batched_tokens=16)
        run.add(0, 40, 4, priority=LOW)
        run.next_steps(2)
        run.add(1, 24, 4, priority=REALTIME)
        assert run.next_steps(1) == [{0: 8, 1: 8}]

    def test_classes_start_in_order(self) -> None:
        run = start(order="priority", max_num_seqs=1)
        for handle, priority in enumerate((LOW, NORMAL, REALTIME, HIGH, REALTIME)):
            run.add(handle, 4, 2, priority=priority)
        assert starts(run) == [2, 4, 3, 1, 0]


class TestSwap:
    def preempted(self, *, num_host_blocks: int = 20, **limits: object) -> CoreDriver:
        """The second of two requests has just lost its blocks to the first."""
        run = start(8, preemption="swap", reserve="none", num_host_blocks=num_host_blocks, **limits)  # type: ignore[arg-type]
        run.add(0, 14, 12)
        run.add(1, 14, 12, begins_with=2)
        while not run.core.counters.num_preemptions:
            run.next_steps(1)
        assert run.running == [0]
        return run

    def test_a_swapped_request_goes_on_with_what_was_computed(self) -> None:
        run = self.preempted()
        num_computed = run.request(1).num_swapped_tokens
        assert run.sent is not None
        swapped_out = moves_of(run.sent.swap_out)
        assert num_computed == 16
        assert len(swapped_out) == num_computed // BLOCK_SIZE
        while 1 not in run.running:
            assert moves_of(run.sent.swap_in) == []
            run.next_steps(1)
        assert run.core.counters.num_preemptions == 1
        (row,) = run.sent.scheduled_new_reqs
        assert row.num_computed_tokens == num_computed
        blocks = run.core.rows.blocks_of(run.request(1).row).tolist()
        host_blocks = [host for _, host in swapped_out]
        assert moves_of(run.sent.swap_in) == list(zip(host_blocks, blocks[: len(host_blocks)], strict=True))
        run.all_steps()
        assert run.num_output_tokens == {0: 12, 1: 12}

    def test_a_swapped_request_goes_on_before_new_ones_start(self) -> None:
        run = self.preempted()
        run.add(2, 1, 2)
        order = starts(run)
        assert order.index(1) < order.index(2)

    def test_what_the_prefix_cache_still_has_is_not_swapped_in(self) -> None:
        run = self.preempted(enable_prefix_caching=True)
        run.abort(0)  # its blocks come free, and those of the other have not been reused
        run.next_steps(1)
        assert run.sent is not None
        (row,) = run.sent.scheduled_new_reqs
        assert row.num_computed_tokens == 16
        assert len(moves_of(run.sent.swap_in)) < 4

    def test_without_room_on_the_host_it_is_computed_again(self) -> None:
        run = self.preempted(num_host_blocks=3)
        assert run.core.counters.num_swapped_out_blocks == 0
        while 1 not in run.running:
            run.next_steps(1)
        assert run.sent is not None
        assert run.sent.scheduled_new_reqs[0].num_computed_tokens == 0

    def test_aborting_a_swapped_request_gives_its_host_blocks_back(self) -> None:
        run = self.preempted()
        assert run.core.swapping.num_free_host_blocks == 16
        run.abort(1)
        run.next_steps(1)
        assert run.core.swapping.num_free_host_blocks == 20
        run.all_steps()
        assert run.num_output_tokens[0] == 12

    def test_a_new_epoch_forgets_the_host_and_computes_again(self) -> None:
        run = self.preempted()
        run.begin_epoch(run.core.capacity)
        assert run.core.swapping.num_free_host_blocks == 20
        assert run.request(1).num_swapped_tokens == 0
        steps = run.all_steps()
        assert run.num_output_tokens == {0: 12, 1: 12}
        assert sum(step.get(1, 0) for step in steps) >= 17  # all of it, not only what was new

    def test_auto_swaps_only_when_both_costs_are_known_and_swapping_is_cheaper(self) -> None:
        run = start(8, preemption="auto", reserve="none", num_host_blocks=20)
        run.add(0, 14, 12)
        run.add(1, 14, 12, begins_with=2)
        run.all_steps()  # no time passes between steps, so none is learned from
        assert run.core.counters.num_preemptions > 0
        assert run.core.counters.num_swapped_out_blocks == 0


class TestComingBack:
    def test_headroom_doubles_with_each_preemption_up_to_an_eighth_of_the_pool(self) -> None:
        run = start(400)
        for handle in range(4):
            run.add(handle, 4, 20)
        run.next_steps(1)
        request = run.request(0)
        headrooms = []
        for request.num_preemptions in range(7):
            headrooms.append(run.core.admission.headroom(request))
        assert headrooms == [0, 4, 8, 16, 32, 50, 50]

    def test_beside_nobody_none_is_asked_for(self) -> None:
        run = start(400)
        run.add(0, 4, 20)
        request = run.request(0)
        request.num_preemptions = 9
        assert run.core.admission.headroom(request) == 0

    def test_a_preempted_request_waits_for_its_headroom_and_others_behind_it(self) -> None:
        run = start(16, reserve="none", preemption="recompute")
        run.add(0, 20, 20)
        run.add(1, 20, 20)
        run.add(2, 20, 20)
        while not run.core.counters.num_preemptions:
            run.next_steps(1)
        assert run.running == [0, 1]
        run.add(3, 1, 1)
        was_there_room_without = False
        while 2 not in run.running:
            num_free, headroom = run.core.pool.num_free, run.core.admission.headroom(run.request(2))
            num_needed = -(-len(run.request(2).token_ids) // BLOCK_SIZE)
            was_there_room_without |= num_needed <= num_free < num_needed + headroom
            assert 3 not in run.running
            run.next_steps(1)
        assert num_free >= num_needed + headroom
        assert was_there_room_without

    @pytest.mark.parametrize(("preemption", "max_num_batched_tokens"), [("recompute", 64), ("swap", 16)])
    def test_operators_are_told_of_the_headroom(self, preemption: str, max_num_batched_tokens: int) -> None:
        """Whenever the first in the queue does not start although there are rows, it is for the blocks they are told."""
        run = start(
            16, reserve="none", preemption=preemption, num_host_blocks=16, max_num_batched_tokens=max_num_batched_tokens
        )
        for handle in range(4):
            run.add(handle, 20, 20)
        num_told = 0
        while run.core.num_unfinished:
            waiting = run.core._state.waiting.queue.first(run.now)
            if waiting is not None and waiting.num_preemptions:
                num_needed, num_free = run.core.admission.blocks_for_start(waiting)
                run.next_steps(1)
                if waiting.status is RequestStatus.PREEMPTED:
                    assert num_needed > num_free
                    num_told += 1
            else:
                run.next_steps(1)
        assert num_told > 5


class TestFirstTokenObjectives:
    def waiting(self, **limits: object) -> CoreDriver:
        """One row, taken until its request is aborted; three wait, the second with an objective of a second."""
        run = start(max_num_seqs=1, **limits)  # type: ignore[arg-type]
        run.add(0, 4, 200)
        run.next_steps(1)
        for handle in (1, 2, 3):
            run.add(handle, 4, 2, ttft_slo_ms=1000 if handle == 2 else 0)
        return run

    @pytest.mark.parametrize("order", ["fcfs", "priority", "shortest"])
    @pytest.mark.parametrize(("now", "expected"), [(0.4, [1, 2, 3]), (0.6, [2, 1, 3]), (1.1, [1, 3, 2])])
    def test_at_risk_goes_first_and_too_late_goes_last(self, order: str, now: float, expected: list[int]) -> None:
        run = self.waiting(order=order)
        run.now = now
        run.next_steps(1)
        run.abort(0)
        assert starts(run) == expected

    def test_deadline_puts_the_least_slack_first(self) -> None:
        run = start(order="deadline", max_num_seqs=1)
        for handle, ttft_slo_ms in enumerate((0, 9000, 3000, 0, 5000)):
            run.add(handle, 4, 2, ttft_slo_ms=ttft_slo_ms)
        assert starts(run) == [2, 4, 1, 0, 3]

    @pytest.mark.parametrize("order", sorted(ORDERS))
    def test_too_late_is_shed_if_that_is_wanted(self, order: str) -> None:
        run = self.waiting(order=order, shed_late=True)
        run.now = 1.1
        run.next_steps(1)
        assert run.finished == [2]
        assert run.core.find(run.request(1).new.origin) is not None
        run.abort(0)
        assert starts(run) == [1, 3]
        assert run.core.take_shed() == ()

    def test_where_nothing_runs_one_that_is_too_late_is_tried(self) -> None:
        run = start(shed_late=True)
        for handle in range(3):
            run.add(handle, 4, 2, ttft_slo_ms=1000)
        run.now = 1.1
        run.all_steps()
        assert run.num_output_tokens == {0: 2, 1: 0, 2: 0}, "only a step can put right what was predicted of all"
        assert run.finished == [1, 2, 0]

    def test_what_has_started_is_never_shed(self) -> None:
        run = start(shed_late=True, max_num_batched_tokens=8)
        run.add(0, 40, 4, ttft_slo_ms=100)
        run.next_steps(1)
        run.now = 5.0
        run.all_steps()
        assert run.num_output_tokens == {0: 4}

    def test_requests_without_an_objective_get_the_default_one(self) -> None:
        run = start(max_num_seqs=1, shed_late=True, default_ttft_slo_ms=500)
        run.add(0, 4, 30)
        run.next_steps(1)
        run.add(1, 4, 2)
        run.add(2, 4, 2, ttft_slo_ms=5000)
        run.now = 0.6
        run.next_steps(1)
        assert run.finished == [1]

    @pytest.mark.parametrize("depth", [1, 2])
    def test_an_urgent_request_takes_the_row_of_a_lower_class_under_any_order(self, depth: int) -> None:
        run = start(max_num_seqs=2, max_steps_in_flight=depth)
        run.add(0, 4, 60)
        run.add(1, 4, 60, priority=LOW)
        run.next_steps(2)
        run.add(2, 4, 2, ttft_slo_ms=1000)
        run.now = 0.6
        run.next_steps(1)
        assert 2 in run.running or 2 in run.finished
        assert 1 not in run.running

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_an_urgent_request_takes_the_blocks_of_a_lower_class_under_any_order(self, depth: int) -> None:
        run = start(16, reserve="prompt", max_steps_in_flight=depth)
        run.add(0, 20, 30)
        run.add(1, 28, 30, priority=LOW)
        for _ in range(3):
            while run.schedule() is not None:
                pass
            run.update()
        run.add(2, 16, 2, ttft_slo_ms=1000)
        run.now = 0.6
        for _ in range(2 * depth + 1):
            while run.schedule() is not None:
                pass
            run.update()
        assert run.num_output_tokens[2] > 0
        assert run.core.counters.num_preemptions == 1


class TestInterTokenObjectives:
    def chunks(self, budget: str, itl_slo_ms: int) -> list[int]:
        """The chunks of a prompt of 6000 tokens beside a decode, on a device that takes 20 us for each token of a step."""
        run = start(4000, budget=budget, max_num_batched_tokens=2048)
        for handle in range(2, 12):
            run.add(handle, 100 * handle, 3)
            self.run_steps(run, 4)
        run.add(0, 4, 4000, itl_slo_ms=itl_slo_ms)
        self.run_steps(run, 30)
        run.add(1, 6000, 2)
        return [step[1] for step in self.run_steps(run, 60) if step.get(1, 0) > 1]

    def run_steps(self, run: CoreDriver, count: int) -> list[dict[int, int]]:
        steps = []
        for _ in range(count):
            step = run.schedule()
            assert step is not None
            steps.append(step)
            run.now += 0.001 + 20e-6 * sum(step.values())
            run.update()
            if not run.core.num_unfinished:
                break
        return steps

    def test_the_tightest_objective_bounds_the_chunks_of_prompts(self) -> None:
        chunks = self.chunks("slo", 10)
        assert sum(chunks) > 3000
        assert all(1e3 * (0.001 + 20e-6 * (chunk + 1)) <= 10 for chunk in chunks)
        assert max(chunks) >= 256

    @pytest.mark.parametrize(("budget", "itl_slo_ms"), [("fixed", 10), ("slo", 0)])
    def test_otherwise_the_fixed_budget_does(self, budget: str, itl_slo_ms: int) -> None:
        assert self.chunks(budget, itl_slo_ms) == [2047, 2047, 1906]


class TestPrefixAware:
    def test_the_longest_cached_prefix_starts_first(self) -> None:
        for is_aware in (False, True):
            run = start(max_num_seqs=1, enable_prefix_caching=True, prefix_aware=is_aware)
            run.add(0, 16, 4, begins_with=9)
            run.all_steps()
            run.add(1, 16, 2, begins_with=2)
            run.add(2, 16, 2, begins_with=3)
            run.add(3, 16, 2, begins_with=9)
            assert starts(run) == ([3, 1, 2] if is_aware else [1, 2, 3])

    def test_nobody_is_passed_over_more_than_so_often(self) -> None:
        run = start(max_num_seqs=1, enable_prefix_caching=True, prefix_aware=True)
        run.add(0, 16, 4, begins_with=9)
        run.all_steps()
        run.add(1, 16, 2, begins_with=2)
        for handle in range(2, 60):
            run.add(handle, 16, 2, begins_with=9)
        order = starts(run)
        assert order[:MAX_PASSED_OVER] == list(range(2, 2 + MAX_PASSED_OVER))
        assert order[MAX_PASSED_OVER] == 1

    def test_classes_come_before_cached_prefixes(self) -> None:
        run = start(max_num_seqs=1, enable_prefix_caching=True, prefix_aware=True, order="priority")
        run.add(0, 16, 4, begins_with=9)
        run.all_steps()
        run.add(1, 16, 2, begins_with=9, priority=LOW)
        run.add(2, 16, 2, begins_with=3)
        assert starts(run) == [2, 1]


class TestPredictedOutputs:
    def most_at_once(self, run: CoreDriver, first: int) -> tuple[int, int]:
        """Of sixteen requests that fill a block and will fill nine more: how many run at once, and are preempted."""
        before = run.core.counters.num_preemptions
        for handle in range(first, first + 16):
            run.add(handle, 4, 37)
        most = 0
        while run.core.num_unfinished:
            run.next_steps(1)
            most = max(most, len(run.running))
        return most, run.core.counters.num_preemptions - before

    def test_outputs_that_have_ended_teach_how_many_fit(self) -> None:
        run = start(60, reserve="predicted", preemption="recompute", max_num_seqs=16)
        before, num_preempted_before = self.most_at_once(run, 0)
        for first in range(16, 80, 16):
            self.most_at_once(run, first)
        after, num_preempted_after = self.most_at_once(run, 80)
        assert before == 16
        assert num_preempted_before > 0
        assert 6 <= after < before
        assert num_preempted_after < num_preempted_before

    def test_without_prediction_nothing_is_learned(self) -> None:
        run = start(60, reserve="prompt", preemption="recompute", max_num_seqs=16)
        outcomes = [self.most_at_once(run, first) for first in range(0, 96, 16)]
        assert len(set(outcomes)) == 1

    def test_shortest_starts_what_is_likely_to_end_first(self) -> None:
        """By tenant, whose outputs have been short or long; of equal prompts and limits."""
        run = start(order="shortest", max_num_seqs=1)
        for handle in range(60):
            run.add(handle, 8, 80, tenant="long" if handle % 2 else "short")
        while run.core.num_unfinished:
            step = run.schedule() or {}
            run.update([handle for handle in step if handle % 2 == 0 and run.num_output_tokens[handle] >= 3])
        run.add(100, 8, 80, tenant="long")
        run.add(101, 8, 80, tenant="short")
        run.add(102, 8, 80, tenant="long")
        assert starts(run)[0] == 101
