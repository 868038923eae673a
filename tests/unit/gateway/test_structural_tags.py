"""Tags within free text: what an output may be, in the older form and in the newer one."""

import json

import pytest

from headway_gateway.openai.answer_grammar import Room, bound_by, marked_grammar
from headway_gateway.openai.thinking import USUAL
from headway_gateway.requests.structural_tags import grammar_of_tags
from headway_proto import generation_pb2 as api
from unit.gateway.test_answer_grammar import MARKS, Outputs, judged

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
F, G = '<f=x>{"a": 1}</f>', "<f=y>[1]</f>"
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"type": "array"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}
TAG = {"type": "tag", "begin": "<f=x>", "content": JSON, "end": "</f>"}
TAGS = {"triggers": ["<f=", "[["], "tags": [TAG, {"begin": "[[", "content": {"type": "any_text"}, "end": ["]]", "!"]}]}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
FORMATS = {
    "triggered": (
        {"type": "triggered_tags", **TAGS},
        ["", "Yes.", F, f"Yes.{F}{F}\nNo. <f", "[[a]b\n]] and [[!"],
        ["<f=", "<f=z>", F[:-1], "[[a", F.replace("1", '"1"')],
    ),
    "at least one": ({"type": "triggered_tags", **TAGS, "at_least_one": True}, [F, f"a{F}b{F}"], ["", "Yes."]),
    "the first alone": (
        {"type": "triggered_tags", **TAGS, "stop_after_first": True},
        ["", "a", f"a{F}"],
        [F + F, F + "a"],
    ),
    "one": ({"type": "triggered_tags", **TAGS, "at_least_one": True, "stop_after_first": True}, [f"a{F}"], ["", F + F]),
    "separated": (
        {"type": "tags_with_separator", "tags": [TAG], "separator": ", "},
        ["", F, f"{F}, {F}"],
        [F + F, f"{F}, "],
    ),
    "a sequence": (
        {"type": "sequence", "elements": [THOUGHT, {"type": "triggered_tags", **TAGS, "at_least_one": True}]},
        [f"<t>a < b\n</t>Yes. {F} No."],
        ["<t></t>", F, f"<t>{F}"],
    ),
    "one of several": (
        {
            "type": "or",
            "elements": [JSON, {"type": "const_string", "value": "x/\n"}, {"type": "regex", "pattern": "/a+"}],
        },
        ['{"a": 1}', "x/\n", "/aa"],
        ["x", "{}", ""],
    ),
    "any text": ({"type": "any_text"}, ["", "x\ny"], []),
}


@pytest.fixture(scope="module")
def outputs() -> Outputs:
    return Outputs(MARKS)


@pytest.mark.parametrize("name", FORMATS)
def test_each_kind_allows_what_it_says(outputs: Outputs, name: str) -> None:
    wanted, good, bad = FORMATS[name]
    judged(outputs, grammar_of_tags(json.dumps({"type": "structural_tag", "format": wanted})), good, bad)


def test_the_older_form(outputs: Outputs) -> None:
    good = ["", "Yes. <", f"Yes. {F} and {G}.", G + F]
    judged(outputs, grammar_of_tags(json.dumps(OLDER)), good, ["<f=", "<f=x>[1]</f>", f"{F}<f=z>{{}}</f>"])


def test_thoughts_come_before(outputs: Outputs) -> None:
    bound = bound_by(api.SamplingParams(grammar=grammar_of_tags(json.dumps(OLDER))))
    grammar = marked_grammar(bound, Room(USUAL), outputs.marks)
    assert grammar is not None
    judged(outputs, grammar, [F, f"<think>Hm <f=.</think>\n\nYes. {F}", "Yes."], ["<think><f=x>", "<think></think><f="])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([], "Expected `object`, got `array`"),
        ({}, "allowed: a format, or structures with triggers"),
        (
            {"format": {"type": "qwen_xml_parameter", "json_schema": {}}},
            "of the types any_text, const_string, json_schema",
        ),
        ({"format": {"type": "const_string", "value": "x", "y": 1}}, "unknown field `y`"),
        ({"format": {"type": "sequence", "elements": []}}, "elements: an empty list is not allowed"),
        ({"format": {"type": "sequence", "elements": [{"type": "any_text"}, JSON]}}, "any_text is not allowed before"),
        ({"format": {**TAG, "content": {"type": "triggered_tags", **TAGS}}}, "triggered_tags is not allowed before"),
        ({"format": {**THOUGHT, "end": ""}}, "end: an empty text is not allowed behind any_text"),
        ({**OLDER, "triggers": ["<g"]}, "begin: '<f=x>' is not allowed; allowed: what begins with a trigger"),
        ({**OLDER, "triggers": [""]}, "triggers: [''] is not allowed; allowed: one or more"),
        ({**OLDER, "structures": []}, "tags: [] is not allowed"),
    ],
)
def test_what_is_not_readable_is_told(given: object, problem: str) -> None:
    with pytest.raises(ValueError, match=r"; allowed: ") as caught:
        grammar_of_tags(json.dumps(given))
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nesting_without_end_is_told() -> None:
    deep = '{"format": ' + '{"type": "or", "elements": [' * 9_000
    with pytest.raises(ValueError, match="nested too deeply"):
        grammar_of_tags(deep)


def test_no_more_is_read_than_a_constraint_may_have() -> None:
    with pytest.raises(ValueError, match=r"^262145 bytes are not allowed; allowed: at most 262144$"):
        grammar_of_tags(" " * 262_145)
