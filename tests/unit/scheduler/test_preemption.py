"""What preemption costs, which kind is chosen, and who is taken."""

from collections.abc import Collection

import numpy as np
import pytest

from headway_scheduler.core.memory.block_pool import BlockPool
from headway_scheduler.core.memory.preemption import (
    MAX_CANDIDATES,
    PREEMPTIONS,
    PreemptionCosts,
    choose_victim,
    in_victim_order,
)
from headway_scheduler.core.memory.prefix_cache import PrefixCache
from headway_scheduler.core.memory.row_table import RowTable
from headway_scheduler.core.state.counters import SchedulerCounters
from waiting_requests import make_request

BLOCK_SIZE = 4


def unknown(num_tokens: int, num_computed_tokens: int) -> None:
    """No step has been seen yet."""
    del num_tokens, num_computed_tokens


class Running:
    """Rows with blocks, as many as asked for."""

    def __init__(self) -> None:
        cache = PrefixCache(400, BLOCK_SIZE)
        self.pool = BlockPool(400, cache, SchedulerCounters())
        self.rows = RowTable(64, 400, BLOCK_SIZE)

    def add(self, num_blocks: int = 2, *, computed: int = 8, priority: int = 3, shared_with: int | None = None) -> int:
        """A row that came after all others; ``shared_with``: has all blocks in common with that row."""
        request = make_request(self.rows.num_live, rank=priority, priority=priority)
        if shared_with is None:
            blocks = self.pool.allocate(num_blocks)
        else:
            blocks = self.rows.blocks_of(shared_with)
            self.pool.share(blocks)
        row = self.rows.take(request, blocks)
        self.rows.num_computed_tokens[row] = computed
        return row

    def victim(self, row: int, planned: Collection[int] = ()) -> int | None:
        return choose_victim(self.rows, self.pool, row, planned)

    def in_order(self, *rows: int) -> list[int]:
        return in_victim_order(self.rows, self.pool, list(rows))


class TestCosts:
    def test_nothing_is_known_at_first(self) -> None:
        costs = PreemptionCosts(unknown, 0.0)
        assert costs.swap_us(3) is None
        assert costs.recompute_us(100) is None

    def test_swapping_is_out_and_in(self) -> None:
        assert PreemptionCosts(unknown, 5.0).swap_us(3) == 30.0

    def test_recomputing_is_a_prefill_from_the_beginning(self) -> None:
        asked = []

        def prefill_s(num_tokens: int, num_computed_tokens: int) -> float:
            asked.append((num_tokens, num_computed_tokens))
            return 0.25

        assert PreemptionCosts(prefill_s, 0.0).recompute_us(77) == 250_000.0
        assert asked == [(77, 0)]

    def test_what_moves_take_is_followed_and_outliers_are_smoothed(self) -> None:
        costs = PreemptionCosts(unknown, 0.0)
        costs.observe_moves(10, 100)
        assert costs.swap_us(1) == 20.0
        costs.observe_moves(1, 110)
        assert costs.swap_us(1) == pytest.approx(2 * (10 + 0.2 * 100))
        for _ in range(60):
            costs.observe_moves(4, 200)
        assert costs.swap_us(1) == pytest.approx(100.0, rel=1e-3)

    def test_the_executors_own_measurement_is_a_beginning(self) -> None:
        costs = PreemptionCosts(unknown, 8.0)
        costs.observe_moves(1, 13)
        assert costs.swap_us(1) == pytest.approx(18.0)

    @pytest.mark.parametrize(("num_blocks", "time_us"), [(0, 50), (5, 0), (-1, 5)])
    def test_nothing_is_learned_from_moves_that_were_not_measured(self, num_blocks: int, time_us: int) -> None:
        costs = PreemptionCosts(unknown, 8.0)
        costs.observe_moves(num_blocks, time_us)
        assert costs.swap_us(1) == 16.0


