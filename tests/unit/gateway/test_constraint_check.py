"""A constraint is judged before anything is queued: in a process of its own, within a time, once."""

import asyncio
import os
import signal
import threading
import time

import grpc
import msgspec
import pytest

from fake_scheduler import MODEL
from headway_gateway.statuses import CallRefusedError, renamed
from headway_gateway.text import constraint_check
from headway_gateway.text.bounded_process import BoundedProcess
from headway_gateway.text.constraint_check import ConstraintChecker
from headway_proto.sampling import Constraint
from model_core import demo_model

ABLE = msgspec.structs.replace(MODEL, supports_constraints=True)
COSTLY = "".join(f"({chr(0x100 + number % 500)})?" for number in range(2000))
ENDLESS = COSTLY * 8
"""It would take seconds, which the library does not count."""

ORIGINAL_ASK = BoundedProcess.ask


@pytest.fixture(scope="module")
def checker():
    made = ConstraintChecker(demo_model(), most_compile_s=30.0)
    yield made
    made.close()


async def refusal(checker: ConstraintChecker, constraint: Constraint, model=ABLE, caller="") -> CallRefusedError:
    with pytest.raises(CallRefusedError) as caught:
        await checker.check(constraint, model, caller)
    return caught.value


async def test_what_can_be_followed_passes_and_is_compiled_once(checker) -> None:
    constraint = Constraint("regex", "a+b")
    before = checker.num_compiled
    await asyncio.gather(*(checker.check(constraint, ABLE) for _ in range(5)))
    await checker.check(Constraint("json_object"), ABLE)
    assert checker.num_compiled == before + 2


async def test_what_cannot_is_refused_with_field_and_reason(checker) -> None:
    for _ in range(2):  # told again from memory
        error = await refusal(checker, Constraint("json_schema", '{"type": "text"}'))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.violations == (("sampling.json_schema", "Invalid type: text"),)


async def test_a_backend_that_cannot_is_told_before_anything_is_compiled(checker) -> None:
    before = checker.num_compiled
    error = await refusal(checker, Constraint("regex", "a"), MODEL)
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.message == "sampling.regex: the executor's backend 'fake' cannot constrain outputs; allowed: unset"
    assert checker.num_compiled == before


async def test_one_that_would_not_end_is_ended_by_its_processor_time_and_the_next_is_judged(checker) -> None:
    await checker.check(Constraint("regex", "a"), ABLE)
    for _ in range(2):  # no verdict, so nothing is remembered
        running = await resting(checker)
        process = running.process
        error = await refusal(checker, Constraint("regex", ENDLESS))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.message == (
            "sampling.regex: could not be compiled this time (it used up its processor time); try again, or send a simpler one"
        )
        assert (error.retry_after_s, error.violations) == (1.0, ())
        told = renamed(error, [("sampling.regex", "structured_outputs.regex")])
        assert told.message.startswith("structured_outputs.regex: could not be compiled this time (it used up")
        assert (told.code, told.reason, told.retry_after_s, told.violations) == (error.code, error.reason, 1.0, ())
        assert process.returncode == -signal.SIGPROF
        await checker.check(Constraint("regex", "b"), ABLE)


async def test_a_slow_moment_is_no_verdict(checker) -> None:
    """A machine that stands still for longer than a costly constraint may take, then for longer than anybody waits."""
    await checker.check(Constraint("regex", "c"), ABLE)
    running = await resting(checker)
    os.kill(running.process.pid, signal.SIGSTOP)
    judging = asyncio.create_task(checker.check(Constraint("regex", "slow"), ABLE))
    await asyncio.sleep(1.3)
    os.kill(running.process.pid, signal.SIGCONT)
    assert (await judging).problem == ""

    checker._most_compile_s, kept = 0.3, checker._most_compile_s
    os.kill(running.process.pid, signal.SIGSTOP)
    error = await refusal(checker, Constraint("regex", "slower"))
    checker._most_compile_s = kept
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "no answer came in time" in error.message
    assert error.retry_after_s
    await checker.check(Constraint("regex", "slower"), ABLE)


async def test_a_process_that_dies_is_replaced_and_nobody_notices(checker) -> None:
    await checker.check(Constraint("regex", "d"), ABLE)
    running = await resting(checker)
    running.process.kill()
    assert (await checker.check(Constraint("regex", "e"), ABLE)).problem == ""


async def test_what_breaks_two_processes_is_a_verdict_and_what_others_kill_is_not(checker, monkeypatch) -> None:
    def dying_of(number: int):
        def ask(self, question: bytes, most_s: float) -> bytes:
            assert self.process is not None
            os.kill(self.process.pid, number)
            self.process.wait(10)
            return original(self, question, most_s)

        original = BoundedProcess.ask
        return ask

    await checker.check(Constraint("regex", "f"), ABLE)
    with monkeypatch.context() as patched:
        start = BoundedProcess.start
        patched.setattr(BoundedProcess, "ask", dying_of(signal.SIGSEGV))
        patched.setattr(BoundedProcess, "start", lambda self: undisturbed(patched, start, self))
        error = await refusal(checker, Constraint("regex", "g"))
        assert error.violations == (("sampling.regex", "cannot be compiled: its process has ended"),)
    assert (await refusal(checker, Constraint("regex", "g"))).code is grpc.StatusCode.INVALID_ARGUMENT
    with monkeypatch.context() as patched:
        patched.setattr(BoundedProcess, "ask", dying_of(signal.SIGKILL))
        patched.setattr(BoundedProcess, "start", lambda self: undisturbed(patched, start, self))
        error = await refusal(checker, Constraint("regex", "h"))
        assert error.code is grpc.StatusCode.UNAVAILABLE
    await checker.check(Constraint("regex", "h"), ABLE)


