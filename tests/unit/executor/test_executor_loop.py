"""The executor's cycle over a real backend, its failures, and the process as a whole."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import structlog
import zmq
import zmq.auth
from structlog.testing import capture_logs

from headway_executor.backend import BackendConfig, DeviceLostError, StepOutOfMemoryError, StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.config import ExecutorConfig
from headway_executor.host.statistics import ExecutorStatistics
from headway_executor.links.channel import SchedulerChannel
from headway_executor.links.step_link import StepLink
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_executor.step.adapter_changes import at_once
from headway_executor.step.loop import StepCycle, serve
from headway_process.pulse import Pulse
from headway_proto.adapters import AdapterChange, AdapterChanged, RowAdapter
from headway_proto.columns import decode_column, encode_column, encode_columns
from headway_proto.framing import MAX_BYTES_TO_SCHEDULER
from headway_proto.sampling import SamplingParams
from headway_proto.step import (
    DIGEST_INTERVAL_STEPS,
    AdapterOutput,
    ExecutorHeartbeat,
    ExecutorHello,
    ExecutorOutput,
    NewEpoch,
    NewRequest,
    ResyncRequest,
    RowVector,
    SchedulerHeartbeat,
    SchedulerOutput,
    scheduler_frame_reader,
    scheduler_frame_writer,
)

INCARNATION = 111
GREEDY = SamplingParams(temperature=0)
CONFIG = BackendConfig(model="", block_size=4, num_kv_blocks=64, max_model_len=256, max_num_seqs=4)


class LateBackend(SimulatedBackend):
    """Computes at once and answers when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[Future, StepResult]] = []

    def execute(self, batch):
        future = Future()
        self.answers.append((future, super().execute(batch)))
        return future

    def answer(self, place: int) -> None:
        future, result = self.answers[place]
        future.set_result(result)


class FailingBackend(SimulatedBackend):
    """Fails a step, then works again."""

    def __init__(self, failing_step: int) -> None:
        super().__init__()
        self.failing_step: int | None = failing_step

    def execute(self, batch):
        if batch.step == self.failing_step:
            self.failing_step = None
            raise RuntimeError("the device\nis on fire")
        return super().execute(batch)


class MiscountingBackend(SimulatedBackend):
    def execute(self, batch):
        result = super().execute(batch)
        return msgspec.structs.replace(result, sampled_token_ids=result.sampled_token_ids[:0])


class Scheduler:
    """Enough of a scheduler to run requests of one row."""

    def __init__(self) -> None:
        self.reader = scheduler_frame_reader()
        self.writer = scheduler_frame_writer()
        self.next_step = 0

    def new_epoch(self, epoch: int, executor: int = INCARNATION, *, incarnation: int = 7) -> bytes:
        self.writer.begin_epoch(epoch)
        self.next_step = 0
        return self.writer.encode(NewEpoch(epoch, executor, incarnation))

    def step(self, **fields) -> bytes:
        fields.setdefault("total_num_scheduled_tokens", 1)
        kind = AdapterOutput if "adapters" in fields else SchedulerOutput
        output = kind(epoch=self.writer.epoch, step=self.next_step, **fields)
        self.next_step += 1
        return self.writer.encode(output)

    def admit(self, row: int, prompt: list[int], blocks, *, computed: int = 0, **fields) -> bytes:
        request = NewRequest(
            row=row,
            token_ids=encode_column(prompt),
            num_prompt_tokens=len(prompt),
            block_ids=encode_column(blocks),
            num_computed_tokens=computed,
            sampling=GREEDY,
        )
        num_tokens = len(prompt) - computed
        chunk = encode_columns([np.array([row]), np.array([num_tokens])])
        return self.step(
            scheduled_new_reqs=(request,), num_scheduled_tokens=chunk, total_num_scheduled_tokens=num_tokens, **fields
        )

    def read(self, frames: list[bytes]) -> list:
        return [self.reader.decode(frame).body for frame in frames]


def make_cycle(backend, wake=lambda: None, step_timeout_s=float("inf"), beside=at_once, **settings) -> StepCycle:
    info = backend.open(msgspec.structs.replace(CONFIG, **settings))
    return StepCycle(
        link=StepLink(incarnation=INCARNATION, info=info),
        state=BatchState(info),
        backend=backend,
        log=structlog.get_logger(),
        wake=wake,
        step_timeout_s=step_timeout_s,
        beside=beside,
    )


