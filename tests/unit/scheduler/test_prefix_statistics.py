"""What the scheduler tells about its prefix cache: who counts as a hit, when, and for whom."""

import numpy as np
import pytest

from core_driver import CoreDriver
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.memory.prefix_statistics import MAX_TENANTS, RECENT_QUERIES, PrefixStatistics
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

CAPACITY = ExecutorCapacity(num_blocks=16, block_size=4, max_model_len=64, vocab_size=64, max_num_rows=4)


def add(driver: CoreDriver, handle: int, tokens: list[int], *, tenant: str = "", max_tokens: int = 1) -> None:
    driver.num_output_tokens[handle] = 0
    driver.core.add_request(
        NewRequestEvent(
            origin=Origin(0, handle),
            request_id=str(handle),
            token_ids=np.array(tokens, dtype=np.int32),
            num_prompt_tokens=len(tokens),
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
            tenant=tenant,
        ),
        now=0.0,
    )


@pytest.mark.parametrize(("scope", "hits"), [("shared", [0, 8, 8]), ("tenant", [0, 0, 8])])
def test_tenants_share_blocks_only_if_the_cache_is_shared(scope: str, hits: list[int]) -> None:
    driver = CoreDriver(SchedulerLimits(prefix_cache_scope=scope), CAPACITY)
    counters, found = driver.core.counters, []
    for handle, tenant in enumerate(("a", "b", "a")):
        before = counters.num_prefix_hit_tokens
        add(driver, handle, list(range(1, 11)), tenant=tenant)
        driver.all_steps()
        found.append(counters.num_prefix_hit_tokens - before)
    assert found == hits
    assert (counters.num_prefix_queries, counters.num_prefix_hits) == (3, sum(hit > 0 for hit in hits))
    assert counters.num_prefix_query_tokens == 30
    tenants = driver.core.prefix_statistics.tenants
    assert {name: (use.num_query_tokens, use.num_hit_tokens) for name, use in tenants.items()} == {
        "a": (20, hits[2]),
        "b": (10, hits[1]),
    }


def test_a_request_that_finds_its_own_blocks_after_a_preemption_is_no_hit() -> None:
    driver = CoreDriver(SchedulerLimits(max_steps_in_flight=1), CAPACITY)
    core = driver.core
    add(driver, 0, list(range(1, 24)), max_tokens=40)
    add(driver, 1, list(range(30, 53)), max_tokens=40)
    while not core.counters.num_preemptions:
        driver.next_steps(1)
    driver.abort(0)
    driver.all_steps()
    assert core.counters.num_prefix_resumed_tokens > 0
    assert (core.counters.num_prefix_hit_tokens, core.counters.num_prefix_query_tokens) == (0, 46)
    assert core.cache.num_worth()[1] == 0  # nor are its blocks worth more


def test_the_recent_hit_rate_is_that_of_the_last_requests() -> None:
    driver = CoreDriver(SchedulerLimits(), CAPACITY)
    assert driver.core.prefix_statistics.recent_hit_rate == 0.0
    for handle in range(RECENT_QUERIES):
        add(driver, handle, [handle % 60] + [handle // 60] * 9)  # nobody finds anything
        driver.all_steps()
    assert driver.core.prefix_statistics.recent_hit_rate == 0.0
    for handle in range(RECENT_QUERIES, 3 * RECENT_QUERIES):
        add(driver, handle, [1] * 10)
        driver.all_steps()
        if handle == 2 * RECENT_QUERIES - 2:  # the window reaches back to the very first request
            assert driver.core.prefix_statistics.recent_hit_rate == pytest.approx(0.4, abs=0.001)
    assert driver.core.prefix_statistics.recent_hit_rate == 0.8


def test_requests_that_name_no_tenant_are_no_tenant() -> None:
    driver = CoreDriver(SchedulerLimits(), CAPACITY)
    add(driver, 0, [1] * 10)
    driver.all_steps()
    assert not driver.core.prefix_statistics.tenants


def test_the_tenant_not_heard_of_for_longest_is_forgotten_first() -> None:
    statistics = PrefixStatistics(SchedulerCounters())
    for number in range(MAX_TENANTS):
        statistics.count_tenant(str(number), 10, 5)
    statistics.count_tenant("0", 10, 5)
    statistics.count_tenant("new", 10, 5)
    assert len(statistics.tenants) == MAX_TENANTS
    assert "1" not in statistics.tenants
    assert statistics.tenants["0"].num_hit_tokens == 10
    assert list(statistics.tenants)[-1] == "new"
