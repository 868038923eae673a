"""What each batching policy puts into a step, what each reservation admits, and the worked examples of the literature."""

from typing import Literal, get_args, get_type_hints

import pytest

from core_driver import CoreDriver
from headway_scheduler.config import SchedulerConfig
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits


def driver(
    batching: str, *, reserve: str = "auto", slots: int = 8, budget: int = 64, blocks: int = 512, depth: int = 1
) -> CoreDriver:
    limits = SchedulerLimits(
        batching=batching,
        reserve=reserve,
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        max_steps_in_flight=depth,
        enable_prefix_caching=False,
    )
    capacity = ExecutorCapacity(num_blocks=blocks, block_size=4, max_model_len=512, vocab_size=8, max_num_rows=64)
    return CoreDriver(limits, capacity)


def test_the_configuration_offers_every_policy_and_no_other() -> None:
    hints = get_type_hints(SchedulerConfig)
    assert set(get_args(hints["batching"])) == set(BATCHING_POLICIES)
    assert set(get_args(hints["reserve"])) == {"auto", *RESERVATIONS}
    assert hints["batching"] == Literal["static", "orca", "prefill_first", "chunked", "split_fuse"]


def test_static_lets_nobody_in_until_the_last_of_a_batch_has_ended() -> None:
    run = driver("static", slots=3)
    for handle, max_tokens in enumerate((2, 4)):
        run.add(handle, 5, max_tokens)
    assert run.next_steps(2) == [{0: 5, 1: 5}, {0: 1, 1: 1}]
    run.add(2, 5, 1)  # there is a slot for it, and it is not used
    assert run.next_steps(3) == [{1: 1}, {1: 1}, {2: 5}]


def test_static_gathers_a_batch_over_as_many_steps_as_its_prompts_take() -> None:
    run = driver("static", budget=10)
    for handle in range(3):
        run.add(handle, 6, 3)
    assert run.next_steps(5) == [{0: 6}, {1: 6}, {2: 6}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}]
    assert run.core.num_unfinished == 0


def test_prefill_first_lets_decodes_wait_for_whole_prompts() -> None:
    run = driver("prefill_first", budget=10)
    run.add(0, 6, 4)
    assert run.next_steps(2) == [{0: 6}, {0: 1}]
    run.add(1, 7, 2)
    run.add(2, 7, 2)
    assert run.next_steps(4) == [{1: 7}, {2: 7}, {0: 1, 1: 1, 2: 1}, {0: 1}]


def test_chunked_never_lets_a_decode_wait_for_a_prompt() -> None:
    run = driver("chunked", budget=10)
    run.add(0, 6, 5)
    run.add(1, 20, 1)
    assert run.next_steps(4) == [{0: 6, 1: 4}, {0: 1, 1: 9}, {0: 1, 1: 7}, {0: 1}]


@pytest.mark.parametrize("batching", ["orca", "prefill_first", "static"])
def test_whole_prompts_are_cut_only_if_no_step_could_hold_them(batching: str) -> None:
    run = driver(batching, budget=10)
    run.add(0, 6, 1)
    run.add(1, 7, 1)  # does not fit beside the first
    run.add(2, 25, 1)  # fits no step
    steps = run.next_steps(5)
    assert steps[:4] == [{0: 6}, {1: 7}, {2: 10}, {2: 10}]
    assert steps[4] == {2: 5}


def test_orca_runs_whole_prompts_beside_decodes() -> None:
    run = driver("orca", budget=10)
    run.add(0, 6, 3)
    assert run.next_steps(1) == [{0: 6}]
    run.add(1, 9, 1)
    assert run.next_steps(2) == [{0: 1, 1: 9}, {0: 1}]


def test_orca_alternates_batches_of_different_requests() -> None:
    run = driver("orca", slots=2, depth=2)
    for handle in range(4):
        run.add(handle, 3, 3)
    assert [run.schedule(), run.schedule()] == [{0: 3, 1: 3}, {2: 3, 3: 3}]
    for _ in range(2):
        run.update()
        assert run.schedule() == {0: 1, 1: 1}
        run.update()
        assert run.schedule() == {2: 1, 3: 1}


def test_split_fuse_fills_a_step_to_the_budget_where_chunked_leaves_the_prompt_waiting() -> None:
    steps = {}
    for batching in ("chunked", "split_fuse"):
        run = driver(batching, budget=16, blocks=10)
        run.add(0, 12, 8)
        run.add(1, 30, 2)  # 8 blocks, of which 7 are free beside the first
        steps[batching] = run.next_steps(2)
        run.all_steps()
    assert steps["chunked"] == [{0: 12}, {0: 1}]
    assert steps["split_fuse"] == [{0: 12, 1: 4}, {0: 1, 1: 15}]


def test_split_fuse_cuts_a_prompt_where_memory_ends() -> None:
    run = driver("split_fuse", budget=16, blocks=3)
    run.add(0, 7, 2)
    run.add(1, 9, 1)
    assert run.schedule() == {0: 7, 1: 4}


@pytest.mark.parametrize("batching", sorted(BATCHING_POLICIES))
@pytest.mark.parametrize("reserve", sorted(RESERVATIONS))
def test_reservations_trade_preemptions_for_company(batching: str, reserve: str) -> None:
    run = driver(batching, reserve=reserve, blocks=24, depth=2)
    for handle in range(12):
        run.add(handle, 8, 40)
    running_at_once = 0
    while run.core.num_unfinished:
        while run.schedule() is not None:
            running_at_once = max(running_at_once, run.core.num_running)
        run.update()
    assert sorted(run.finished) == list(range(12))
    # 12 blocks each in the end: two fit beside each other for certain.
    assert (running_at_once == 2) == (reserve == "full")
    assert (run.core.counters.num_preemptions == 0) == (reserve == "full")


def test_utilisation_of_a_static_batch() -> None:
    """Three tickets of 10, 50 and 200 tokens in three slots use 43.3% of them."""
    run = driver("static", slots=3)
    lengths = [10, 50, 200]
    for handle, length in enumerate(lengths):
        run.add(handle, 4, length)
    steps = run.all_steps()
    useful = sum(len(step) for step in steps)
    capacity = len(steps) * len(lengths)
    assert (useful, capacity - useful) == (260, 340)
    assert f"{useful / capacity:.1%}" == "43.3%"


TICKETS = [(10, 20), (5, 40), (8, 15), (12, 30), (6, 10)]
"""Prompt and output lengths of five support tickets."""


@pytest.mark.parametrize(
    ("batching", "iterations"),
    # A step that only prefills holds up those that decode, once per ticket that joins: T5 delays T4, both delay T2.
    [("static", 70), ("orca", 45), ("chunked", 45), ("split_fuse", 45), ("prefill_first", 46)],
)
def test_iterations_of_five_tickets_in_three_slots(batching: str, iterations: int) -> None:
    run = driver(batching, slots=3)
    for number, (num_prompt_tokens, max_tokens) in enumerate(TICKETS, start=1):
        run.add(number, num_prompt_tokens, max_tokens)
    steps = run.all_steps()
    assert len(steps) == iterations
    if iterations == 45:
        first_step_of = {ticket: next(i for i, step in enumerate(steps) if ticket in step) for ticket in range(1, 6)}
        last_step_of = {ticket: max(i for i, step in enumerate(steps) if ticket in step) + 1 for ticket in range(1, 6)}
        assert first_step_of == {1: 0, 2: 0, 3: 0, 4: 15, 5: 20}
        assert last_step_of == {3: 15, 1: 20, 5: 30, 2: 40, 4: 45}