def outputs(bodies) -> list[ExecutorOutput]:
    return [body for body in bodies if isinstance(body, ExecutorOutput)]


def tokens_of(bodies) -> list[int]:
    return [token for output in outputs(bodies) for token in decode_column(output.sampled_token_ids).tolist()]


def feed(cycle: StepCycle, scheduler: Scheduler, *frames: bytes, now: float = 0.0) -> list:
    return [body for frame in frames for body in scheduler.read(cycle.receive(frame, now))]


@pytest.fixture(autouse=True)
def logs():
    with capture_logs() as entries:
        yield entries


def test_steps_go_in_and_tokens_come_out():
    backend, scheduler = SimulatedBackend(), Scheduler()
    cycle = make_cycle(backend)
    assert isinstance(scheduler.read(cycle.tick(0.0))[0], ExecutorHello)
    bodies = feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(64)))
    bodies += feed(cycle, scheduler, *(scheduler.step() for _ in range(DIGEST_INTERVAL_STEPS)))
    steps = outputs(bodies)
    assert [output.step for output in steps] == list(range(DIGEST_INTERVAL_STEPS + 1))
    assert tokens_of(bodies) == backend.token_hash.continuation([5, 6, 7], DIGEST_INTERVAL_STEPS + 1, GREEDY)
    assert [output.step for output in steps if output.state_digest is not None] == [0, DIGEST_INTERVAL_STEPS]


class HeldReading:
    """Adapters are read when the test says so, as if on another thread."""

    def __init__(self) -> None:
        self.asked: list[tuple[Future, Callable[[], object]]] = []

    def __call__(self, call):
        self.asked.append((Future(), call))
        return self.asked[-1][0]

    def end(self) -> None:
        future, call = self.asked.pop(0)
        future.set_result(call())


def test_an_adapter_is_read_while_steps_run_and_its_rows_wait_for_it():
    backend, scheduler, reading, rung = SimulatedBackend(), Scheduler(), HeldReading(), []
    cycle = make_cycle(backend, wake=lambda: rung.append(1), beside=reading)
    identity = backend.read_adapter("a", "d").adapter.identity
    of_a = {"adapters": (RowAdapter(1, identity),), "finished_rows": encode_column([0])}
    feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(10)))
    changes = [AdapterChange(1, "a", "d"), AdapterChange(2, "a", "d", "other"), AdapterChange(3, "b")]
    assert feed(cycle, scheduler, *map(scheduler.writer.encode, changes)) == []
    assert [output.step for output in outputs(feed(cycle, scheduler, scheduler.step(), scheduler.step()))] == [1, 2]
    waiting = feed(cycle, scheduler, scheduler.admit(1, [8, 9], range(20, 30), **of_a), scheduler.step())
    assert outputs(waiting) == []
    assert cycle.next_deadline > float("-inf"), "nothing is to be done until the adapter is there"
    reading.end()
    assert rung
    first, *rest = scheduler.read(cycle.tick(0.0))
    assert (first.number, first.adapter.identity, first.error, outputs(rest)) == (1, identity, "", [])
    assert len(reading.asked) == 1, "one after the other"
    reading.end()
    bodies = [body for _ in range(4) for body in scheduler.read(cycle.tick(0.0))]
    assert [answer.error for answer in bodies if isinstance(answer, AdapterChanged)] == [
        "d: other files than before, with fingerprint 0000000098dd4acc in place of other",
        "",
    ]
    assert [output.step for output in outputs(bodies)] == [3, 4]
    assert not any(output.errors for output in outputs(bodies))


