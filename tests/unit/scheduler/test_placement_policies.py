"""The placement policies: where prompts start, who goes on elsewhere behind a prompt, and who is relieved."""

from typing import Any

import numpy as np
import pytest

from headway_proto.ingress import PRIORITY_HIGH, PRIORITY_LOW
from headway_scheduler.core.choosing.cell_load import CellLoad
from headway_scheduler.core.choosing.policies import AUTO, POLICIES, PlacementSettings
from headway_scheduler.core.choosing.roles import Role, roles_of, what_nobody_does
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import FinishReason, Request, RequestStatus
from headway_scheduler.core.state.stored_blocks import StoredBlocks
from headway_scheduler.placement.placement import Placed, Placement
from unit.scheduler.test_placement import Core, chosen, new_request

PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH
TIGHT = {"itl_slo_ms": 10}


def cells(*entries: tuple[Role, Core], draining: int = -1) -> list[CellLoad]:
    return [
        CellLoad(number, core, accepts=number != draining, role=role) for number, (role, core) in enumerate(entries)
    ]


def placement_of(policy: str, *handles: int, **fields: Any) -> Placement:
    placement = Placement(SchedulerLimits(), POLICIES[policy])
    for handle in handles:
        placement.add(new_request(handle, **fields), list, 0.0)
    return placement


def prompt_placed(policy: str, loads: list[CellLoad], **fields: Any) -> Placed:
    return chosen(placement_of(policy, 1, **fields), loads)


def handed_off(placement: Placement, loads: list[CellLoad]) -> Request:
    """A request that was placed, has left behind its prompt, and waits with its blocks stored."""
    request = chosen(placement, loads).request
    request.status = RequestStatus.PREEMPTED
    request.is_leaving = False
    request.stored = StoredBlocks("pool", ("shm:pool",), 1, 2, np.arange(2), len(request.token_ids))
    placement.take_back(request)
    return request


def decode_placed(policy: str, loads: list[CellLoad], **fields: Any) -> Placed:
    placement = placement_of(policy, 1, **fields)
    handed_off(placement, cells((PREFILL, Core())))
    return chosen(placement, loads)


# ------------------------------------------------------------------------------------------------------- aggregated


def test_aggregated_knows_no_roles() -> None:
    loads = cells((DECODE, Core()), (PREFILL, Core(num_running=1)))
    placed = prompt_placed("aggregated", loads)
    assert (placed.cell, placed.num_choices, placed.leaves) == (0, 2, False)
    assert not placed.request.is_leaving
    loads = cells((PREFILL, Core()), (DECODE, Core(num_running=1)))
    assert decode_placed("aggregated", loads).cell == 0
    slow = Core(num_running=2, step_us=20_000.0, tightest_s=0.01, newest=placed.request)
    assert POLICIES["aggregated"].to_relieve(cells((BOTH, slow), (BOTH, Core()))) == []


# ---------------------------------------------------------------------------------------------------- disaggregated


def test_prompts_run_where_prompts_are_for_and_go_on_where_decoding_is() -> None:
    loads = cells((DECODE, Core()), (PREFILL, Core(num_running=5, num_prompt_tokens_left=60)))
    placed = prompt_placed("disaggregated", loads)
    assert (placed.cell, placed.num_choices, placed.leaves) == (1, 1, True)
    assert placed.request.is_leaving, "the core lets it leave with its first token"
    loads = cells((PREFILL, Core()), (DECODE, Core(num_running=5)))
    placed = decode_placed("disaggregated", loads)
    assert (placed.cell, placed.num_choices, placed.leaves) == (1, 1, False)


def test_an_executor_for_both_takes_prompts_and_keeps_them() -> None:
    placed = prompt_placed("disaggregated", cells((DECODE, Core()), (BOTH, Core())))
    assert (placed.cell, placed.leaves) == (1, False)
    assert decode_placed("disaggregated", cells((PREFILL, Core()), (BOTH, Core()))).cell == 1


