"""The whole scheduler against an executor whose steps fail: who ends with an error, who does not, and how long it takes."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import structlog

from headway_executor.backend import BackendConfig, DeviceLostError, StepBatch, StepOutOfMemoryError, StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.links.step_link import StepLink
from headway_executor.step.loop import StepCycle
from headway_gateway.link.ingress_link import IngressLink
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto import ingress
from headway_proto.columns import encode_column
from headway_proto.ingress import Finished, Submit
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine

LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=16)
CONFIG = BackendConfig(
    model="",
    block_size=4,
    num_kv_blocks=400,
    max_model_len=100,
    max_num_seqs=16,
    options={"vocab_size": "97", "context_length": "100", "real_time": "false"},
)
POISON = 96
LOG = structlog.wrap_logger(structlog.ReturnLogger(), wrapper_class=structlog.make_filtering_bound_logger("critical"))


class Poisoned(SimulatedBackend):
    """Calls ``on_step`` with the poisoned rows among those of each step, and with the step."""

    def __init__(self, on_step: Callable[[list[int], StepBatch], None]) -> None:
        super().__init__()
        self.on_step = on_step
        self.poisoned: set[int] = set()

    def execute(self, batch: StepBatch) -> StepResult:
        self.poisoned.difference_update(batch.finished_rows.tolist())
        for new in batch.new_rows:
            self.poisoned.discard(new.row)
            if POISON in new.token_ids[: new.num_prompt_tokens]:
                self.poisoned.add(new.row)
        self.on_step([row for row in batch.rows.tolist() if row in self.poisoned], batch)
        return super().execute(batch)


class Bench:
    """An engine, one executor at a time and one gateway, without wires; time is a number."""

    def __init__(
        self,
        on_step: Callable[[list[int], StepBatch], None],
        limits: SchedulerLimits = LIMITS,
        config: BackendConfig = CONFIG,
    ) -> None:
        self.config = config
        self.now = 100.0
        self.on_step = on_step
        self.engine = SchedulerEngine(limits, incarnation=5)
        self.gateway = IngressLink(incarnation=7, now=self.now)
        self.num_executors = 0
        self.num_epochs = 0
        self.gateway_is_cut_until = 0.0
        self.start_executor()
        self.sequences: list[LiveSequence] = []

    def start_executor(self) -> None:
        self.num_executors += 1
        backend = Poisoned(self.on_step)
        info = backend.open(self.config)
        self.peer = b"executor-%d" % self.num_executors
        link = StepLink(incarnation=self.num_executors, info=info)
        self.hash = backend.token_hash
        self.cycle = StepCycle(link=link, state=BatchState(info), backend=backend, log=LOG, wake=lambda: None)

    def submit(self, prompt: list[int], max_tokens: int = 12) -> LiveSequence:
        submission = Submit(
            handle=self.gateway.next_handle(),
            request_id=str(len(self.sequences)),
            index=0,
            token_ids=encode_column(prompt),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(),
            ignore_eos=True,
        )
        sequence = LiveSequence(submission, (), lambda: None)
        self.sequences.append(sequence)
        self.gateway.submit(sequence)
        return sequence

    def beat(self) -> None:
        self.now += 0.005
        frames = self.cycle.tick(self.now) + self.cycle.collect(self.now)
        self._to_engine(frames)
        self.engine.run(self.now)
        for peer, frame in self.engine.fleet.links.outgoing:
            if peer == self.peer and self.cycle.device_lost is None:
                self._to_engine(self.cycle.receive(frame, self.now))
        self.engine.fleet.links.outgoing.clear()
        is_cut = self.now < self.gateway_is_cut_until
        for _, frame in self.engine.gateways.outgoing:
            if not is_cut:
                self.gateway.receive(frame, self.now)
        self.engine.gateways.outgoing.clear()
        self.gateway.tick(self.now)
        self.gateway.take_news()
        for frame in self.gateway.take_frames():
            if not is_cut:
                self.engine.gateway_frame(b"gateway", frame, self.now)
        self.num_epochs += sum(notice.event == "epoch opened" for notice in self.engine.notices.take())
        if self.cycle.device_lost is not None:
            self.start_executor()

    def _to_engine(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.engine.executor_frame(self.peer, frame, self.now)

    def run(self, most_s: float = 30.0) -> None:
        """Until every sequence has ended."""
        limit = self.now + most_s
        while any(sequence.end is None for sequence in self.sequences):
            assert self.now < limit, "no end in sight"
            self.beat()

    def check_complete(self, sequence: LiveSequence) -> None:
        assert isinstance(sequence.end, Finished)
        assert sequence.end.reason == ingress.FINISH_LENGTH
        assert sequence.tokens == self.hash.continuation(self.prompt_of(sequence), 12, SamplingParams())

    @staticmethod
    def prompt_of(sequence: LiveSequence) -> list[int]:
        return list(memoryview(sequence.submission.token_ids).cast("i"))

    def check_nothing_left(self) -> None:
        for _ in range(10):
            self.beat()
        core = self.engine.fleet.cells[0].core
        assert core is not None
        assert core.pool.num_free == core.pool.num_blocks
        assert core.alone is None
        assert not self.engine.fleet.brake.has_suspects


def fail(poisoned: list[int], batch: StepBatch) -> None:
    if poisoned:
        raise RuntimeError("poison")


def lose_device(poisoned: list[int], batch: StepBatch) -> None:
    if poisoned:
        raise DeviceLostError("poison")


@pytest.mark.parametrize("batching", ["chunked", "static", "orca", "prefill_first", "split_fuse"])
@pytest.mark.parametrize("num_steps_in_flight", [1, 2, 4])
def test_only_the_request_that_makes_steps_fail_fails(batching: str, num_steps_in_flight: int) -> None:
    limits = msgspec.structs.replace(LIMITS, batching=batching, max_steps_in_flight=num_steps_in_flight)
    bench = Bench(fail, limits)
    innocent = [bench.submit([number, 1, 2, 3, 4]) for number in range(7)]
    guilty = bench.submit([9, 9, POISON])
    late = [bench.submit([number, 5]) for number in range(5)]
    bench.run()
    assert isinstance(guilty.end, Finished)
    assert guilty.end.reason == ingress.FINISH_ERROR
    assert "4 times in a row while it ran, 2 times with nothing beside it" in guilty.end.error
    assert "RuntimeError: poison" in guilty.end.error
    for sequence in innocent + late:
        bench.check_complete(sequence)
    assert bench.num_epochs <= 1 + 4
    bench.check_nothing_left()


def test_a_device_lost_costs_four_executors_at_most() -> None:
    bench = Bench(lose_device)
    innocent = [bench.submit([number, 1, 2, 3, 4]) for number in range(12)]
    guilty = bench.submit([POISON])
    bench.run()
    assert isinstance(guilty.end, Finished)
    assert guilty.end.reason == ingress.FINISH_ERROR
    for sequence in innocent:
        bench.check_complete(sequence)
    assert bench.num_executors == 1 + 4
    bench.check_nothing_left()


@pytest.mark.parametrize("num_losses", [1, 2, 3])
@pytest.mark.parametrize("is_noticed", [False, True], ids=["unnoticed", "noticed"])
def test_a_gateway_that_loses_its_link_does_not_clear_a_suspect_of_guilt(num_losses: int, is_noticed: bool) -> None:
    """It submits everything again: who was lost before is counted on, and who was found guilty meanwhile stays guilty."""
    bench = Bench(lose_device)
    innocent = [bench.submit([number, 1, 2, 3, 4]) for number in range(5)]
    guilty = bench.submit([POISON])
    while bench.num_executors < 1 + num_losses or not guilty.has_run:
        bench.beat()
    if is_noticed:
        bench.engine.gateway_unreachable(b"gateway", bench.now)
    bench.gateway_is_cut_until = bench.now + 1.5
    bench.run()
    assert isinstance(guilty.end, Finished)
    assert guilty.end.reason == ingress.FINISH_ERROR
    assert "4 times in a row while it ran, 2 times with nothing beside it" in guilty.end.error
    for sequence in innocent:
        bench.check_complete(sequence)
    assert bench.num_executors == 1 + 4
    bench.check_nothing_left()


def test_another_request_with_the_name_of_a_guilty_one_runs() -> None:
    bench = Bench(lose_device)
    guilty = bench.submit([POISON])
    bench.run()
    bench.sequences.clear()
    namesake = bench.submit([1, 2, 3])
    assert namesake.submission.request_id == guilty.submission.request_id
    bench.run()
    bench.check_complete(namesake)


def test_two_guilty_requests_are_both_found() -> None:
    bench = Bench(fail)
    innocent = [bench.submit([number, 1, 2]) for number in range(6)]
    guilty = [bench.submit([POISON, number]) for number in range(2)]
    bench.run()
    for sequence in innocent:
        bench.check_complete(sequence)
    for sequence in guilty:
        assert isinstance(sequence.end, Finished)
        assert sequence.end.reason == ingress.FINISH_ERROR
    assert bench.num_epochs <= 1 + 2 * 3
    bench.check_nothing_left()


def test_losses_that_nobody_is_to_blame_for_end_nobody() -> None:
    bench = Bench(lambda poisoned, batch: None)
    sequences = [bench.submit([number, 1, 2, 3], max_tokens=12) for number in range(8)]
    for _ in range(30):
        for _ in range(8):
            bench.beat()
        bench.engine.executor_unreachable(bench.peer, bench.now)
        bench.start_executor()
    bench.run()
    for sequence in sequences:
        bench.check_complete(sequence)


def test_who_ran_beside_a_cancelled_request_was_not_alone() -> None:
    """The cancelled one may have been the cause."""
    beside: list[LiveSequence] = []
    num_rows: list[int] = []

    def lose_three(poisoned: list[int], batch: StepBatch) -> None:
        if len(num_rows) == 3 or not len(batch.rows):
            return
        num_rows.append(len(batch.rows))
        bench.gateway.abort(beside)
        for frame in bench.gateway.take_frames():
            bench.engine.gateway_frame(b"gateway", frame, bench.now)
        beside.clear()
        if len(num_rows) == 1:
            beside.append(bench.submit([7, 8, 9]))
        raise DeviceLostError("pulled")

    bench = Bench(lose_three)
    innocent = bench.submit([1, 2, 3])
    beside.append(bench.submit([4, 5, 6]))
    while innocent.end is None:
        bench.beat()
    assert num_rows == [2, 2, 1]
    bench.check_complete(innocent)


def test_a_backend_that_always_fails_is_not_asked_without_pause() -> None:
    num_steps = 0

    def always(poisoned: list[int], batch: StepBatch) -> None:
        nonlocal num_steps
        num_steps += 1
        raise RuntimeError("broken")

    bench = Bench(always)
    sequences = [bench.submit([number, 1, 2]) for number in range(20)]
    for _ in range(2000):  # 10 s
        bench.beat()
    assert num_steps <= 20
    assert bench.engine.fleet.num_answers == 0, "which health judges progress by"
    bench.run(most_s=100)
    assert all(isinstance(s.end, Finished) and s.end.reason == ingress.FINISH_ERROR for s in sequences)
    bench.check_nothing_left()


def test_a_request_too_large_for_the_device_fails_after_smaller_steps_and_the_others_get_large_ones_again() -> None:
    def hungry(poisoned: list[int], batch: StepBatch) -> None:
        if poisoned:
            raise StepOutOfMemoryError(int(batch.num_scheduled_tokens.sum()), "too much")

    bench = Bench(hungry)
    innocent = [bench.submit([number, 1, 2, 3, 4]) for number in range(6)]
    guilty = bench.submit([POISON] * 30)
    bench.run()
    assert isinstance(guilty.end, Finished)
    assert guilty.end.reason == ingress.FINISH_ERROR
    assert "too much" in guilty.end.error
    for sequence in innocent:
        bench.check_complete(sequence)
    core = bench.engine.fleet.cells[0].core
    assert core is not None
    assert core.max_num_batched_tokens == LIMITS.max_num_batched_tokens
    bench.check_nothing_left()


def test_an_abort_frees_its_blocks_within_two_steps() -> None:
    bench = Bench(lambda poisoned, batch: None)
    sequence = bench.submit([1, 2, 3], max_tokens=90)
    while len(sequence.tokens) < 5:
        bench.beat()
    core = bench.engine.fleet.cells[0].core
    assert core is not None
    before = core.counters.num_steps
    bench.gateway.abort([sequence])
    for frame in bench.gateway.take_frames():
        bench.engine.gateway_frame(b"gateway", frame, bench.now)
    bench.sequences.clear()
    for _ in range(4):
        bench.beat()
    assert core.pool.num_free == core.pool.num_blocks
    assert core.counters.num_steps - before <= 2


@pytest.mark.parametrize("seed", range(25))
def test_whatever_else_happens_nobody_innocent_fails_and_nothing_stays_behind(seed: int) -> None:
    """Guilty requests, requests that are given up, executors that die by themselves: in any order, under any batching."""
    rng = np.random.default_rng(seed)
    limits = msgspec.structs.replace(
        LIMITS,
        batching=str(rng.choice(sorted(BATCHING_POLICIES))),
        order=str(rng.choice(sorted(ORDERS))),
        preemption=str(rng.choice(["swap", "recompute"])),
        max_steps_in_flight=int(rng.integers(1, 5)),
        max_num_seqs=int(rng.integers(1, 8)),
    )
    bench = Bench([fail, lose_device][seed % 2], limits)
    guilty: list[LiveSequence] = []
    aborted: list[LiveSequence] = []
    next_death = 0
    for beat in range(400):
        if rng.random() < 0.12:
            is_guilty = rng.random() < 0.15
            prompt = rng.integers(0, 90, size=int(rng.integers(1, 40))).tolist() + [POISON] * is_guilty
            sequence = bench.submit(prompt)
            guilty += [sequence] * is_guilty
        if rng.random() < 0.02 and bench.sequences:
            sequence = bench.sequences[int(rng.integers(0, len(bench.sequences)))]
            if sequence.end is None and sequence not in aborted:
                aborted.append(sequence)
                bench.gateway.abort([sequence])
        if beat > next_death and rng.random() < 0.02:
            # Not so often that nobody gets anywhere: three times in a row without progress is what guilt looks like.
            next_death = beat + 100
            bench.engine.executor_unreachable(bench.peer, bench.now)
            bench.start_executor()
        bench.beat()
    for sequence in aborted:
        bench.sequences.remove(sequence)
    bench.run(most_s=120)
    for sequence in bench.sequences:
        if sequence in guilty:
            assert isinstance(sequence.end, Finished)
            assert sequence.end.reason == ingress.FINISH_ERROR
        else:
            bench.check_complete(sequence)
    bench.check_nothing_left()


@pytest.mark.parametrize("num_steps_between", [0, 1, 3, 6])
def test_two_losses_in_a_row_do_not_make_everybody_wait_for_everybody(num_steps_between: int) -> None:
    """Nobody is to blame, and 64 requests are suspected of it: they come back in rounds, not one by one."""
    last_steps = [10, 11 + num_steps_between]
    known: list[int] = []
    """Tokens of each when the second executor went."""
    num_steps = waited = 0

    def pull_the_plug(poisoned: list[int], batch: StepBatch) -> None:
        nonlocal known, num_steps, waited
        del poisoned, batch
        num_steps += 1
        core = bench.engine.fleet.cells[0].core
        assert core is not None
        tokens = [core.num_tokens_of(request) for request in core.requests()]
        if num_steps in last_steps:
            known = tokens
            raise DeviceLostError("plug")
        if num_steps > last_steps[-1] and not waited and all(map(int.__gt__, tokens, known)):
            waited = num_steps - last_steps[-1]

    limits = msgspec.structs.replace(LIMITS, max_num_batched_tokens=1024, max_num_seqs=64)
    bench = Bench(pull_the_plug, limits, msgspec.structs.replace(CONFIG, max_num_seqs=64, num_kv_blocks=2000))
    for number in range(64):
        bench.submit([number, 1, 2], max_tokens=90)
    bench.run()
    # One by one it would be two steps each, for all 64. Now 16 are tried so at most, and the others come in four rounds.
    assert 0 < waited <= 2 * 16 + 4 * 4
    for sequence in bench.sequences:
        assert sequence.tokens == bench.hash.continuation(bench.prompt_of(sequence), 90, SamplingParams())