def test_an_epoch_that_ends_while_an_adapter_is_read_leaves_no_step_waiting():
    backend, scheduler, reading = SimulatedBackend(), Scheduler(), HeldReading()
    cycle = make_cycle(backend, beside=reading)
    of_a = {"adapters": (RowAdapter(0, backend.read_adapter("a", "d").adapter.identity),)}
    change = AdapterChange(1, "a", "d")
    feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.writer.encode(change))
    feed(cycle, scheduler, scheduler.admit(0, [5, 6], range(10), **of_a))
    # The scheduler asks the same again, and sends the same row.
    feed(cycle, scheduler, scheduler.new_epoch(4), scheduler.writer.encode(change))
    assert outputs(feed(cycle, scheduler, scheduler.admit(0, [5, 6], range(10), **of_a))) == []
    # Another one numbers its own.
    feed(cycle, scheduler, scheduler.new_epoch(9, incarnation=8), scheduler.writer.encode(AdapterChange(1, "b", "d")))
    assert [output.step for output in outputs(feed(cycle, scheduler, scheduler.admit(0, [5], range(10))))] == [0]
    answers = []
    for _ in range(3):
        reading.end()
        answers += [body for _ in range(3) for body in scheduler.read(cycle.tick(0.0))]
    assert [answer.adapter.name for answer in answers if isinstance(answer, AdapterChanged)] == ["b"]


def test_futures_are_reported_in_order_and_do_not_hold_up_steps():
    backend, scheduler, rung = LateBackend(), Scheduler(), []
    cycle = make_cycle(backend, wake=lambda: rung.append(1))
    feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(10)))
    feed(cycle, scheduler, scheduler.step(), scheduler.step())
    assert len(backend.answers) == 3
    backend.answer(1)
    assert rung == [1]
    assert cycle.collect(0.0) == []
    backend.answer(0)
    bodies = scheduler.read(cycle.collect(0.0))
    assert [output.step for output in outputs(bodies)] == [0, 1]
    backend.answer(2)
    bodies += scheduler.read(cycle.collect(0.0))
    assert tokens_of(bodies) == backend.token_hash.continuation([5, 6, 7], 3, GREEDY)


def test_a_result_that_comes_after_its_epoch_is_dropped():
    backend, scheduler = LateBackend(), Scheduler()
    cycle = make_cycle(backend)
    feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(10)))
    feed(cycle, scheduler, scheduler.new_epoch(4), scheduler.admit(1, [8, 9], range(10, 20)))
    backend.answer(0)
    assert cycle.collect(0.0) == []
    backend.answer(1)
    (output,) = outputs(scheduler.read(cycle.collect(0.0)))
    assert (output.epoch, output.step) == (4, 0)
    assert tokens_of([output]) == backend.token_hash.continuation([8, 9], 1, GREEDY)


@pytest.mark.parametrize("late", [False, True])
def test_a_failed_step_asks_for_a_new_epoch_and_service_goes_on(late, logs):
    backend, scheduler = FailingBackend(1), Scheduler()
    cycle = make_cycle(ThreadedBackend(backend) if late else backend)

    def exchange(*frames) -> list:
        bodies = feed(cycle, scheduler, *frames)
        deadline = time.monotonic() + 10
        while late and len(bodies) < len(frames) and time.monotonic() < deadline:
            bodies += scheduler.read(cycle.collect(0.0))
        return bodies

    exchange(scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(10)))
    (request,) = exchange(scheduler.step())
    assert request == ResyncRequest(INCARNATION, "step 1 failed: RuntimeError: the device is on fire", failed_step=1)
    assert [entry["event"] for entry in logs] == ["epoch began", "step failed", "epoch lost"]
    assert logs[1]["exc_info"] is not None
    bodies = exchange(scheduler.new_epoch(4), scheduler.admit(0, [5, 6, 7], range(10)), scheduler.step())
    assert tokens_of(bodies) == backend.token_hash.continuation([5, 6, 7], 2, GREEDY)


def test_a_step_that_memory_does_not_hold_asks_for_smaller_ones(logs):
    class FullBackend(SimulatedBackend):
        def execute(self, batch):
            raise StepOutOfMemoryError(int(batch.num_scheduled_tokens.sum()), "no more than that")

    scheduler = Scheduler()
    cycle = make_cycle(FullBackend())
    feed(cycle, scheduler, scheduler.new_epoch(3))
    (request,) = feed(cycle, scheduler, scheduler.admit(0, [5, 6, 7, 8, 9], range(10)))
    assert (request.max_num_batched_tokens, request.failed_step) == (2, 0)
    assert request.reason == "step 0 failed: StepOutOfMemoryError: out of memory with 5 tokens: no more than that"