def test_of_several_with_the_role_the_first_token_decides() -> None:
    loads = cells((PREFILL, Core(num_prompt_tokens_left=60)), (DECODE, Core()), (PREFILL, Core()))
    placed = prompt_placed("disaggregated", loads)
    assert (placed.cell, placed.num_choices) == (2, 2)


def test_full_executors_with_the_role_are_waited_for() -> None:
    full = Core(num_running=8)
    placement = placement_of("disaggregated", 1)
    assert placement.place_next(cells((PREFILL, full), (DECODE, Core())), 0.0) is None
    handed_off(placement, cells((PREFILL, Core())))
    assert placement.place_next(cells((PREFILL, Core()), (DECODE, full)), 0.0) is None


def test_where_no_executor_has_the_role_any_serves() -> None:
    placed = prompt_placed("disaggregated", cells((DECODE, Core()), (DECODE, Core(num_running=1))))
    assert (placed.cell, placed.leaves) == (0, False)
    placed = prompt_placed("disaggregated", cells((PREFILL, Core()), (PREFILL, Core())))
    assert not placed.leaves, "nobody decodes elsewhere"
    assert decode_placed("disaggregated", cells((PREFILL, Core()))).cell == 0


def test_executors_that_drain_count_as_none() -> None:
    loads = cells((PREFILL, Core()), (DECODE, Core()), draining=0)
    assert prompt_placed("disaggregated", loads).cell == 1
    loads = cells((PREFILL, Core()), (DECODE, Core()), draining=1)
    placed = prompt_placed("disaggregated", loads)
    assert (placed.cell, placed.leaves) == (0, False)
    assert decode_placed("disaggregated", loads).cell == 0


@pytest.mark.parametrize("policy", ["disaggregated", "hybrid"])
def test_an_answer_of_one_token_goes_nowhere(policy: str) -> None:
    assert not prompt_placed(policy, cells((PREFILL, Core()), (DECODE, Core())), max_tokens=1).leaves


def test_disaggregated_relieves_nobody() -> None:
    request = chosen(placement_of("disaggregated", 1), cells((BOTH, Core()))).request
    slow = Core(num_running=2, step_us=20_000.0, tightest_s=0.01, newest=request)
    assert POLICIES["disaggregated"].to_relieve(cells((DECODE, slow), (DECODE, Core()))) == []


# ----------------------------------------------------------------------------------------------------------- hybrid


def test_hybrid_prefers_the_role_and_leaves_a_prefill_executor() -> None:
    placed = prompt_placed("hybrid", cells((DECODE, Core()), (PREFILL, Core())))
    assert (placed.cell, placed.num_choices, placed.leaves) == (1, 2, True)
    assert decode_placed("hybrid", cells((PREFILL, Core()), (DECODE, Core()))).cell == 1


@pytest.mark.parametrize(("step_us", "leaves"), [(3_900.0, False), (4_100.0, True)])
def test_hybrid_hands_nobody_off_where_decoding_takes_little_of_the_objective(step_us: float, *, leaves: bool) -> None:
    loads = cells((PREFILL, Core(step_us=step_us)), (DECODE, Core(num_prompt_tokens_left=10_000)))
    placed = prompt_placed("hybrid", loads, **TIGHT)
    assert (placed.cell, placed.leaves) == (0, leaves)


@pytest.mark.parametrize(("prefill_us", "decode_us"), [(0.0, 0.0), (0.0, 20_000.0), (4_100.0, 20_000.0)])
def test_hybrid_keeps_nobody_with_prompts_where_speed_is_unknown_or_gaps_are_missed_everywhere(
    prefill_us: float, decode_us: float
) -> None:
    loads = cells((PREFILL, Core(step_us=prefill_us)), (DECODE, Core(step_us=decode_us, num_prompt_tokens_left=10_000)))
    placed = prompt_placed("hybrid", loads, **TIGHT)
    assert (placed.cell, placed.leaves) == (0, True)


