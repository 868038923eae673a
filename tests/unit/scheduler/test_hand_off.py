"""Two cores and their executors' pools: a request leaves one with its blocks and goes on in the other."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from headway_executor.backend import StepBatch
from headway_executor.batch.batch_state import BatchState
from headway_lab.flight.cells import Kind, StepCollector, StepRange, Transfer, hand_offs_in
from headway_proto.columns import decode_columns, encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import (
    DIGEST_INTERVAL_STEPS,
    BackendInfo,
    ExecutorOutput,
    SchedulerOutput,
    TransferringOutput,
)
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.view import SchedulerView
from headway_scheduler.flight.records import Answered, Turn
from headway_scheduler.flight.replay import Event

SIZE, VOCABULARY = 4, 251
ME = Origin(0, 1)


def next_token(tokens: list[int]) -> int:
    return (sum(tokens) * 7 + len(tokens)) % VOCABULARY


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Place:
    """One executor with contents that it checks, its host pool, and its core."""

    def __init__(
        self,
        name: str,
        pools: dict[str, "Place"],
        limits: SchedulerLimits,
        num_host_blocks: int = 16,
        size: int = SIZE,
    ) -> None:
        self.size = size
        info = BackendInfo(
            backend="test",
            device="test",
            dtype="test",
            model_name="test",
            model_fingerprint="test",
            num_blocks=32,
            block_size=size,
            max_model_len=96,
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            max_num_rows=8,
            num_host_blocks=num_host_blocks,
            host_pool=name,
            block_addresses=(f"shm:{name}",),
        )
        self.info, self.pools = info, pools
        pools[name] = self
        self.core = Scheduler(limits, ExecutorCapacity.of(info), 1)
        self.mirror = BatchState(info)
        self.mirror.begin_epoch()
        self.device: dict[int, list[int]] = {}
        self.host: dict[int, tuple[int, int, list[int]]] = {}
        """(epoch, step, tokens) by host block."""
        self.tokens: dict[int, list[int]] = {}
        self.is_unsound: dict[int, bool] = {}
        self.answers: deque[ExecutorOutput] = deque()
        self.received: list[int] = []
        self.is_stale: Callable[[int], bool] = lambda _: False

    def schedule(self) -> SchedulerOutput | None:
        output = self.core.schedule(0.0)
        if output is not None:
            self.answers.append(self._run(output))
        return output

    def update(self) -> StepEvents:
        events = self.core.update(self.answers.popleft(), 0.0)
        self.received += events.token_ids.tolist()
        for stored in self.core.moving.take_ended_leases():
            assert self.pools[stored.pool].core.moving.return_lease(stored)
        return events

    def lose_process(self, epoch: int) -> None:
        """Another process takes the pool over."""
        self.answers.clear()
        self.device.clear()
        self.mirror.begin_epoch()
        self.core.begin_epoch(ExecutorCapacity.of(self.info), epoch)

    def run_until_left(self) -> Request:
        while True:
            self.schedule()
            if self.update().left:
                request = self.core.moving.release(ME)
                assert request is not None
                return request

    def _run(self, output: SchedulerOutput) -> ExecutorOutput:
        batch, moves = self.mirror.apply(output)
        if moves is not None:
            for device, host in moves.swap_out.T.tolist():
                self.host[host] = output.epoch, output.step, list(self.device.get(device, [-2] * self.size))
            for host, device in moves.swap_in.T.tolist():
                self.device[device] = list(self.host[host][2])
        stale = self._pull(output) if isinstance(output, TransferringOutput) else set()
        for new in batch.new_rows:
            self.tokens[new.row] = new.token_ids.tolist()
            table = batch.block_table[new.row, : -(-new.num_computed_tokens // self.size)].tolist()
            self.is_unsound[new.row] = bool(stale.intersection(table))
        drawn = self._run_rows(batch)
        if isinstance(output, TransferringOutput) and output.exports:
            for device, host in decode_columns(output.exports, 2).T.tolist():
                self.host[host] = output.epoch, output.step, list(self.device[device])
        bad = [new.row for new in batch.new_rows if self.is_unsound[new.row]]
        return ExecutorOutput(
            epoch=output.epoch,
            step=output.step,
            sampled_token_ids=encode_column(drawn),
            state_digest=self.mirror.digest() if output.step % DIGEST_INTERVAL_STEPS == 0 else None,
            stale_rows=encode_column(sorted(bad)) if bad else b"",
        )

    def _run_rows(self, batch: StepBatch) -> list[int]:
        drawn = []
        columns = (batch.rows, batch.num_computed_tokens, batch.num_scheduled_tokens, batch.samples)
        for row, start, count, samples in zip(*(column.tolist() for column in columns), strict=True):
            table, tokens = batch.block_table[row].tolist(), self.tokens[row]
            if not self.is_unsound[row]:
                held = [self.device[table[place // self.size]][place % self.size] for place in range(start)]
                assert held == tokens[:start], f"row {row} runs on what is not its own"
            for place in range(start, start + count):
                self.device.setdefault(table[place // self.size], [-1] * self.size)[place % self.size] = tokens[place]
            if samples:
                tokens.append(next_token(tokens))
                drawn.append(0 if self.is_unsound[row] else tokens[-1])
        return drawn

    def _pull(self, output: TransferringOutput) -> set[int]:
        stale = set()
        for pull in output.pulls:
            there = self.pools[pull.pool].host
            for host, step, device in decode_columns(pull.blocks, 3).T.tolist():
                epoch, written, tokens = there.get(host, (0, 0, []))
                is_wrong = (epoch, written) != (pull.epoch, step) or self.pools[pull.pool].size != self.size
                if is_wrong or self.is_stale(host):
                    stale.add(device)
                else:
                    self.device[device] = list(tokens)
        return stale


def places(limits: SchedulerLimits | None = None, num_host_blocks: int = 16) -> tuple[Place, Place]:
    pools: dict[str, Place] = {}
    limits = limits or SchedulerLimits()
    return Place("a", pools, limits, num_host_blocks), Place("b", pools, limits, num_host_blocks)


def add(place: Place, num_prompt_tokens: int = 10, max_tokens: int = 12, origin: Origin = ME) -> list[int]:
    prompt = [(origin.handle * 31 + place) % VOCABULARY for place in range(num_prompt_tokens)]
    place.core.add_request(
        NewRequestEvent(
            origin=origin,
            request_id=str(origin.handle),
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            stop_token_ids=frozenset(),
            priority=3,
            tenant="",
            ttft_slo_ms=0,
            itl_slo_ms=0,
        ),
        now=0.0,
    )
    return prompt


def leaving(place: Place) -> None:
    request = place.core.find(ME)
    assert request is not None
    request.is_leaving = True


def run_to_end(place: Place) -> None:
    while place.core.num_unfinished or place.answers:
        if place.schedule() is None or len(place.answers) > 1:
            place.update()


def assert_all_is_free(*all_places: Place) -> None:
    for place in all_places:
        pool = place.core.swapping.books.pool
        assert place.core.pool.num_free == 32
        assert pool.num_free + pool.num_released == place.info.num_host_blocks
        assert place.core.swapping.books.num_leased == 0


def test_a_request_goes_on_elsewhere_behind_its_prompt_and_nothing_is_computed_twice() -> None:
    a, b = places()
    prompt = add(a)
    leaving(a)
    request = a.run_until_left()
    assert a.received == expected(prompt, 1)
    assert request.stored is not None
    assert request.stored.num_tokens == 10
    assert a.core.swapping.books.num_leased == 3
    b.core.moving.adopt(request)
    run_to_end(b)
    assert a.received + b.received == expected(prompt, 12)
    assert b.core.counters.num_pulled_tokens == 10
    assert not b.core.counters.wasted_tokens
    assert_all_is_free(a, b)


def test_who_only_decodes_waits_for_no_prompt_under_way() -> None:
    a, b = places(SchedulerLimits(max_num_batched_tokens=8))
    prompt = add(a)
    leaving(a)
    request = a.run_until_left()
    assert request.only_decodes
    add(b, num_prompt_tokens=40, max_tokens=1, origin=Origin(0, 2))
    b.schedule()
    b.core.moving.adopt(request)
    output = b.schedule()
    assert output is not None
    assert [new.num_prompt_tokens for new in output.scheduled_new_reqs] == [10]
    assert output.total_num_scheduled_tokens == 8, "the prompt gets what is left"
    b.update()
    assert b.update().token_ids.tolist() == expected(prompt, 2)[1:]
    b.received.clear()
    run_to_end(b)
    assert_all_is_free(a, b)


def test_the_prompt_stays_in_the_prefix_cache_of_the_cell_that_ran_it() -> None:
    a, b = places()
    add(a)
    leaving(a)
    b.core.moving.adopt(a.run_until_left())
    add(a, origin=Origin(0, 2), num_prompt_tokens=10)
    prompt = add(a, origin=Origin(0, 1))
    request = a.core.find(ME)
    assert request is not None
    most_blocks = len(prompt) // a.core.capacity.block_size
    assert a.core.prefixes.find(request, np.array(prompt, dtype=np.int32).tobytes(), most_blocks)[0].tolist()


def test_a_decoding_request_leaves_with_its_next_token() -> None:
    a, b = places()
    prompt = add(a)
    for _ in range(4):
        a.schedule()
        a.update()
    a.schedule()
    assert a.core.moving.let_leave(ME)
    a.schedule()
    assert not a.update().left
    assert a.schedule() is None
    assert a.update().left == (ME,)
    request = a.core.moving.release(ME)
    assert request is not None
    b.core.moving.adopt(request)
    run_to_end(b)
    assert a.received + b.received == expected(prompt, 12)
    assert_all_is_free(a, b)


def test_the_newest_that_decodes_and_has_tokens_left_is_asked_for() -> None:
    a, _ = places()
    add(a, max_tokens=12)
    add(a, max_tokens=4, origin=Origin(0, 2))
    for _ in range(2):
        a.schedule()
        a.update()
    gaps = SchedulerView(a.core).gaps
    found = [gaps.newest_decoding(least_tokens) for least_tokens in (2, 3, 10, 11)]
    assert [request and request.new.origin.handle for request in found] == [2, 1, 1, None]


@pytest.mark.parametrize("must_leave", [False, True])
def test_without_room_on_the_host_it_stays_or_leaves_without_its_blocks(must_leave: bool) -> None:
    a, b = places(num_host_blocks=2)
    prompt = add(a)
    a.schedule()
    a.update()
    assert a.core.moving.let_leave(ME, must_leave=must_leave)
    if must_leave:
        request = a.run_until_left()
        assert request.stored is None
        b.core.moving.adopt(request)
        run_to_end(b)
    else:
        run_to_end(a)
    assert a.received + b.received == expected(prompt, 12)
    assert_all_is_free(a, b)


@pytest.mark.parametrize("steps_before_the_answer", [1, 2])
def test_what_follows_from_a_stale_block_is_computed_again(steps_before_the_answer: int) -> None:
    a, b = places()
    prompt = add(a)
    leaving(a)
    b.core.moving.adopt(a.run_until_left())
    b.is_stale = lambda host: host == 1
    for _ in range(steps_before_the_answer):
        b.schedule()
    events = b.update()
    assert not len(events.token_ids)
    assert b.core.counters.num_stale_pulls == 1
    (request,) = b.core.requests()
    assert request.has_lost_blocks
    run_to_end(b)
    assert a.received + b.received == expected(prompt, 12)
    assert_all_is_free(a, b)


def test_a_stale_row_that_was_preempted_and_swapped_out_meanwhile_is_computed_again() -> None:
    a, b = places(SchedulerLimits(preemption="swap"))
    prompt = add(a)
    leaving(a)
    b.core.moving.adopt(a.run_until_left())
    b.is_stale = lambda host: host == 0
    b.schedule()
    b.core.run_alone(Origin(0, 9))
    add(b, origin=Origin(0, 9), max_tokens=2)
    b.core.run_alone(Origin(0, 9))
    b.schedule()
    b.update()
    b.core.run_alone(None)
    run_to_end(b)
    mine = [token for token in a.received + b.received if token in expected(prompt, 12)]
    assert mine[:1] == expected(prompt, 1)
    assert b.core.counters.num_stale_pulls == 1
    assert_all_is_free(a, b)


@pytest.mark.parametrize("num_cached_tokens", [0, 2, 4, 8, 10])
@pytest.mark.parametrize("size", [1, 2, 8])
def test_blocks_of_another_size_are_computed_again(size: int, num_cached_tokens: int) -> None:
    """Also where the prefix cache has as many blocks as the pool, which hold fewer tokens."""
    a = places()[0]
    b = Place("c", a.pools, SchedulerLimits(), size=size)
    prompt = add(a)
    leaving(a)
    request = a.run_until_left()
    if num_cached_tokens:
        add(b, num_prompt_tokens=num_cached_tokens, max_tokens=1, origin=Origin(1, 1))
        run_to_end(b)
        b.received.clear()
    b.core.moving.adopt(request)
    run_to_end(b)
    assert a.received + b.received == expected(prompt, 12)
    assert_all_is_free(a, b)


def in_its_prompt_with_stored_blocks(a: Place, b: Place) -> list[int]:
    """``ME`` left ``b`` with two blocks of its prompt, and runs in ``a``, in row 0, which is to pull them."""
    prompt = add(b, num_prompt_tokens=40)
    request = b.core.moving.release(ME)
    assert request is not None
    books = b.core.swapping.books
    blocks = books.allocate(2)
    books.record_writes(blocks, b.core.epoch, 0)
    request.stored = books.lease(blocks, 2 * SIZE)
    request.num_swapped_tokens = 2 * SIZE
    a.core.moving.adopt(request)
    a.schedule()
    assert request.row == 0
    return prompt


def test_the_stale_row_of_a_request_that_went_on_elsewhere_is_nobody_elses() -> None:
    a, b = places(SchedulerLimits(max_num_batched_tokens=8))
    prompt = in_its_prompt_with_stored_blocks(a, b)
    request = a.core.moving.release(ME)
    assert request is not None
    b.core.moving.adopt(request)
    b.schedule()
    other = Origin(0, 2)
    prompt_of_other = add(a, num_prompt_tokens=40, origin=other)
    a.schedule()
    assert [found.row for found in (*a.core.requests(), *b.core.requests())] == [0, 0]
    a.update()
    assert [found.row for found in (*a.core.requests(), *b.core.requests())] == [0, 0]
    run_to_end(a)
    run_to_end(b)
    assert a.received == expected(prompt_of_other, 12)
    assert b.received == expected(prompt, 12)
    assert_all_is_free(a, b)


def test_what_a_lost_executor_was_to_fetch_is_of_no_use_to_who_went_on_elsewhere() -> None:
    a, b = places(SchedulerLimits(max_num_batched_tokens=8))
    prompt = in_its_prompt_with_stored_blocks(a, b)
    request = a.core.moving.release(ME)
    assert request is not None
    b.core.moving.adopt(request)
    b.schedule()
    a.lose_process(2)
    assert (request.stored, request.num_swapped_tokens) == (None, 0)
    for stored in a.core.moving.take_ended_leases():
        assert b.core.moving.return_lease(stored)
    run_to_end(b)
    assert b.received == expected(prompt, 12)
    assert_all_is_free(a, b)


def test_stale_rows_that_pulled_nothing_are_no_answer() -> None:
    a, _ = places()
    add(a)
    a.schedule()
    answer = a.answers.popleft()
    wrong = ExecutorOutput(
        epoch=answer.epoch,
        step=answer.step,
        sampled_token_ids=answer.sampled_token_ids,
        state_digest=answer.state_digest,
        stale_rows=encode_column([0]),
    )
    with pytest.raises(StateMismatch, match="stale rows"):
        a.core.update(wrong, 0.0)


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_an_aborted_request_returns_its_lease(is_scheduled: bool) -> None:
    a, b = places()
    add(a)
    leaving(a)
    b.core.moving.adopt(a.run_until_left())
    if is_scheduled:
        b.schedule()
    assert b.core.abort(ME) is not None
    if is_scheduled:
        b.update()
    for stored in b.core.moving.take_ended_leases():
        assert a.core.moving.return_lease(stored)
    assert_all_is_free(a)
    assert b.core.pool.num_free == 32


def test_what_was_to_be_fetched_is_fetched_again_after_the_loss_of_the_second_executor() -> None:
    a, b = places()
    prompt = add(a)
    leaving(a)
    b.core.moving.adopt(a.run_until_left())
    b.schedule()
    b.lose_process(2)
    run_to_end(b)
    assert a.received + b.received == expected(prompt, 12)
    assert b.core.counters.num_pulled_tokens == 20
    assert_all_is_free(a, b)


def test_swapped_out_requests_and_kept_prefixes_outlive_the_process_that_wrote_them() -> None:
    a, _ = places(SchedulerLimits(preemption="swap", prefix_offload="always"))
    add(a)
    for _ in range(3):
        a.schedule()
        a.update()
    add(a, origin=Origin(0, 9), max_tokens=2)
    a.core.run_alone(Origin(0, 9))
    a.schedule()
    a.update()
    a.core.run_alone(None)
    a.lose_process(2)
    output = a.schedule()
    assert isinstance(output, TransferringOutput)
    assert {pull.epoch for pull in output.pulls} == {1}
    run_to_end(a)
    assert a.core.counters.num_pulled_tokens == 12
    assert sum(a.core.counters.wasted_tokens.values()) == 10, "only what the device alone had is computed again"
    assert len(a.received) == 12 + 2


@pytest.mark.parametrize("goes_elsewhere", [False, True])
def test_nothing_is_used_that_an_executor_in_another_state_has_written(goes_elsewhere: bool) -> None:
    """An executor whose tables are others than the scheduler's copies other blocks to the host than it is told to."""
    a, b = places(SchedulerLimits(preemption="swap", prefix_offload="always"))
    prompt = add(a)
    for _ in range(3):
        a.schedule()
        a.update()
    add(a, origin=Origin(0, 9), max_tokens=2)
    a.core.run_alone(Origin(0, 9))
    a.schedule()
    assert a.host, "nothing was copied"
    answer = a.answers.popleft()
    with pytest.raises(StateMismatch, match="stale rows"):
        a.core.update(msgspec.structs.replace(answer, stale_rows=encode_column([7])), 0.0)
    a.core.run_alone(None)
    if goes_elsewhere:
        left = a.core.release_all()
        assert not any(request.stored for request in left)
        for request in left:
            b.core.moving.adopt(request)
    a.lose_process(2)
    run_to_end(a)
    run_to_end(b)
    assert a.core.counters.num_pulled_tokens == b.core.counters.num_pulled_tokens == 0
    assert [token for token in a.received + b.received if token in expected(prompt, 12)][:1] == expected(prompt, 1)
    assert len(a.received + b.received) == 12 + 2
    assert_all_is_free(a, b)
    add(a, origin=Origin(0, 10), max_tokens=2)
    run_to_end(a)
    assert a.core.counters.num_pulled_tokens == 0, "nor is a prefix brought back"