def test_an_answer_that_no_frame_holds_asks_for_smaller_steps(logs):
    """The scheduler would end the connection, and the same step would come again with the next."""

    class WideBackend(SimulatedBackend):
        def execute(self, batch):
            vectors = tuple(RowVector(row, bytes(3 << 20)) for row in range(int(batch.num_scheduled_tokens.sum())))
            return msgspec.structs.replace(super().execute(batch), vectors=vectors)

    scheduler = Scheduler()
    cycle = make_cycle(WideBackend())
    feed(cycle, scheduler, scheduler.new_epoch(3))
    (request,) = feed(cycle, scheduler, scheduler.admit(0, [5, 6, 7, 8, 9, 10], range(10)))
    assert (request.max_num_batched_tokens, request.failed_step) == (3, 0)
    assert request.reason.startswith("step 0 failed: StepTooLargeError: the answer to 6 tokens takes 19")
    feed(cycle, scheduler, scheduler.new_epoch(4))
    frames = cycle.receive(scheduler.admit(0, [5, 6, 7, 8, 9], range(10)), 0.0)
    assert [len(scheduler.reader.decode(frame).body.vectors) for frame in frames] == [5]
    assert len(frames[0]) <= MAX_BYTES_TO_SCHEDULER


def test_a_device_that_is_lost_is_reported_and_nothing_follows(logs):
    class LosingBackend(SimulatedBackend):
        def execute(self, batch):
            raise DeviceLostError("an illegal memory access")

    scheduler = Scheduler()
    cycle = make_cycle(LosingBackend())
    feed(cycle, scheduler, scheduler.new_epoch(3))
    (request,) = feed(cycle, scheduler, scheduler.admit(0, [5, 6], range(10)))
    assert request == ResyncRequest(
        INCARNATION, "step 0 failed: DeviceLostError: an illegal memory access", is_leaving=True
    )
    assert isinstance(cycle.device_lost, DeviceLostError)
    assert cycle.collect(0.0) == []


def test_a_step_that_never_returns_means_that_the_device_is_lost(logs):
    class HangingBackend(SimulatedBackend):
        def execute(self, batch):
            result = super().execute(batch)
            future = Future()
            if batch.step < 2:
                future.set_result(result)
            return future

    scheduler, backend = Scheduler(), HangingBackend()
    cycle = make_cycle(backend, step_timeout_s=10.0)
    for data in (scheduler.new_epoch(3), scheduler.admit(0, [5, 6], range(10))):
        cycle.receive(data, 0.0)
    for now in (50.0, 100.0, 104.0):
        cycle.receive(scheduler.step(), now)
    assert cycle.device_lost is None
    cycle.tick(109.9)
    assert cycle.device_lost is None
    bodies = scheduler.read(cycle.tick(110.1))
    assert bodies[-1].is_leaving
    assert bodies[-1].reason == "step 2 failed: DeviceLostError: no result after 10 s"


def test_an_impossible_diff_asks_for_a_new_epoch(logs):
    scheduler = Scheduler()
    cycle = make_cycle(SimulatedBackend())
    forgotten = []
    cycle._store.forget = lambda: forgotten.append(True)
    feed(cycle, scheduler, scheduler.new_epoch(3))
    (request,) = feed(cycle, scheduler, scheduler.step(finished_rows=encode_column([2])))
    problem = "step 0: finished_rows: row 2 is not live"
    assert request == ResyncRequest(INCARNATION, problem, is_in_another_state=True)
    assert forgotten, "what was copied to the host may be anything"
    assert feed(cycle, scheduler, scheduler.step(total_num_scheduled_tokens=0)) == []


def test_a_backend_that_answers_too_few_tokens_is_caught():
    scheduler = Scheduler()
    cycle = make_cycle(MiscountingBackend())
    (_, request) = feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6], range(10)))
    assert "the backend answered 0 tokens, not 1" in request.reason


