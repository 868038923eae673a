"""A constraint is judged before anything is queued: in a process of its own, within a time, once."""

import asyncio
import time

import grpc
import msgspec
import pytest

from fake_scheduler import MODEL
from headway_gateway import constraint_check
from headway_gateway.constraint_check import ConstraintChecker
from headway_gateway.statuses import CallRefusedError
from headway_proto.sampling import Constraint
from model_core import demo_model

ABLE = msgspec.structs.replace(MODEL, supports_constraints=True)
ENDLESS = 'start: x\nx: %json {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}'
"""Within a grammar the library is asked for what is counted in a schema; it would take minutes, and gigabytes."""


@pytest.fixture(scope="module")
def checker():
    made = ConstraintChecker(demo_model(), most_compile_s=2.0)
    yield made
    made.close()


async def refusal(checker: ConstraintChecker, constraint: Constraint, model=ABLE) -> CallRefusedError:
    with pytest.raises(CallRefusedError) as caught:
        await checker.check(constraint, model)
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


async def test_one_that_would_not_end_is_refused_in_time_and_the_next_is_judged(monkeypatch) -> None:
    checker = ConstraintChecker(demo_model(), most_compile_s=0.3)
    await checker.check(Constraint("regex", "a"), ABLE)
    process = checker._compiler.process
    error = await refusal(checker, Constraint("grammar", ENDLESS))
    assert error.violations == (("sampling.grammar", "takes too long to compile; allowed: a simpler one"),)
    assert process.returncode is not None
    began = time.monotonic()
    await refusal(checker, Constraint("grammar", ENDLESS))
    assert time.monotonic() - began < 0.2, "it is remembered"
    await checker.check(Constraint("regex", "b"), ABLE)
    # Not for ever: the machine may have been busy.
    monkeypatch.setattr(constraint_check, "REMEMBERED_FAILURE_S", 0.0)
    count = checker.num_compiled
    await refusal(checker, Constraint("grammar", ENDLESS + " "))
    await refusal(checker, Constraint("grammar", ENDLESS + " "))
    assert checker.num_compiled == count + 2
    checker.close()


async def test_a_process_that_dies_is_replaced(checker) -> None:
    await checker.check(Constraint("regex", "c"), ABLE)
    checker._compiler.process.kill()
    error = await refusal(checker, Constraint("regex", "d"))
    assert error.violations[0][1].startswith("cannot be compiled: ")
    await checker.check(Constraint("regex", "e"), ABLE)


async def test_another_model_is_another_question(checker) -> None:
    await checker.check(Constraint("regex", "f"), ABLE)
    wider = msgspec.structs.replace(ABLE, vocab_size=5000, eos_token_ids=(2,))
    before = checker.num_compiled
    await checker.check(Constraint("regex", "f"), wider)
    assert checker.num_compiled == before + 1


async def test_only_so_many_wait(checker, monkeypatch) -> None:
    monkeypatch.setattr(constraint_check, "MOST_WAITING", 2)
    asked = [checker.check(Constraint("regex", f"x{number}"), ABLE) for number in range(4)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert outcomes[:2] == [None, None]
    assert {error.code for error in outcomes[2:]} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert all(error.retry_after_s for error in outcomes[2:])


async def test_few_verdicts_are_remembered(checker, monkeypatch) -> None:
    monkeypatch.setattr(constraint_check, "MOST_VERDICTS", 3)
    for number in range(6):
        await checker.check(Constraint("regex", f"y{number}"), ABLE)
    assert len(checker._verdicts) <= 16
    assert checker._known(next(reversed(checker._verdicts))) == ""