@pytest.mark.parametrize("policy", ["disaggregated", "hybrid"])
def test_who_lost_its_blocks_once_is_not_handed_off_again(policy: str) -> None:
    loads = cells((PREFILL, Core()), (DECODE, Core()))
    placement = placement_of(policy, 1)
    request = handed_off(placement, loads)
    assert chosen(placement, loads).cell == 1
    request.forget_stored()
    request.has_lost_blocks = True
    placement.take_back(request)
    placed = chosen(placement, loads)
    assert (placed.request, placed.cell, placed.leaves) == (request, 0, False)


def test_a_prompt_does_not_wait_behind_one_that_waits_for_room_to_decode() -> None:
    full = Core(num_running=8)
    placement = placement_of("disaggregated", 1, 2)
    carrying = handed_off(placement, cells((PREFILL, Core())))
    placed = chosen(placement, cells((PREFILL, Core()), (DECODE, full)))
    assert (placed.request.new.origin.handle, placed.cell) == (2, 0)
    assert (len(placement), placement.num_waiting_tokens) == (1, len(carrying.token_ids))
    placement.add(new_request(3), list, 0.0)
    assert chosen(placement, cells((PREFILL, Core()), (DECODE, Core()))).request is carrying, "who has run goes first"
    assert len(placement) == 1


def test_who_waits_with_its_blocks_is_ended_like_others_and_stands_behind_a_higher_class() -> None:
    placement = placement_of("disaggregated", 1)
    carrying = handed_off(placement, cells((PREFILL, Core())))
    assert placement.find(carrying.new.origin) is carrying
    assert placement.num_ahead_of(carrying) == 0
    assert placement.finish(carrying.new.origin, FinishReason.ABORT) is not None
    assert (len(placement), placement.num_waiting_tokens) == (0, 0)
    placement = Placement(SchedulerLimits(order="priority"), POLICIES["disaggregated"])
    placement.add(new_request(1, priority=PRIORITY_LOW), list, 0.0)
    handed_off(placement, cells((PREFILL, Core())))
    placement.add(new_request(2, priority=PRIORITY_HIGH), list, 0.0)
    assert chosen(placement, cells((BOTH, Core()))).request.new.origin.handle == 2


def test_blocks_that_come_along_take_no_tokens_of_a_step() -> None:
    waits = Core(num_waiting=1, num_waiting_tokens=60)
    assert decode_placed("disaggregated", cells((DECODE, waits)), num_tokens=40).cell == 0
    assert placement_of("disaggregated", 1, num_tokens=40).place_next(cells((PREFILL, waits)), 0.0) is None


def test_hybrid_starts_a_prompt_on_a_decode_executor_with_slack() -> None:
    busy = Core(num_prompt_tokens_left=1000)  # 10 ms of prompts before this one
    slack = Core(num_running=2, step_us=4_000.0, tightest_s=0.02)
    placed = prompt_placed("hybrid", cells((PREFILL, busy), (DECODE, slack)))
    assert (placed.cell, placed.leaves) == (1, False), "it decodes where it started"


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"step_us": 9_000.0, "tightest_s": 0.0095}, 0),  # the prompt takes 640 us beside them
        ({"step_us": 9_000.0, "tightest_s": 0.0097}, 1),
        (
            {"step_us": 7_200.0, "tightest_s": 0.0091, "are_kept": True},
            1,
        ),  # the budget keeps the gaps, and there is slack
        ({"step_us": 7_300.0, "tightest_s": 0.0091, "are_kept": True}, 0),
        ({"step_us": 9_000.0, "tightest_s": None}, 1),
    ],
)
def test_hybrid_starts_no_prompt_where_gaps_would_be_missed(figures: dict[str, Any], expected: int) -> None:
    busy = Core(num_prompt_tokens_left=10_000)
    decodes = Core(num_running=2, **figures)
    assert prompt_placed("hybrid", cells((PREFILL, busy), (DECODE, decodes)), num_tokens=64).cell == expected


def test_where_gaps_are_kept_nowhere_a_prompt_starts_all_the_same() -> None:
    late = {"num_running": 2, "step_us": 20_000.0, "tightest_s": 0.01}
    assert prompt_placed("hybrid", cells((DECODE, Core(**late)), (PREFILL, Core(**late)))).cell == 1


