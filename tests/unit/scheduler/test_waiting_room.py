"""What may wait is bounded by requests and by tokens, for everybody and for each tenant."""

import pytest

from core_driver import CoreDriver
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

CAPACITY = ExecutorCapacity(num_blocks=100, block_size=4, max_model_len=100, vocab_size=10, max_num_rows=2)


def driver(**limits: int) -> CoreDriver:
    return CoreDriver(SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=100, **limits), CAPACITY)


def test_by_requests() -> None:
    core = driver(max_num_waiting=2)
    core.add(0, 5, 5)
    core.add(1, 5, 5)
    with pytest.raises(RequestRejected, match="2 requests are waiting; allowed: 2"):
        core.add(2, 5, 5)
    core.schedule()  # one starts
    core.add(2, 5, 5)


def test_by_tokens_but_never_the_first() -> None:
    core = driver(max_waiting_tokens=20)
    core.add(0, 50, 5)
    with pytest.raises(RequestRejected, match="50 tokens are waiting, and these 1 are too many; allowed: 20"):
        core.add(1, 1, 5)
    core.schedule()
    core.add(1, 20, 5)
    core.abort(1)
    core.add(2, 15, 5)
    core.add(3, 5, 5)
    with pytest.raises(RequestRejected):
        core.add(4, 1, 5)


def test_by_tenant() -> None:
    core = driver(max_tenant_waiting=2, max_tenant_waiting_tokens=30)
    core.add(0, 5, 5, tenant="one")
    core.add(1, 5, 5, tenant="one")
    with pytest.raises(RequestRejected, match="2 requests of tenant 'one' are waiting; allowed: 2"):
        core.add(2, 5, 5, tenant="one")
    core.add(3, 25, 5, tenant="two")
    with pytest.raises(RequestRejected, match="25 tokens of tenant 'two' are waiting, and these 6 are too many"):
        core.add(4, 6, 5, tenant="two")
    core.add(4, 5, 5, tenant="two")
    core.abort(4)
    core.abort(3)
    core.add(5, 30, 5, tenant="two")


def test_nothing_is_kept_of_tenants_that_have_gone() -> None:
    core = driver()
    for handle in range(50):
        core.add(handle, 5, 2, tenant=str(handle))
    core.all_steps()
    room = core.core._state.waiting.room
    assert (room.num_requests, room.num_tokens, room._tenants) == (0, 0, {})