def test_books_of_another_pool_take_no_lease_back() -> None:
    a, b = places()
    prompt = add(a)
    leaving(a)
    request = a.run_until_left()
    stored = request.stored
    assert stored is not None
    other = a.info.__class__(**{name: getattr(a.info, name) for name in a.info.__struct_fields__} | {"host_pool": "c"})
    a.info = other
    a.host.clear()
    a.lose_process(2)
    assert not a.core.moving.return_lease(stored)
    b.core.moving.adopt(request)
    b.schedule()
    assert not len(b.core.update(b.answers.popleft(), 0.0).token_ids)
    b.core.moving.take_ended_leases()
    run_to_end(b)
    assert a.received + b.received == expected(prompt, 12)


def test_a_timeline_tells_which_steps_a_request_left_and_joined_with_its_blocks() -> None:
    a, b = places()
    add(a, num_prompt_tokens=20)
    leaving(a)
    seen = StepCollector(StepRange(0, 100))
    fleet = SimpleNamespace(cores={0: a.core, 1: b.core}, moving={})

    def step(cell: int, now: float) -> StepEvents:
        place = (a, b)[cell]
        output = place.schedule()
        assert output is not None
        seen.record(Event(Turn(now), now, output, cell=cell), fleet)
        answer = place.answers[0]
        events = place.update()
        seen.record(Event(Answered(now + 0.25, answer), now + 0.25, events=events, cell=cell), fleet)
        return events

    assert step(0, 1.0).left == (ME,)
    request = a.core.moving.release(ME)
    assert request is not None
    b.core.moving.adopt(request)
    add(a, origin=Origin(0, 2))
    step(0, 2.0)
    step(1, 3.0)
    step(1, 4.0)
    kinds = [[(cell.request_id, cell.kind, cell.transfer) for cell in one.cells] for one in seen.steps]
    assert kinds == [
        [("1", Kind.PREFILL, Transfer.EXPORT)],
        [("2", Kind.PREFILL, Transfer.NONE)],
        [("1", Kind.DECODE, Transfer.PULL)],
        [("1", Kind.DECODE, Transfer.NONE)],
    ]
    (found,) = hand_offs_in(seen.steps)
    assert (found.request_id, found.left.executor, found.joined.executor) == ("1", 0, 1)
    assert found.gap_s == 2.0