@pytest.mark.parametrize(
    ("here", "there", "leaves"),
    [
        ({}, {}, False),  # here its gaps are kept
        ({"step_us": 9_000.0, "us_per_row": 2_000.0}, {}, True),
        ({"step_us": 9_000.0, "us_per_row": 2_000.0}, {"step_us": 9_000.0, "us_per_row": 2_000.0}, False),
    ],
)
def test_hybrid_moves_a_request_whose_gaps_would_be_missed(
    here: dict[str, Any], there: dict[str, Any], *, leaves: bool
) -> None:
    first, second = Core(**here), Core(num_prompt_tokens_left=10_000, **there)
    placed = prompt_placed("hybrid", cells((BOTH, first), (DECODE, second)), **TIGHT)
    assert (placed.cell, placed.leaves) == (0, leaves)


def test_hybrid_decodes_where_the_gap_is_kept_and_there_where_decoding_is() -> None:
    slow, fast = {"step_us": 9_000.0, "us_per_row": 2_000.0}, {"step_us": 1_000.0}
    loads = cells((DECODE, Core(**slow)), (PREFILL, Core(**fast)))
    assert decode_placed("hybrid", loads, **TIGHT).cell == 1, "the objective before the role"
    loads = cells((PREFILL, Core(**fast)), (DECODE, Core(**fast, num_running=3)))
    assert decode_placed("hybrid", loads, **TIGHT).cell == 1, "and then the role"
    loads = cells((PREFILL, Core(**slow)), (DECODE, Core(**slow)))
    assert decode_placed("hybrid", loads, **TIGHT).cell == 1


def test_a_decode_of_hybrid_waits_for_no_full_executor_while_another_has_room() -> None:
    slow, full = {"step_us": 9_000.0, "us_per_row": 2_000.0}, Core(num_running=8, step_us=1_000.0)
    assert decode_placed("hybrid", cells((PREFILL, Core(**slow)), (DECODE, full)), **TIGHT).cell == 0
    placement = placement_of("hybrid", 1, **TIGHT)
    handed_off(placement, cells((PREFILL, Core())))
    assert placement.place_next(cells((PREFILL, Core(num_running=8)), (DECODE, full)), 0.0) is None


def late_cell(request: Request, role: Role = DECODE) -> tuple[Role, Core]:
    return role, Core(num_running=2, step_us=12_000.0, us_per_row=1_000.0, tightest_s=0.01, newest=request)


def test_hybrid_relieves_who_misses_its_gaps_if_another_has_slack() -> None:
    request = chosen(placement_of("hybrid", 1, **TIGHT), cells((BOTH, Core()))).request
    relieve = POLICIES["hybrid"].to_relieve
    slack = (DECODE, Core(step_us=6_000.0, us_per_row=1_000.0))
    assert relieve(cells(late_cell(request), slack)) == [(0, request)]
    assert relieve(cells(late_cell(request), slack, draining=1)) == []
    almost = (DECODE, Core(step_us=7_500.0, us_per_row=1_000.0))
    assert relieve(cells(late_cell(request), almost)) == [], "it would soon have to leave there too"
    full = DECODE, Core(step_us=6_000.0, num_running=8)
    assert relieve(cells(late_cell(request), full)) == [], "it would leave only to wait there"
    small = DECODE, Core(step_us=6_000.0)
    small[1].capacity = ExecutorCapacity(num_blocks=1, block_size=4, max_model_len=4, vocab_size=50, max_num_rows=8)
    assert relieve(cells(late_cell(request), small)) == []
    alone = DECODE, Core(num_running=1, step_us=12_000.0, tightest_s=0.01, newest=request)
    assert relieve(cells(alone, slack)) == [], "by itself it is no faster elsewhere"
    kept = DECODE, Core(num_running=2, step_us=9_000.0, tightest_s=0.01, newest=request)
    assert relieve(cells(kept, slack)) == []


