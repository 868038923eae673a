"""Rows under a constraint follow it, and no other row changes.

The checkpoints' tokenizer has one token per printable character.
"""

import json
import re

from headway_conformance.checkpoints import EOS_TOKEN_ID, text_of
from headway_conformance.failures import NotApplicable, require
from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS, kinds
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_conformance.stage import Stage
from headway_proto.sampling import Constraint, SamplingParams

_SCHEMA = {"type": "array", "items": {"enum": [1, "a"]}, "minItems": 2, "maxItems": 3}
_DIGITS = Constraint("regex", "[0-9]{6}")
_MOST_JSON_TOKENS = 28


@scenario
def constrained_rows_among_others(stage: Stage) -> None:
    """Outputs follow their constraints, greedy and drawn, and end when complete; other rows draw as they should."""
    constrained = [_digits(stage, place) for place in range(3)]
    schema = Constraint("json_schema", json.dumps(_SCHEMA))
    chosen = Constraint("choice", json.dumps(["no", "yes"]))
    short = stage.request(4, 3, SamplingParams(seed=6, constraint=chosen))
    parsed = stage.request(3, _MOST_JSON_TOKENS, SamplingParams(temperature=0.0, constraint=schema))
    others = [
        stage.request(4 + place, 4, sampling) for place, sampling in enumerate(list(kinds(stage.size).values())[:4])
    ]
    scheduler = _scheduler(stage, seed=1)
    scheduler.run([constrained[0], others[0], short, constrained[1], *others[1:], parsed, constrained[2]])
    stage.verify(*others)
    for request in constrained:
        _check_digits(request)
    require(_text(short) in {"no", "yes"}, f"drew {_text(short)!r}; allowed: 'no' or 'yes'")
    require(parsed.error is None, f"a constrained request failed: {parsed.error}")
    require(_is_list(_text(parsed)), f"drew {_text(parsed)!r}, which does not follow the schema")


@scenario
def constrained_rows_in_flight_and_taken_over(stage: Stage) -> None:
    """With steps in flight, rows that are preempted or start again in another epoch continue behind their tokens."""
    requests = [_digits(stage, place) for place in range(4)]
    alone = [ScriptedRequest(request.prompt, request.max_tokens, request.sampling) for request in requests]
    scheduler = _scheduler(stage, depth=3, seed=2)
    for request in requests:
        scheduler.admit(request)
    scheduler.step_whole()
    for _ in range(3):
        scheduler.step()
    scheduler.preempt(requests[0])
    scheduler.preempt(requests[2])
    scheduler.step()
    scheduler.run([requests[0], requests[2]])
    again = _scheduler(stage, seed=3)
    again.run(alone)
    for request, other in zip(requests, alone, strict=True):
        _check_digits(request)
        require(request.output == other.output, f"drew {request.output}; alone {other.output}")


@scenario
def constraints_that_end_nowhere(stage: Stage) -> None:
    """A row with an invalid constraint, or one that no token can follow, fails alone, and its row can be used again."""
    bad = [
        stage.request(5, 4, SamplingParams(temperature=0.0, constraint=constraint))
        for constraint in (Constraint("regex", "[0-9]é"), Constraint("regex", "("), Constraint("regex", "é"))
    ]
    good = [stage.request(6, 4, LOGPROBS), _digits(stage, 1), stage.request(7, 4, kinds(stage.size)["top_p"])]
    scheduler = _scheduler(stage, depth=2, seed=4, max_num_seqs=4)
    scheduler.run([good[0], bad[0], bad[1], good[1], bad[2], good[2]])
    stage.verify(good[0], good[2])
    _check_digits(good[1])
    for request in bad:
        require(request.error is not None, "a row that no token can follow has no error")


def _scheduler(stage: Stage, *, depth: int = 1, seed: int, **changes: int) -> ScriptedScheduler:
    backend = stage.create_backend()
    supports_constraints = backend.open(stage.config()).supports_constraints
    backend.close()
    if not supports_constraints:
        raise NotApplicable("it announces no support of constraints")
    return stage.scheduler(depth=depth, seed=seed, **changes)


def _digits(stage: Stage, place: int) -> ScriptedRequest:
    sampling = SamplingParams(temperature=float(place == 1), seed=place, constraint=_DIGITS, logprobs=place - 1)
    return stage.request(3 + place, 7, sampling)


def _check_digits(request: ScriptedRequest) -> None:
    require(request.error is None, f"a constrained request failed: {request.error}")
    text = text_of(request.output[:-1])
    require(re.fullmatch("[0-9]{6}", text) is not None, f"drew {text!r}; allowed: six digits")
    require(request.output[-1] == EOS_TOKEN_ID, f"drew {request.output[-1]} behind the end; allowed: {EOS_TOKEN_ID}")


def _text(request: ScriptedRequest) -> str:
    end = request.output.index(EOS_TOKEN_ID) if EOS_TOKEN_ID in request.output else len(request.output)
    return text_of(request.output[:end])


def _is_list(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, list) and 2 <= len(value) <= 3 and all(item in {1, "a"} for item in value)


SCENARIOS = (constrained_rows_among_others, constrained_rows_in_flight_and_taken_over, constraints_that_end_nowhere)
