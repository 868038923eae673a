"""Outputs under constraints, from core to sampler with a real model: valid whatever happens to their rows."""

import json

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from flight_logs import MemoryLog, RecordedCore, recorder_into, replay_of
from headway_executor.backend import BackendConfig
from headway_executor.backends.torch_backend import TorchBackend
from headway_proto.sampling import Constraint, SamplingParams
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import FinishReason
from headway_scheduler.flight.records import Arrived
from model_core import ModelCore, demo_model

ENCODER = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
PROMPT = ENCODER.encode("def parse(line):\n    return ").ids
SCHEMAS = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99}, "minItems": 2, "maxItems": 5},
    {"enum": ["red", "green", 3, None, True]},
    {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "maxItems": 2,
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                        "price": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.01},
                    },
                    "required": ["id", "price"],
                    "additionalProperties": False,
                },
            },
            "kind": {"enum": ["a", "b"]},
        },
        "required": ["items", "kind"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 8}, {"type": "null"}]},
)  # fmt: skip


def sampling(place: int, **more) -> SamplingParams:
    """At temperature 1, under one of the schemas."""
    constraint = Constraint("json_schema", json.dumps(SCHEMAS[place % len(SCHEMAS)]))
    return SamplingParams(seed=place, constraint=constraint, **more)


def opened(kernels: str = "compiled", *, limits: dict | None = None, **settings) -> ModelCore:
    config = {"model": str(demo_model()), "max_num_seqs": 64, "num_kv_blocks": 2000, "swap_space_mib": 0}
    config |= {"options": {"kernels": kernels}} | settings
    limits = {"max_num_batched_tokens": 1024, "max_num_seqs": config["max_num_seqs"]} | (limits or {})
    return ModelCore(TorchBackend(), BackendConfig(**config), SchedulerLimits(**limits))


def texts_of(core: ModelCore) -> dict[int, str]:
    return {handle: ENCODER.decode(tokens) for handle, tokens in core.tokens.items()}


def check(text: str, place: int) -> None:
    jsonschema.validate(json.loads(text), SCHEMAS[place % len(SCHEMAS)], cls=jsonschema.Draft202012Validator)


def undisturbed(places: range) -> dict[int, list[int]]:
    """Each one's tokens where nothing happens."""
    core = opened()
    for place in places:
        core.add(PROMPT, 200, sampling(place))
    core.run()
    core.close()
    return core.tokens


def test_500_sampled_outputs_are_valid() -> None:
    core = opened()
    for place in range(500):
        core.add(PROMPT, 300, sampling(place))
    core.run()
    core.close()
    assert {end.reason for end in core.ends.values()} == {FinishReason.STOP}
    texts = texts_of(core)
    for place, text in texts.items():
        check(text, place)
    assert len(set(texts.values())) > 200
    assert {tokens[-1] for tokens in core.tokens.values()} <= set(core.info.eos_token_ids)


@pytest.mark.parametrize(
    ("limits", "settings"),
    [
        ({"max_steps_in_flight": 1}, {}),
        ({"max_steps_in_flight": 3, "max_num_batched_tokens": 24}, {"max_num_seqs": 5}),
        ({}, {"options": {"kernels": "eager"}, "max_num_seqs": 6}),
    ],
    ids=["one step in flight", "three, prompts in chunks", "eager"],
)
def test_an_output_depends_on_nothing_but_its_request(limits, settings) -> None:
    expected = undisturbed(range(10))
    core = opened(limits=limits, **settings)
    for place in range(10):
        core.add(PROMPT, 200, sampling(place))
    core.run()
    core.close()
    texts = texts_of(core)
    assert sorted(texts) == list(range(10))
    for place, text in texts.items():
        check(text, place)
    if "options" not in settings:  # other operators round otherwise
        assert core.tokens == expected


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_rows_go_on_where_they_were(preemption) -> None:
    expected = undisturbed(range(20))
    core = opened(
        limits={"preemption": preemption, "enable_prefix_caching": False},
        max_num_seqs=20,
        block_size=4,
        num_kv_blocks=30,
        max_model_len=100,
        swap_space_mib=64,
    )
    for place in range(20):
        core.add(PROMPT, 80, sampling(place))
    core.run()
    core.close()
    preempted = [end.num_preemptions for end in core.ends.values()]
    assert sum(preempted) > 2, "the pool was to be too small"
    assert core.tokens == expected


def test_rows_with_a_cached_prompt_begin_at_the_beginning() -> None:
    core = opened(block_size=4)
    for _ in range(2):
        for place in range(6):
            core.add(PROMPT, 200, sampling(place))
        core.run()
    core.close()
    assert all(core.num_cached_tokens[place] >= 4 for place in range(6, 12))
    for place in range(6):
        assert core.tokens[place] == core.tokens[place + 6]


def test_another_executor_goes_on_with_every_output() -> None:
    """The one before died with steps in flight: all rows come again, with the output that was answered."""
    expected = undisturbed(range(12))
    core = opened()
    for place in range(12):
        core.add(PROMPT, 200, sampling(place))
    for beat in range(9):
        core.beat()
        if beat % 4 == 3:
            core.begin_epoch()
    core.run()
    core.close()
    assert core.tokens == expected