def test_a_step_that_failed_is_not_pending_any_more():
    statistics = ExecutorStatistics()
    statistics.record_step(8, 2, 1.0)
    statistics.record_step(8, 2, 1.1)
    statistics.record_failure("RuntimeError")
    statistics.record_result(500, 0, 1.2)
    assert statistics.num_pending == 0


def test_rows_are_forgotten_at_the_backend_after_a_new_epoch():
    """The same row, blocks and a different prompt: stale cache or history would be noticed by the simulated backend."""
    backend, scheduler = SimulatedBackend(), Scheduler()
    cycle = make_cycle(backend)
    for epoch, prompt in enumerate(([5, 6, 7], [5, 6, 8], [1]), start=1):
        bodies = feed(cycle, scheduler, scheduler.new_epoch(epoch), scheduler.admit(0, prompt, range(10)))
        bodies += feed(cycle, scheduler, *(scheduler.step() for _ in range(5)))
        assert tokens_of(bodies) == backend.token_hash.continuation(prompt, 6, GREEDY)


class BlockTableReader(SimulatedBackend):
    """A slow backend that reads its batch's block table after the next steps have been applied."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.threads = set()

    def open(self, config):
        self.threads.add(threading.get_ident())
        return super().open(config)

    def execute(self, batch):
        self.threads.add(threading.get_ident())
        self.go_on.wait(10)
        return super().execute(batch)


def test_a_threaded_backend_keeps_its_own_block_tables():
    """Row 0 is given to another request while steps of the first still wait to be run."""
    backend, scheduler = BlockTableReader(), Scheduler()
    threaded = ThreadedBackend(backend)
    cycle = make_cycle(threaded)
    feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], [0, 1]), scheduler.step())
    feed(cycle, scheduler, scheduler.step(finished_rows=encode_column([0]), total_num_scheduled_tokens=0))
    feed(cycle, scheduler, scheduler.admit(0, [8, 9], [2, 3]))
    backend.go_on.set()
    bodies: list = []
    deadline = time.monotonic() + 10
    while len(outputs(bodies)) < 4 and time.monotonic() < deadline:
        bodies += scheduler.read(cycle.collect(0.0))
    first, second = ([5, 6, 7], 2), ([8, 9], 1)
    expected = [
        token for prompt, count in (first, second) for token in backend.token_hash.continuation(prompt, count, GREEDY)
    ]
    assert tokens_of(bodies) == expected
    assert len(backend.threads) == 1
    assert threading.get_ident() not in backend.threads
    threaded.close()
    threaded.close()
    with pytest.raises(RuntimeError, match="closed"):
        threaded.open(BackendConfig(model=""))


class SwaplessBackend(SimulatedBackend):
    """Whose memory for swapped-out blocks is gone."""

    def move_blocks(self, **moves):
        raise MemoryError("the host pool is gone")


@pytest.mark.parametrize("wrap", [lambda backend: backend, ThreadedBackend])
def test_a_swapped_request_goes_on_and_its_moves_are_timed(wrap):
    """Swapped out as another request takes its row and its blocks; back again in blocks of its own."""
    backend = SimulatedBackend()
    executor = wrap(backend)
    cycle, scheduler = make_cycle(executor, options={"swap_us_per_block": "700"}), Scheduler()
    expected = backend.token_hash.continuation([5, 6, 7], 4, GREEDY)
    history = [5, 6, 7, *expected[:2]]
    frames = (
        scheduler.new_epoch(3),
        scheduler.admit(0, [5, 6, 7], [0, 1]),
        scheduler.step(),
        scheduler.admit(0, [8, 9], [0, 1], finished_rows=encode_column([0]), swap_out=column_pair([0], [62])),
        scheduler.admit(
            0, history, [1, 3], computed=4, finished_rows=encode_column([0]), swap_in=column_pair([62], [1])
        ),
        scheduler.step(),
    )
    bodies = feed(cycle, scheduler, *frames)
    collect(cycle, scheduler, bodies, lambda: len(outputs(bodies)) == 5)
    assert tokens_of(bodies) == [*expected[:2], *backend.token_hash.continuation([8, 9], 1, GREEDY), *expected[2:]]
    assert [output.move_time_us for output in outputs(bodies)] == [0, 0, 700, 700, 0]
    executor.close()


@pytest.mark.parametrize("wrap", [lambda backend: backend, ThreadedBackend])
def test_a_failed_move_is_a_failed_step(wrap):
    executor = wrap(SwaplessBackend())
    cycle, scheduler = make_cycle(executor), Scheduler()
    bodies = feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], [0, 1]))
    bodies += feed(cycle, scheduler, scheduler.step(swap_out=column_pair([0], [1])))
    collect(cycle, scheduler, bodies, lambda: isinstance(bodies[-1], ResyncRequest))
    assert bodies[-1].reason == "step 1 failed: MemoryError: the host pool is gone"
    executor.close()


def test_swapping_in_what_an_earlier_epoch_swapped_out_asks_for_a_new_epoch():
    cycle, scheduler = make_cycle(SimulatedBackend()), Scheduler()
    feed(cycle, scheduler, scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], [0, 1]))
    feed(cycle, scheduler, scheduler.step(swap_out=column_pair([0], [60])), scheduler.new_epoch(4))
    back = scheduler.admit(0, [5, 6, 7, 8], [1], computed=3, swap_in=column_pair([60], [1]))
    (request,) = feed(cycle, scheduler, back)
    assert request.reason == "step 0: swap_in: host block 60 holds nothing that this epoch swapped out or exported"


def column_pair(first: list[int], second: list[int]) -> bytes:
    return encode_columns([np.array(first), np.array(second)])


def collect(cycle: StepCycle, scheduler: Scheduler, bodies: list, done: Callable[[], bool]) -> None:
    """Take in what a threaded backend has finished, until there is enough of it."""
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        bodies += scheduler.read(cycle.collect(0.0))


def test_serve_answers_over_a_socket_and_stops(tmp_path):
    address = f"ipc://{tmp_path}/step"
    scheduler, backend, stop = Scheduler(), SimulatedBackend(), threading.Event()
    channel = SchedulerChannel(address)
    cycle = make_cycle(backend, wake=channel.wake)
    thread = threading.Thread(target=serve, args=(cycle, channel, stop.is_set))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(address)
        thread.start()
        peer, _ = receive(router)
        for frame in (scheduler.new_epoch(3), scheduler.admit(0, [5, 6, 7], range(10)), scheduler.step()):
            router.send_multipart([peer, frame])
        bodies: list = []
        while len(outputs(bodies)) < 2:
            bodies += scheduler.read([receive(router)[1]])
        assert tokens_of(bodies) == backend.token_hash.continuation([5, 6, 7], 2, GREEDY)
        stop.set()
        channel.wake()
        thread.join(5)
    assert not thread.is_alive()
    channel.close()


def receive(router) -> list[bytes]:
    assert router.poll(10_000), "no frame within 10 s"
    return router.recv_multipart()


class ExecutorProcess:
    """A real executor process."""

    def __init__(self, prefix: str = "", **settings) -> None:
        config = ExecutorConfig(**{"backend": "simulated", "max_num_seqs": 4, **settings})
        program = textwrap.dedent(
            f"""
            import sys, msgspec
            from headway_executor.config import ExecutorConfig
            from headway_executor.process import run
            {prefix}
            sys.exit(run(msgspec.json.decode({msgspec.json.encode(config)!r}, type=ExecutorConfig)))
            """
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def finish(self, timeout: float = 20) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=timeout)
        return self.process.returncode, stderr


def test_the_process_serves_and_ends_cleanly(tmp_path):
    address = f"ipc://{tmp_path}/step"
    scheduler = Scheduler()
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as router,
        ExecutorProcess(step_address=address, log_format="json", num_kv_blocks=512) as executor,
    ):
        router.linger = 0
        router.bind(address)
        peer, frame = receive(router)
        (hello,) = scheduler.read([frame])
        assert (hello.info.num_blocks, hello.info.max_num_rows) == (512, 4)
        router.send_multipart([peer, scheduler.new_epoch(3, hello.incarnation)])
        router.send_multipart([peer, scheduler.admit(0, [5, 6, 7], range(10))])
        bodies: list = []
        while not outputs(bodies):
            bodies += scheduler.read([receive(router)[1]])
        process = psutil.Process(executor.process.pid)
        before = process.cpu_times()
        for _ in range(4):
            time.sleep(0.25)
            router.send_multipart([peer, scheduler.writer.encode(SchedulerHeartbeat(7))])
        after = process.cpu_times()
        assert after.user + after.system - before.user - before.system <= 0.05, "an idle executor sleeps"
        while router.poll(0):
            bodies += scheduler.read([receive(router)[1]])
        assert sum(isinstance(body, ExecutorHeartbeat) for body in bodies) >= 3
        loaded = {Path(entry.path).name for entry in process.memory_maps()}
        assert not any("torch" in name for name in loaded), "the simulated backend needs no torch"
        executor.process.send_signal(signal.SIGTERM)
        code, stderr = executor.finish()
    assert code == 0
    events = [json.loads(line)["event"] for line in stderr.splitlines()]
    assert events == ["opening the backend", "executor ready", "epoch began", "executor stopped"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_without_a_scheduler_waits_and_ends_on_a_signal(number):
    with ExecutorProcess(step_address="tcp://127.0.0.1:9") as executor:
        for line in executor.process.stderr:
            if "executor ready" in line:
                break
        time.sleep(0.2)
        assert executor.process.poll() is None
        executor.process.send_signal(number)
        code, stderr = executor.finish()
    assert code == 0
    assert "Traceback" not in stderr


def test_a_process_that_still_loads_ends_on_a_signal():
    slow = (
        "import time, headway_executor.backends.simulated as s; "
        "s.SimulatedBackend.open = lambda *_: (sys.stderr.write('loading\\n'), time.sleep(60))"
    )
    with ExecutorProcess(prefix=slow) as executor:
        for line in executor.process.stderr:
            if line == "loading\n":
                break
        executor.process.send_signal(signal.SIGTERM)
        code, _ = executor.finish(timeout=5)
    assert code == 0


def test_the_process_ends_with_its_parent():
    """A launcher that is killed leaves no executor behind."""
    launcher = textwrap.dedent(
        """
        import subprocess, sys, time
        program = '''
        from headway_executor.config import ExecutorConfig
        from headway_executor.process import run
        run(ExecutorConfig(backend="simulated", exit_with_parent=True, log_level="info"))
        '''
        child = subprocess.Popen([sys.executable, "-c", program.replace("\\n        ", "\\n")], stderr=subprocess.PIPE)
        for line in child.stderr:
            if b"executor ready" in line:
                break
        print(child.pid, flush=True)
        time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as parent:
        executor = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        deadline = time.monotonic() + 10
        while has_not_ended(executor):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def has_not_ended(process: psutil.Process) -> bool:
    """An orphan that ended may stay a zombie for as long as its new parent likes."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"block_size": 12}, 2, "block_size: 12 is not allowed; allowed: a power of two from 1 to 1024"),
        ({"backend": "nope"}, 2, "backend: 'nope' is not allowed; allowed: simulated, torch"),
        ({"swap_space_mib": 1}, 2, "swap_space_mib: 1 is not allowed; one block takes 2097152 bytes, so allowed: 0 "),
        ({"max_model_len": 9999}, 2, "max_model_len 9999 is not allowed; allowed: 1 to the model's context, 4096"),
        ({"model": "/no/such/model"}, 3, "model: '/no/such/model': its config.json cannot be read: "),
    ],
)
def test_a_refused_start_is_one_line_and_an_exit_code(settings, code, message):
    with ExecutorProcess(**settings, log_level="warning") as executor:
        returned, stderr = executor.finish()
    assert returned == code
    assert stderr.startswith("headway executor: " + message)
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size: 0 is not allowed; allowed: a power of two"),
        ({"block_size": 2048}, "block_size: 2048 is not allowed; allowed: a power of two"),
        ({"max_num_seqs": 0}, "max_num_seqs: 0 is not allowed; allowed: 1 to "),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: 0 is not allowed; allowed: 1 to "),
        ({"swap_space_mib": -2}, "swap_space_mib: -2 is not allowed; allowed: -1 to 16777216"),
        ({"num_kv_blocks": -1}, "num_kv_blocks: -1 is not allowed; allowed: 0 to "),
        ({"seed": 1 << 64}, "seed: 18446744073709551616 is not allowed; allowed: 0 to "),
        ({"device": "tpu"}, "device: 'tpu' is not allowed; allowed: cpu, cuda or cuda:N"),
        ({"device": "cuda:x"}, "device: 'cuda:x' is not allowed"),
        ({"device": "cpu:0"}, "device: 'cpu:0' is not allowed"),
        ({"step_address": "ipc://" + "x" * 108}, "allowed: an ipc path of at most 107 bytes, not 108"),
        ({"step_address": "udp://127.0.0.1:5"}, "allowed: ipc://PATH or tcp://HOST:PORT"),
        ({"step_address": "tcp://127.0.0.1"}, "allowed: ipc://PATH or tcp://HOST:PORT"),
        ({"step_address": "tcp://127.0.0.1:99999"}, "allowed: ipc://PATH or tcp://HOST:PORT"),
        (
            {"step_address": "tcp://scheduler:5555"},
            "a loopback tcp:// address, or any tcp:// address together with curve_keys",
        ),
        (
            {"curve_keys": "no/such/folder"},
            "curve_keys: 'no/such/folder' is not allowed; allowed: a directory with scheduler.key",
        ),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError) as refused:
        ExecutorConfig(**settings).validate()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_settings_that_are_allowed():
    for settings in (
        {},
        {"step_address": "tcp://localhost:5000"},
        {"step_address": "tcp://[::1]:5000"},
        {"step_address": "ipc://" + "x" * 107},
        {"device": "cuda:3", "block_size": 1, "seed": (1 << 64) - 1},
    ):
        ExecutorConfig(**settings).validate()


def test_every_setting_has_a_default_and_a_help_text():
    for field in msgspec.structs.fields(ExecutorConfig):
        assert not field.required
        assert field.type.__metadata__[0].description


def test_a_network_link_works_with_keys_and_not_with_others(tmp_path):
    keys, strangers = tmp_path / "keys", tmp_path / "strangers"
    for directory in (keys, strangers):
        directory.mkdir()
        zmq.auth.create_certificates(directory, "executor")
    zmq.auth.create_certificates(keys, "scheduler")
    (strangers / "scheduler.key").write_bytes((strangers / "executor.key").read_bytes())
    ExecutorConfig(step_address="tcp://scheduler:5555", curve_keys=str(keys)).validate()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.curve_publickey, router.curve_secretkey = zmq.auth.load_certificate(keys / "scheduler.key_secret")
        router.curve_server = True
        port = router.bind_to_random_port("tcp://127.0.0.1")
        for directory, works in ((keys, True), (strangers, False)):
            channel = SchedulerChannel(f"tcp://127.0.0.1:{port}", str(directory))
            deadline = time.monotonic() + (5 if works else 0.5)
            while time.monotonic() < deadline and not router.poll(20):
                channel.send(b"frame")
            assert bool(router.poll(0)) is works
            while router.poll(0):
                router.recv_multipart()
            channel.close()


def test_a_damaged_key_file_is_named(tmp_path):
    zmq.auth.create_certificates(tmp_path, "executor")
    (tmp_path / "scheduler.key").write_text("nothing\n")
    with pytest.raises(ValueError, match=r"curve_keys: .* usable scheduler\.key "):
        SchedulerChannel("tcp://127.0.0.1:9", str(tmp_path))


class BusyCycle:
    """Steps run at once, and the next frame is there whenever one has been taken."""

    device_lost = None
    next_deadline = float("inf")

    def __init__(self) -> None:
        self.num_taken = 0

    def tick(self, now: float) -> list[bytes]:
        return []

    def receive(self, data: bytes, now: float) -> list[bytes]:
        self.num_taken += 1
        return []


class FullChannel:
    """Never empty."""

    def receive(self) -> bytes:
        return b"frame"


def test_a_process_that_is_never_idle_gives_signs_of_life():
    reader, writer = os.pipe()
    cycle, seconds = BusyCycle(), iter(range(1000))
    serve(cycle, FullChannel(), lambda: cycle.num_taken >= 20, clock=lambda: float(next(seconds)), pulse=Pulse(writer))
    os.close(writer)
    with os.fdopen(reader, "rb") as signs:
        assert len(signs.read()) == 21
