"""Placement by itself: the order of its queue, and which cell a request goes to."""

from typing import Any

import numpy as np
import pytest

from headway_proto.ingress import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.memory.cached_prefixes import PrefixQuery
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import FinishedEvent
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import FinishReason, Request, RequestStatus
from headway_scheduler.core.view import GapView, SchedulerView
from headway_scheduler.placement.placement import Placed, Placement

CAPACITY = ExecutorCapacity(num_blocks=100, block_size=4, max_model_len=400, vocab_size=50, max_num_rows=8)


class Gaps(GapView):
    """Of a core that is played."""

    tightest_s: float | None = None
    are_kept = False
    step_us = 0.0
    least_step_us = 0.0
    us_per_row = 0.0
    newest: Request | None = None
    newest_has_left = 1_000

    def __init__(self) -> None:
        """Without a real core."""

    def decode_s(self, *, more_rows: int = 0, more_context: int = 0) -> float:
        del more_context
        return (self.step_us + more_rows * self.us_per_row) * 1e-6

    def step_of_one_s(self) -> float:
        return (self.least_step_us or self.step_us) * 1e-6

    def newest_decoding(self, least_tokens: int) -> Request | None:
        return self.newest if self.newest_has_left >= least_tokens else None


class Core(SchedulerView):
    """What ``CellLoad`` reads of a core, as plain numbers."""

    capacity = CAPACITY
    num_running = 0
    num_waiting = 0
    num_waiting_tokens = 0
    max_running = 8
    max_num_batched_tokens = 64
    num_free_blocks = 100
    num_prompt_tokens_left = 0
    step_time_error = 0.0
    cached = 0
    us_per_token: float | None = 10.0
    lowest_class = 0
    gaps = Gaps()

    def __init__(self, **figures: Any) -> None:
        self.gaps = Gaps()
        for name, value in figures.items():
            holder = self if hasattr(Core, name) else self.gaps
            assert hasattr(holder, name)
            setattr(holder, name, value)

    def num_cached_tokens(self, query: PrefixQuery) -> int:
        return min(self.cached, len(query.request.token_ids) - 1)

    def prefill_s(self, num_tokens: int, num_computed_tokens: int) -> float | None:
        del num_computed_tokens
        return None if self.us_per_token is None else num_tokens * self.us_per_token * 1e-6

    def lowest_running_class(self) -> int:
        return self.lowest_class


def cells(*cores: Core, draining: int = -1) -> list[CellLoad]:
    return [CellLoad(number, core, accepts=number != draining) for number, core in enumerate(cores)]


def new_request(handle: int, num_tokens: int = 8, **fields: Any) -> NewRequestEvent:
    given = {"priority": PRIORITY_NORMAL, "max_tokens": 16, "sampling": SamplingParams()} | fields
    return NewRequestEvent(
        origin=Origin(1, handle),
        request_id=str(handle),
        token_ids=np.full(num_tokens, handle, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        stop_token_ids=frozenset(),
        **given,
    )


def placement_of(*requests: NewRequestEvent, **limits: Any) -> Placement:
    placement = Placement(SchedulerLimits(**limits))
    for number, new in enumerate(requests):
        placement.add(new, list, float(number))
    return placement


def chosen(placement: Placement, loads: list[CellLoad], now: float = 0.0) -> Placed:
    placed = placement.place_next(loads, now)
    assert placed is not None
    return placed


def test_a_request_goes_where_the_fewest_tokens_are_ahead_of_it() -> None:
    placed = chosen(
        placement_of(new_request(1)), cells(Core(num_prompt_tokens_left=50), Core(num_prompt_tokens_left=20))
    )
    assert (placed.cell, placed.num_tokens_ahead, placed.num_choices) == (1, 20, 2)


def test_a_cached_prefix_outweighs_tokens_ahead_as_far_as_it_saves_more() -> None:
    for num_ahead, expected in ((15, 1), (25, 0)):
        loads = cells(Core(), Core(cached=20, num_prompt_tokens_left=num_ahead))
        assert chosen(placement_of(new_request(1, 40)), loads).cell == expected


def test_the_speed_of_a_cell_counts() -> None:
    loads = cells(Core(us_per_token=30.0), Core(us_per_token=10.0, num_prompt_tokens_left=10))
    assert chosen(placement_of(new_request(1)), loads).cell == 1


def test_cells_are_level_as_far_as_their_models_can_tell() -> None:
    for us_per_token, expected in ((10.9, 1), (11.5, 0)):
        loads = cells(Core(num_running=3), Core(num_running=2, us_per_token=us_per_token))
        assert chosen(placement_of(new_request(1)), loads).cell == expected


def test_the_rows_that_decode_count_with_each_step_of_the_prompt() -> None:
    busy = Core(step_us=500.0)  # a prompt of 80 tokens takes 800 us by itself, and two steps
    for num_ahead, expected in ((50, 1), (150, 0)):
        loads = cells(busy, Core(num_prompt_tokens_left=num_ahead))
        assert chosen(placement_of(new_request(1, 80)), loads).cell == expected


def test_while_no_speed_is_known_tokens_decide() -> None:
    loads = cells(Core(us_per_token=None), Core(us_per_token=None, num_prompt_tokens_left=10))
    assert chosen(placement_of(new_request(1)), loads).cell == 0


def test_a_cell_of_unknown_speed_is_as_fast_as_another_so_one_that_joins_gets_work_beside_one_with_every_prompt() -> (
    None
):
    for step_us, expected in ((600.0, 0), (2_000.0, 1)):
        busy = Core(cached=32, num_running=1, step_us=step_us, least_step_us=500.0)
        loads = cells(busy, Core(us_per_token=None))
        assert chosen(placement_of(new_request(1, 40)), loads).cell == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"num_running": 3}, {"num_running": 2}, 1),
        ({"num_running": 2}, {"num_running": 2}, 0),
        ({"num_waiting": 1}, {}, 1),
        ({"num_running": 1, "num_waiting": 2}, {"num_running": 2}, 1),
    ],
)
def test_of_level_cells_the_one_with_the_fewest_requests_is_chosen(
    first: dict[str, int], second: dict[str, int], expected: int
) -> None:
    assert chosen(placement_of(new_request(1)), cells(Core(**first), Core(**second))).cell == expected


