"""After many requests nothing is left of them, in an engine without any fault; and the census sees what there is.

Owns: loads of which each request brings something of its own. Must not know: where an engine keeps it.
"""

from collections import OrderedDict, deque

import msgspec
import numpy as np
import pytest

from headway_scheduler.core.admission.waiting_room import WaitingRoom
from headway_scheduler.engine import SchedulerEngine
from simulation.census import census
from simulation.fault_rest import MAY_GROW, leftovers
from simulation.fault_schedule import RequestPlan, Schedule, Settings, draw
from simulation.fault_world import FaultWorld

NUM_REQUESTS = 400


def settings_of(**changes: object) -> Settings:
    plain = {
        "order": "fcfs",
        "batching": "chunked",
        "reserve": "auto",
        "preemption": "swap",
        "budget": "fixed",
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_steps_in_flight": 2,
        "max_num_waiting": NUM_REQUESTS,
        "enable_prefix_caching": True,
        "prefix_aware": False,
        "prefix_cache_scope": "tenant",
        "aging_s": 30.0,
        "shed_late": False,
        "num_blocks": 40,
        "block_size": 4,
        "num_rows": 8,
        "num_host_blocks": 20,
        "num_gateways": 1,
        "step_s": 0.0,
        "wire_s": 0.0,
        "window": 4096,
        "digest_every": 64,
        "max_speculative_tokens": 0,
        "executor_after_s": 0.0,
        "max_executors": 1,
        "more_executors_after_s": (),
    }
    return msgspec.structs.replace(draw(0).settings, **plain | changes)


def run(settings: Settings, requests: list[RequestPlan]) -> FaultWorld:
    world = FaultWorld(Schedule(seed=1, settings=settings, requests=tuple(requests), faults=(), heal_at=1.0))
    assert world.run() is None
    return world


def request(number: int, **of_its_own: object) -> RequestPlan:
    plain = {"at": number / 1000, "number": number, "gateway": 0, "prompt": (number % 40, 3, 5), "max_tokens": 3}
    return RequestPlan(**plain | of_its_own)


@pytest.mark.parametrize("order", ["fcfs", "fair", "shortest"])
def test_of_requests_that_each_bring_something_else(order: str) -> None:
    """A tenant, an objective, stop tokens; each ends with its first token, so that none decodes."""
    requests = [
        request(number, max_tokens=1, tenant=f"tenant {number}", itl_slo_ms=1 + number, stop=(2 + number % 38,))
        for number in range(NUM_REQUESTS)
    ]
    world = run(settings_of(order=order), requests)
    assert world.scheduler.engine.fleet.cells[0].core.counters.num_finished == NUM_REQUESTS


def test_of_requests_that_were_cancelled_before_an_executor_came() -> None:
    requests = [request(number, at=0.0, deadline_s=0.01 * (number % 2)) for number in range(NUM_REQUESTS)]
    world = run(settings_of(executor_after_s=0.1), requests)
    assert world.scheduler.engine.fleet.cells[0].core.counters.num_finished == NUM_REQUESTS // 2


def test_what_an_engine_holds_is_seen_wherever_it_is() -> None:
    world = run(settings_of(), [request(0)])
    engine = world.scheduler.engine
    engine.held_since_today = OrderedDict(a=1)
    engine.fleet.cells[0].core._state.waiting.room._tenants["nobody"] = [1, 7]
    assert leftovers(world) == [
        "len(engine.fleet.transit._cores[]._state.waiting.room._tenants) is 1, 0 at rest",
        "len(engine.fleet.transit._cores[]._state.waiting.room._tenants[]) is 2, 0 at rest",
        "len(engine.held_since_today) is 1, 0 at rest",
    ]


def test_attributes_are_seen_in_every_kind_of_object() -> None:
    """Also of the core's classes, which have no ``__dict__`` where they are compiled."""
    engine = SchedulerEngine(draw_limits(), 1)
    engine.deque = deque([WaitingRoom(engine.limits)])
    engine.record = ("a name", np.zeros(7))
    found = census(engine, "it")
    assert found["len(it.deque)"] == 1
    assert found["it.deque[].num_requests"] == 0
    assert found["len(it.deque[]._tenants)"] == 0
    assert found["size(it.record[])"] == 7
    assert found["it.fleet.cells[]._pause._num_failures"] == 0


def draw_limits():
    return FaultWorld(draw(0)).scheduler.engine.limits


def test_every_container_that_may_grow_has_a_bound_and_every_row_a_reason() -> None:
    for row in MAY_GROW:
        assert row.why
        assert (row.most is not None) == row.pattern.startswith(("len(", "size("))
