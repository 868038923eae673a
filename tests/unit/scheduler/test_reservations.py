"""What a reservation that looks ahead lets in, whom it makes wait, and what it tells of memory to come."""

from core_driver import CoreDriver
from headway_scheduler.core.policies.reservations import STEPS_BETWEEN_FORECASTS
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

LENGTH = 72
BLOCK_SIZE = 4


def driver(*, num_blocks: int, reserve: str = "predicted", length: int = LENGTH) -> CoreDriver:
    """A core that has seen 40 answers of ``length`` tokens."""
    run = CoreDriver(
        SchedulerLimits(reserve=reserve, max_num_batched_tokens=64, max_num_seqs=16, max_steps_in_flight=1),
        ExecutorCapacity(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, max_model_len=256, vocab_size=8, max_num_rows=16
        ),
    )
    for handle in range(1000, 1040):
        run.add(handle, 4, 200)
        while run.num_output_tokens[handle] < length - 1:
            run.next_steps(1)
        run.schedule()
        assert run.update([handle]) == [handle]
    return run


def started(run: CoreDriver, handles: list[int]) -> list[int]:
    step = run.next_steps(1)[0]
    return [handle for handle in handles if handle in step]


def test_requests_start_that_will_fit_until_they_end() -> None:
    """Each comes to 19 blocks, and all are as old as each other."""
    run = driver(num_blocks=80)
    for handle in range(8):
        run.add(handle, 4, 200)
    assert started(run, list(range(8))) == [0, 1, 2, 3]


def test_without_foresight_all_start_and_some_are_preempted() -> None:
    preemptions = {}
    for reserve in ("prompt", "predicted"):
        run = driver(num_blocks=80, reserve=reserve)
        for handle in range(8):
            run.add(handle, 4, LENGTH)
        run.all_steps()
        preemptions[reserve] = run.core.counters.num_preemptions
    assert preemptions["prompt"] >= 2
    assert preemptions["predicted"] <= preemptions["prompt"] / 2


def test_who_was_refused_is_asked_again_after_a_few_steps() -> None:
    run = driver(num_blocks=80)
    for handle in range(5):
        run.add(handle, 4, 200)
    assert started(run, [0, 1, 2, 3, 4]) == [0, 1, 2, 3]
    run.abort(3)
    waited = 0
    while not started(run, [4]):
        waited += 1
    assert waited == STEPS_BETWEEN_FORECASTS - 1


def test_who_was_refused_starts_at_once_when_nobody_runs() -> None:
    run = driver(num_blocks=80)
    for handle in range(5):
        run.add(handle, 4, 200)
    assert started(run, [4]) == []
    for handle in range(4):
        run.abort(handle)
    assert started(run, [4]) == [4]


def test_a_shortage_is_seen_coming() -> None:
    run = driver(num_blocks=120)
    assert run.core.steps_until_shortage() is None  # nobody runs
    for handle in range(4):
        run.add(handle, 4, 200)
    run.next_steps(1)
    assert run.core.steps_until_shortage() is None  # they were let in because they fit
    run.next_steps(LENGTH + 8)  # but they do not end
    assert run.core.pool.num_free == 120 - 4 * 21
    soon = run.core.steps_until_shortage()
    run.next_steps(16)
    sooner = run.core.steps_until_shortage()
    assert soon is not None
    assert sooner is not None
    assert 0 <= sooner < soon <= 64


def test_where_nothing_is_learned_no_shortage_is_told() -> None:
    run = driver(num_blocks=80, reserve="prompt")
    for handle in range(8):
        run.add(handle, 4, 200)
    run.next_steps(10)
    assert run.core.steps_until_shortage() is None