def test_prompts_that_cost_nothing_and_come_at_once_do_not_all_go_to_one_cell() -> None:
    free = {"us_per_token": 0.0, "cached": 32}
    loads = cells(Core(**free, num_waiting=3, num_prompt_tokens_left=24), Core(us_per_token=None))
    assert chosen(placement_of(new_request(1, 40)), loads).cell == 1


@pytest.mark.parametrize(("least_step_us", "expected"), [(0.0, 0), (10_000.0, 1)])
def test_what_prompts_cost_counts_as_a_share_of_the_steps_that_they_are_in(least_step_us: float, expected: int) -> None:
    cached = Core(us_per_token=0.1, cached=32, num_waiting=3, least_step_us=least_step_us)
    loads = cells(cached, Core(us_per_token=2.0, least_step_us=least_step_us))
    assert chosen(placement_of(new_request(1, 40)), loads).cell == expected


@pytest.mark.parametrize(
    "figures",
    [
        {"num_running": 8},
        {"num_running": 5, "num_waiting": 3},
        {"num_running": 1, "num_free_blocks": 2},
        {"num_running": 1, "num_waiting": 1, "num_waiting_tokens": 60},
        {"num_running": 1, "num_waiting": 1, "num_waiting_tokens": 8, "num_free_blocks": 5},
    ],
)
def test_a_cell_that_could_not_start_it_soon_gets_nothing(figures: dict[str, int]) -> None:
    placement = placement_of(new_request(1))
    assert placement.place_next(cells(Core(**figures)), 0.0) is None
    assert len(placement) == 1
    assert chosen(placement, cells(Core(**figures), Core(num_running=7))).cell == 1


def test_an_empty_cell_takes_any_request_that_it_can_hold() -> None:
    placed = chosen(placement_of(new_request(1, 300)), cells(Core(num_free_blocks=1)))
    assert placed.cell == 0


def test_a_draining_cell_gets_nothing() -> None:
    placement = placement_of(new_request(1))
    assert placement.place_next(cells(Core(), draining=0), 0.0) is None
    assert chosen(placement, cells(Core(), Core(num_running=5), draining=0)).cell == 1


def test_the_operators_order_holds_above_the_cells() -> None:
    low, high = new_request(1, priority=PRIORITY_LOW), new_request(2, priority=PRIORITY_HIGH)
    placement = placement_of(low, high, order="priority")
    assert [chosen(placement, cells(Core())).request.new.request_id for _ in range(2)] == ["2", "1"]


def test_the_shortest_is_first_by_what_outputs_were() -> None:
    placement = placement_of(new_request(1, 80), new_request(2, 40), order="shortest")
    assert [chosen(placement, cells(Core())).request.new.request_id for _ in range(2)] == ["2", "1"]


def test_tenants_take_turns_and_outputs_are_charged_at_their_end() -> None:
    placement = placement_of(
        *(new_request(number, tenant="a") for number in (1, 2, 3)), new_request(4, tenant="b"), order="fair"
    )
    placement.cell_opened(CAPACITY)
    order = [chosen(placement, cells(Core())).request.new for _ in range(2)]
    assert [new.tenant for new in order] == ["a", "b"]
    placement.count_end(ended(order[1], num_output_tokens=300))
    placement.add(new_request(5, tenant="b"), list, 9.0)
    assert chosen(placement, cells(Core())).request.new.tenant == "a"