@pytest.mark.parametrize(
    ("slack", "num_sent"),
    [
        ({"step_us": 4_000.0, "us_per_row": 1_000.0}, 3),
        ({"step_us": 5_500.0, "us_per_row": 1_000.0}, 2),
        ({"step_us": 6_000.0, "us_per_row": 1_500.0}, 1),
        ({"step_us": 1_000.0, "num_running": 7}, 1),  # one row is free
    ],
)
def test_as_many_leave_as_the_others_have_slack_for(slack: dict[str, Any], num_sent: int) -> None:
    placement = placement_of("hybrid", 1, 2, 3, **TIGHT)
    late = [late_cell(chosen(placement, cells((BOTH, Core()))).request) for _ in range(3)]
    relieved = POLICIES["hybrid"].to_relieve(cells(*late, (DECODE, Core(**slack))))
    assert [number for number, _ in relieved] == list(range(num_sent))


@pytest.mark.parametrize(("num_left", "is_sent"), [(21, True), (20, False), (1, False)])
def test_who_ends_within_an_interval_of_relief_is_not_copied(num_left: int, is_sent: bool) -> None:
    request = chosen(placement_of("hybrid", 1, **TIGHT), cells((BOTH, Core()))).request
    late, slack = late_cell(request), (DECODE, Core(step_us=6_000.0, us_per_row=1_000.0))
    late[1].gaps.newest_has_left = num_left
    assert POLICIES["hybrid"].to_relieve(cells(late, slack)) == [(0, request)] * is_sent


# ------------------------------------------------------------------------------------------------ settings and roles


@pytest.mark.parametrize(
    ("settings", "limits", "max_executors", "name"),
    [
        (PlacementSettings(), {}, 2, "aggregated"),
        (PlacementSettings(AUTO, (BOTH, BOTH)), {}, 2, "aggregated"),
        (PlacementSettings(AUTO, (PREFILL, DECODE)), {}, 2, "disaggregated"),
        (PlacementSettings(), {"default_itl_slo_ms": 50}, 2, "hybrid"),
        (PlacementSettings(AUTO, (PREFILL, DECODE)), {"default_ttft_slo_ms": 500}, 2, "hybrid"),
        (PlacementSettings(), {"default_itl_slo_ms": 50}, 1, "aggregated"),
        (PlacementSettings("aggregated", (PREFILL, DECODE)), {"default_itl_slo_ms": 50}, 2, "aggregated"),
    ],
)
def test_auto_follows_objectives_and_then_roles(
    settings: PlacementSettings, limits: dict[str, int], max_executors: int, name: str
) -> None:
    assert settings.name_for(SchedulerLimits(**limits), max_executors) == name


def test_roles_are_written_by_number() -> None:
    assert roles_of("", 2) == ()
    assert roles_of(" prefill, decode ", 3) == (PREFILL, DECODE)
    settings = PlacementSettings(roles=(PREFILL, DECODE))
    assert [settings.role_of(number) for number in range(3)] == [PREFILL, DECODE, BOTH]


@pytest.mark.parametrize(
    ("text", "number", "words"),
    [
        ("prefill,cook", 2, "roles: 'cook' is not allowed; allowed: prefill, decode, both"),
        ("both,both", 1, "roles: 'both,both' is not allowed; allowed: at most 1, one for each executor"),
        ("prefill", 1, "roles: 'prefill' is not allowed; allowed: at least one executor for decoding"),
        ("decode,decode", 2, "roles: 'decode,decode' is not allowed; allowed: at least one executor for prompts"),
    ],
)
def test_roles_that_are_none_or_leave_work_undone_are_refused(text: str, number: int, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}$"):
        roles_of(text, number)


def test_what_nobody_does() -> None:
    assert what_nobody_does([PREFILL, DECODE]) == what_nobody_does([BOTH]) == ""
    assert what_nobody_does([PREFILL, PREFILL]) == "decoding"
    assert what_nobody_does([DECODE]) == "prompts"