async def resting(checker: ConstraintChecker) -> BoundedProcess:
    """The one process that will be asked next."""
    both = threading.Barrier(3)  # Neither thread has anything to do any more.
    for _ in range(2):
        checker._threads.submit(both.wait)
    await asyncio.to_thread(both.wait)
    for _, other in checker._compilers[:-1]:
        other.stop()
    checker._compilers = checker._compilers[-1:]
    return checker._compilers[0][1]


def undisturbed(patched, start, process: BoundedProcess) -> bytes:
    """Start a process whose opening is answered."""
    ask = BoundedProcess.ask
    patched.setattr(BoundedProcess, "ask", ORIGINAL_ASK)
    try:
        return start(process)
    finally:
        patched.setattr(BoundedProcess, "ask", ask)


async def test_a_process_that_cannot_be_started_is_not_the_constraints_fault(checker, monkeypatch, tmp_path) -> None:
    elsewhere = ConstraintChecker(tmp_path)
    error = await refusal(elsewhere, Constraint("regex", "a"))
    assert error.code is grpc.StatusCode.UNAVAILABLE
    assert "tokenizer.json cannot be read" in error.message
    elsewhere.close()


async def test_another_model_is_another_question(checker) -> None:
    await checker.check(Constraint("regex", "f"), ABLE)
    wider = msgspec.structs.replace(ABLE, vocab_size=5000, eos_token_ids=(2,))
    before = checker.num_compiled
    await checker.check(Constraint("regex", "f"), wider)
    assert checker.num_compiled == before + 1


async def test_closing_waits_for_no_answer_and_leaves_no_process() -> None:
    checker = ConstraintChecker(demo_model())
    await checker.check(Constraint("regex", "a"), ABLE)
    running = await resting(checker)
    process = running.process
    os.kill(process.pid, signal.SIGSTOP)
    judging = asyncio.create_task(refusal(checker, Constraint("regex", "b")))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    await asyncio.to_thread(checker.close)
    assert (await judging).code is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - began < 2
    assert process.returncode == -signal.SIGKILL
    assert not checker._compilers


async def test_only_so_many_wait(monkeypatch) -> None:
    monkeypatch.setattr(constraint_check, "MOST_WAITING_OF_ONE", 2)
    checker = ConstraintChecker(demo_model())
    asked = [checker.check(Constraint("regex", f"x{number}"), ABLE, "one") for number in range(5)]
    outcomes = await asyncio.gather(
        *asked, checker.check(Constraint("regex", "x"), ABLE, "another"), return_exceptions=True
    )
    assert [one.problem for one in (*outcomes[:3], outcomes[-1])] == [""] * 4
    assert {error.code for error in outcomes[3:5]} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert outcomes[4].message == (
        "sampling.regex: too many constraints wait to be compiled: 2 of this caller are waiting; allowed: 2"
    )
    assert all(error.retry_after_s for error in outcomes[3:5])
    checker.close()


async def test_one_callers_costly_constraints_do_not_hold_up_anothers(checker) -> None:
    """Each of them takes all the time that it may, and a new process behind it."""
    await asyncio.gather(*(checker.check(Constraint("regex", f"z{caller}"), ABLE, caller) for caller in "ab"))
    costly = [
        asyncio.create_task(refusal(checker, Constraint("regex", ENDLESS + str(number)), caller="greedy"))
        for number in range(6)
    ]
    await asyncio.sleep(0.1)
    waits = []
    for number in range(4):
        began = time.monotonic()
        await checker.check(Constraint("regex", f"q{number}"), ABLE, "another")
        waits.append(time.monotonic() - began)
    assert sum(task.done() for task in costly) <= 3
    assert max(waits) < 1
    for task in costly:
        task.cancel()
    await asyncio.gather(*costly, return_exceptions=True)


async def test_costly_constraints_begin_one_after_the_other_and_cheap_ones_at_once(checker) -> None:
    costly = [Constraint("regex", COSTLY + str(number)) for number in range(3)]
    first = await checker.begin(costly[0], ABLE, "one")
    second = asyncio.create_task(checker.begin(costly[1], ABLE, "one"))
    same = asyncio.create_task(checker.begin(costly[0], ABLE, "one"))
    (await checker.begin(Constraint("regex", "[ab]"), ABLE, "one")).is_over()
    others = await checker.begin(costly[2], ABLE, "another")
    await asyncio.sleep(0.2)
    assert not second.done()
    assert not same.done()
    first.has_begun()
    (await same).has_begun()  # the executor knows it by now
    begun = await second
    for beginning in (first, begun, others):
        beginning.is_over()
    await checker.begin(costly[0], ABLE, "one")
    assert not checker._beginnings._holders
    assert not checker._leaders


async def test_one_that_leaves_before_its_output_begins_lets_the_next_begin(checker) -> None:
    costly = Constraint("regex", COSTLY + "x")
    first = await checker.begin(costly, ABLE, "one")
    waiting = [asyncio.create_task(checker.begin(costly, ABLE, caller)) for caller in ("one", "another")]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    first.is_over()
    (await waiting[1]).is_over()
    assert not checker._beginnings._holders
    assert not checker._leaders


async def test_few_verdicts_are_remembered(checker, monkeypatch) -> None:
    monkeypatch.setattr(constraint_check, "MOST_VERDICTS", 3)
    for number in range(6):
        await checker.check(Constraint("regex", f"y{number}"), ABLE)
    assert len(checker._verdicts) <= 32
    assert checker._known(next(reversed(checker._verdicts))).problem == ""