def test_a_higher_class_goes_where_a_lower_one_can_make_way() -> None:
    placement = placement_of(new_request(1, priority=PRIORITY_HIGH), order="priority")
    full = {"num_running": 8}
    assert placement.place_next(cells(Core(**full, lowest_class=PRIORITY_HIGH)), 0.0) is None
    busy = Core(**full, lowest_class=PRIORITY_LOW, num_waiting=1)
    assert placement.place_next(cells(busy), 0.0) is None, "another waits for that already"
    assert chosen(placement, cells(Core(**full, lowest_class=PRIORITY_LOW))).cell == 0


def test_no_class_makes_way_where_the_order_ranks_none() -> None:
    placement = placement_of(new_request(1, priority=PRIORITY_HIGH))
    assert placement.place_next(cells(Core(num_running=8, lowest_class=PRIORITY_LOW)), 0.0) is None


def test_a_request_that_no_open_cell_can_hold_keeps_nobody_waiting() -> None:
    placement = placement_of(new_request(1, 90), new_request(2))
    small = Core()
    small.capacity = ExecutorCapacity(num_blocks=10, block_size=4, max_model_len=400, vocab_size=50, max_num_rows=8)
    assert chosen(placement, cells(small)).request.new.request_id == "2"
    assert placement.place_next(cells(small), 0.0) is None
    assert len(placement) == 1
    placement.cell_opened(CAPACITY)
    assert chosen(placement, cells(small, Core())).cell == 1


def test_what_ran_before_goes_first() -> None:
    placement = placement_of(*(new_request(number) for number in (1, 2, 3)))
    first = chosen(placement, cells(Core())).request
    second = chosen(placement, cells(Core())).request
    second.status = RequestStatus.PREEMPTED
    placement.take_back(second)
    placement.take_back(first)
    ids = [chosen(placement, cells(Core())).request.new.request_id for _ in range(3)]
    assert ids == ["2", "1", "3"]


@pytest.mark.parametrize("order", ["fcfs", "fair", "priority"])
def test_nothing_is_kept_of_what_has_ended(order: str) -> None:
    placement = placement_of(*(new_request(number, tenant=str(number)) for number in range(6)), order=order)
    placement.cell_opened(CAPACITY)
    placed = [chosen(placement, cells(Core())).request for _ in range(3)]
    placed[0].status = RequestStatus.PREEMPTED
    placement.take_back(placed[0])
    placement.take_back(placed[1])
    placement.count_end(ended(placed[2].new))
    for request in placement.requests():
        assert placement.finish(request.new.origin, FinishReason.ABORT) is not None
    assert placement.finish(placed[0].new.origin, FinishReason.ABORT) is None
    assert not len(placement)
    assert not placement.num_waiting_tokens
    assert placement.place_next(cells(Core()), 0.0) is None
    assert placement.placed(placed[2].new.origin) is None


def test_a_request_that_is_late_goes_last_or_is_shed() -> None:
    full = cells(Core(num_running=8))
    late, other = new_request(1, ttft_slo_ms=100), new_request(2)
    placement = placement_of(late, other)
    assert placement.place_next(full, 0.11) is None
    assert chosen(placement, cells(Core()), 1.2).request.new.request_id == "2"
    placement = placement_of(late, other, shed_late=True)
    assert placement.place_next(full, 0.11) is None
    assert [(end.origin.handle, end.reason) for end in placement.take_shed()] == [(1, FinishReason.SHED)]
    assert len(placement) == 1
    placement = placement_of(late, shed_late=True)
    assert chosen(placement, cells(Core()), 0.11).request.new.request_id == "1", "one is tried where nothing runs"
    assert placement.take_shed() == ()


def test_the_queue_is_bounded() -> None:
    placement = placement_of(new_request(1), new_request(2), max_num_waiting=2)
    with pytest.raises(RequestRejected, match="wait"):
        placement.add(new_request(3), list, 3.0)


def test_arrivals_are_numbered_after_those_of_a_core() -> None:
    placement = placement_of()
    first = Request(new_request(1), arrival=41, rank=3, limit=0, now=0.0)
    placement.number_after([first])
    assert placement.add(new_request(2), list, 1.0).arrival == 42


def ended(new: NewRequestEvent, num_output_tokens: int = 4) -> FinishedEvent:
    return FinishedEvent(
        origin=new.origin,
        reason=FinishReason.LENGTH,
        num_output_tokens=num_output_tokens,
        arrival_time=0.0,
        scheduled_time=0.0,
        first_token_time=0.1,
        num_preemptions=0,
        num_prompt_tokens=new.num_prompt_tokens,
        num_held_tokens=0,
        tenant=new.tenant,
    )