class TestChoiceOfKind:
    @pytest.mark.parametrize(
        ("policy", "swap_us_per_block", "prefill_s", "expected"),
        [
            ("recompute", 0.001, 9.0, False),
            ("swap", 1e9, 1e-9, True),
            ("auto", 10.0, 41e-6, True),
            ("auto", 10.0, 39e-6, False),
            ("auto", 10.0, 40e-6, False),  # equal: nothing is gained by copying
            ("auto", 0.0, 1.0, False),
            ("auto", 10.0, None, False),
        ],
    )
    def test_two_blocks(self, policy: str, swap_us_per_block: float, prefill_s: float | None, expected: bool) -> None:
        costs = PreemptionCosts(lambda *_: prefill_s, swap_us_per_block)
        assert PREEMPTIONS[policy].swaps(costs, 8, 2) == expected

    def test_only_auto_asks_for_step_times(self) -> None:
        assert {name for name, policy in PREEMPTIONS.items() if policy.needs_costs} == {"auto"}


class TestVictims:
    def test_the_last_of_equals_is_taken(self) -> None:
        running = Running()
        rows = [running.add() for _ in range(4)]
        assert running.victim(rows[0]) == rows[3]
        assert running.in_order(*rows) == rows[::-1]

    def test_who_is_last_takes_itself(self) -> None:
        running = Running()
        rows = [running.add() for _ in range(3)]
        assert running.victim(rows[2]) == rows[2]

    def test_nobody_who_has_a_part_of_this_step_is_taken(self) -> None:
        running = Running()
        rows = [running.add() for _ in range(4)]
        assert running.victim(rows[0], {rows[3]}) == rows[2]
        assert running.victim(rows[0], set(rows[1:])) is None
        assert running.victim(rows[3], {rows[0]}) == rows[3]

    def test_nobody_who_is_served_before_is_taken(self) -> None:
        running = Running()
        first = running.add(1, computed=1)
        second = running.add(8, computed=32)
        third = running.add(8, computed=32)
        assert running.victim(second) == third
        assert first not in {running.victim(second), running.victim(third)}

    def test_the_lowest_class_comes_first_whatever_is_lost(self) -> None:
        running = Running()
        asking = running.add(priority=1)
        low = running.add(1, computed=4, priority=4)
        normal = running.add(8, computed=1, priority=3)
        assert running.victim(asking) == low
        assert running.in_order(normal, low) == [low, normal]

    def test_then_the_one_that_loses_least_work_per_block(self) -> None:
        running = Running()
        asking = running.add()
        cheap = running.add(8, computed=8)
        dear = running.add(8, computed=32)
        assert running.victim(asking) == cheap
        assert running.in_order(dear, cheap) == [cheap, dear]

    def test_differences_below_a_quarter_count_as_none(self) -> None:
        running = Running()
        asking = running.add()
        cheaper_by_a_little = running.add(8, computed=29)
        last = running.add(8, computed=31)
        assert running.victim(asking) == last
        assert running.in_order(cheaper_by_a_little, last)[0] == last

    def test_blocks_that_others_share_do_not_come_free(self) -> None:
        running = Running()
        asking = running.add()
        sharing = running.add(4, computed=1)
        running.add(shared_with=sharing, computed=1)
        alone = running.add(4, computed=16)
        running.add(shared_with=sharing, computed=1)
        assert running.victim(asking) == alone

    def test_only_the_last_few_are_looked_at(self) -> None:
        """However cheap, somebody who came early is not taken for a trifle."""
        running = Running()
        asking = running.add()
        bargain = running.add(8, computed=0)
        others = [running.add(2, computed=8) for _ in range(MAX_CANDIDATES)]
        assert running.victim(asking) == others[-1]
        running.rows.num_computed_tokens[others[0]] = 4
        assert running.victim(asking) == others[0]
        assert running.in_order(bargain, *others)[0] == bargain

    def test_the_last_in_order_are_not_the_highest_rows(self) -> None:
        """Rows are given out again: who came last may sit in the first."""
        running = Running()
        rows = [running.add() for _ in range(3)]
        running.pool.release(running.rows.blocks_of(rows[0]), None)
        running.rows.give_back(rows[0])
        newest = running.rows.take(make_request(9, rank=3), running.pool.allocate(2))
        running.rows.num_computed_tokens[newest] = 8
        assert newest == rows[0]
        assert running.victim(rows[1]) == newest
        assert np.count_nonzero(running.rows.order_key >= 0) == 3