class RecordedModelCore(ModelCore):
    """A core whose flight log can be replayed."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.log = MemoryLog()
        self.recorder = recorder_into(self.log, self.limits)
        self.core = RecordedCore(self.core, self.recorder)

    def schedule(self) -> bool:
        was_full = self.core.num_in_flight >= self.limits.steps_in_flight(self.core.capacity.num_lanes)
        num_steps = 0
        while super().schedule():
            num_steps += 1
        self.core.end_turn(self._now, was_full=was_full)
        return num_steps > 0


def test_a_recorded_run_is_replayed_and_its_checkpoint_goes_on() -> None:
    expected = undisturbed(range(12))
    config = BackendConfig(model=str(demo_model()), max_num_seqs=6, num_kv_blocks=2000)
    limits = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=6)
    core = RecordedModelCore(TorchBackend(), config, limits)
    for place in range(12):
        core.add(PROMPT, 200, sampling(place))
    for beat in range(12):
        core.beat()
        if beat == 5:
            core.begin_epoch()
        if beat == 8:
            core.core.restore()
    core.run()
    core.close()
    assert core.tokens == expected
    core.recorder.flush(core._now, None, is_final=True)
    replayed = replay_of(core.log, limits)
    assert replayed.core.num_unfinished == 0
    constraints = [record.sampling.constraint for record in core.log.records if isinstance(record, Arrived)]
    assert constraints == [sampling(place).constraint for place in range(12)]


def test_resubmitted_requests_go_on_behind_the_tokens_they_hold() -> None:
    """As a gateway submits them to a new scheduler: prompt and what was delivered, with the prompt's length."""
    expected = undisturbed(range(10))
    core = opened()
    for place in range(10):
        core.add(PROMPT, 200, sampling(place), held=tuple(expected[place][: min(place, len(expected[place]) - 1)]))
    core.run()
    core.close()
    assert core.tokens == expected


def test_held_tokens_that_do_not_follow_end_that_request_alone() -> None:
    core = opened()
    core.add(PROMPT, 100, sampling(1), held=tuple(ENCODER.encode("{").ids))
    core.add(PROMPT, 100, sampling(1))
    core.run()
    core.close()
    assert core.ends[0].reason is FinishReason.ERROR
    assert core.ends[0].error.startswith("the output does not follow its constraint")
    assert core.ends[1].reason is FinishReason.STOP


def test_max_tokens_cuts_an_output_that_could_have_gone_on() -> None:
    expected = undisturbed(range(4))
    core = opened()
    for place in range(4):
        core.add(PROMPT, 3, sampling(place))
    core.run()
    core.close()
    assert core.tokens == {place: tokens[:3] for place, tokens in expected.items()}


def test_rows_beside_constrained_ones_draw_what_they_draw_alone() -> None:
    alone, beside = opened(), opened()
    for core in (alone, beside):
        for place in range(6):
            core.add(PROMPT, 20, SamplingParams(seed=place, logprobs=2, temperature=float(place % 2)))
    for place in range(6):
        beside.add(PROMPT, 60, sampling(place, logprobs=0))
    for core in (alone, beside):
        core.run()
        core.close()
    assert alone.tokens == {place: beside.tokens[place] for place in range(6)}


def test_other_parameters_choose_among_what_is_allowed() -> None:
    core = opened()
    constraint = Constraint("regex", "[ab]{20}")
    a, b = (ENCODER.encode(letter).ids[0] for letter in "ab")
    core.add(PROMPT, 60, SamplingParams(temperature=0.0, constraint=constraint, logit_bias=((a, 90.0),)))
    core.add(PROMPT, 60, SamplingParams(top_k=1, constraint=constraint, logit_bias=((b, 90.0),)))
    core.add(PROMPT, 60, SamplingParams(top_p=0.5, min_p=0.1, presence_penalty=1.0, constraint=constraint, seed=1))
    core.run()
    core.close()
    texts = texts_of(core)
    assert (texts[0], texts[1]) == ("a" * 20, "b" * 20)
    assert len(texts[2]) == 20
    assert set(texts[2]) <= {"a", "b"}


def test_an_executor_that_cannot_is_sent_no_constraint() -> None:
    core = opened()
    core.add(PROMPT, 50, sampling(0))
    core.add(PROMPT, 5, SamplingParams())
    core.begin_epoch(supports_constraints=False)
    assert core.ends[0].error == "the executor that took over cannot constrain outputs"
    with pytest.raises(RequestRejected, match="the executor cannot constrain outputs") as caught:
        core.add(PROMPT, 50, sampling(0))
    assert (caught.value.reason, caught.value.field) == ("unsupported", "constraint")
    core.run()
    core.close()
    assert core.ends[1].reason is not FinishReason.ERROR
    assert np.all(np.array(list(core.ends)) < 2)
