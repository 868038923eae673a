"""Thoughts before an answer that a constraint binds, and calls instead of it, in the forms that templates teach."""

# ruff: noqa: RUF001 (marks of DeepSeek have full-width lines)

import json
import re

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from headway_gateway.openai.answer_grammar import Room, bound_by, channelled_grammar, marked_grammar
from headway_gateway.openai.bodies import Function
from headway_gateway.openai.grammar_marks import Marks
from headway_gateway.openai.strict_calls import problem_of_tools, rules_of_calls
from headway_gateway.openai.thinking import COHERE, OLDER_GRANITE, USUAL
from headway_gateway.openai.tool_calls import (
    COHERE as COMMAND,
)
from headway_gateway.openai.tool_calls import (
    DEEPSEEK,
    FUNCTION_GEMMA,
    GEMMA_4,
    GLM,
    GRANITE,
    HERMES,
    LLAMA,
    MINIMAX,
    MISTRAL,
    PHI,
    QWEN_CODER,
    SEED,
    CallForm,
    ToolText,
)
from headway_proto import generation_pb2 as api
from headway_proto.grammars import ConstraintError, GrammarCompiler
from headway_proto.sampling import Constraint
from model_core import demo_model

END = 0
MARKS = (
    "<think> </think> <tool_call> </tool_call> [TOOL_CALLS] <|channel|> <|message|> <|end|> <|start|> <|constrain|> <|call|> "
    "<|START_THINKING|> <|END_THINKING|> <|START_RESPONSE|> <|END_RESPONSE|> <|tool_call|> <|/tool_call|> <|START_ACTION|> "
    "<|END_ACTION|> [ARGS] [CALL_ID] <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> "
    "<｜tool▁calls▁end｜>"
)
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
ANSWER = '{"a": 1}'
SCHEMA_OF_ANSWER = api.SamplingParams(json_schema=SCHEMA)
LOOSE = Function("look", parameters={"type": "object", "properties": {"at": {"enum": ["sun", "moon"]}}})
STRICT = Function("look", parameters=LOOSE.parameters, strict=True)
FORM_OF_JSON = f"%json {SCHEMA}"


class Outputs:
    """Whether a model may write a text, token by token, and end there; with marks that are tokens or plain text."""

    def __init__(self, marks: str, *, are_special: bool = True) -> None:
        self._tokenizer = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
        self._tokenizer.add_tokens([AddedToken(mark, special=are_special, normalized=False) for mark in marks.split()])
        self._size = self._tokenizer.get_vocab_size()
        self._compiler = GrammarCompiler(self._tokenizer.to_str(), vocab_size=self._size, eos_token_ids=[END])
        self.marks = Marks(self._tokenizer.token_to_id, [END])

    def may_be(self, grammar: str, text: str) -> bool:
        matcher = self._compiler.compile(Constraint("grammar", grammar)).matcher()
        for token_id in (*self._tokenizer.encode(text).ids, END):
            words = self._compiler.new_mask()
            matcher.fill_mask(words)
            legal = np.unpackbits(words.view(np.uint8), count=self._size, bitorder="little")
            if not legal[token_id]:
                return False
            matcher.accept((token_id,))
        return True


@pytest.fixture(scope="module", params=[MARKS, ""], ids=["tokens", "text"])
def outputs(request) -> Outputs:
    return Outputs(request.param)


def judged(outputs: Outputs, grammar: str, good: list[str], bad: list[str]) -> None:
    found = {text: outputs.may_be(grammar, text) for text in [*good, *bad]}
    assert found == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


ROOMS = {
    "thought": (
        Room(USUAL),
        [ANSWER, f"<think>Hm {{.</think>{ANSWER}", f"<think>\nHm.\n</think>\n\n{ANSWER}"],
        [
            "",
            "Hm.",
            "<think>Hm.",
            "<think>Hm.</think>Yes.",
            f"Hm.</think>{ANSWER}",
            "<think></think>" + "\n" * 9 + ANSWER,
        ],
    ),
    "inside a thought": (
        Room(USUAL, begins_inside=True),
        [f"Hm.</think>{ANSWER}", f"</think>\n\n{ANSWER}"],
        ["Hm.", "Hm.</think>", f"Hm.</think>x{ANSWER}"],
    ),
    "marked answer": (
        Room(COHERE),
        [
            ANSWER,
            f"<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>",
            f"<|START_RESPONSE|>{ANSWER}",
        ],
        ["<|START_RESPONSE|>Yes.<|END_RESPONSE|>", f"<|START_RESPONSE|>{ANSWER}<|END_RESPONSE|>x"],
    ),
    "marks of words": (
        Room(OLDER_GRANITE),
        [ANSWER, f"Here is my thought process:\n\nHm.\n\nHere is my response:\n\n{ANSWER}"],
        [f"Here is my response:{ANSWER}", "Here is my thought process: Hm. Here is my response: Yes."],
    ),
    "calls": (
        Room(None, calls=HERMES, tools=(LOOSE,)),
        [ANSWER, '<tool_call>\n{"name": "look"}\n</tool_call>\n<tool_call>{}</tool_call>', "\n<tool_call>"],
        ["Yes.", f"<think>Hm.</think>{ANSWER}", '{"name": "look"}', f"{ANSWER}<tool_call>"],
    ),
    "calls behind a thought": (
        Room(USUAL, calls=MISTRAL, tools=(LOOSE,)),
        [f"<think>Hm.</think>{ANSWER}", "<think>Hm.</think>[TOOL_CALLS]look{}", "[TOOL_CALLS]look{}"],
        ["<think>Hm.</think>look{}"],
    ),
    "calls without marks": (
        Room(None, calls=LLAMA, tools=(LOOSE, Function("go"))),
        [ANSWER, '{"name": "go", "parameters": {"at": ["x"]}}'],
        ['{"name": "come", "parameters": {}}', '{"name": "go"}', '{"name": "go", "parameters": 1}'],
    ),
}


@pytest.mark.parametrize("name", ROOMS)
def test_there_is_room_for_what_the_form_has_and_for_nothing_else(outputs: Outputs, name: str) -> None:
    room, good, bad = ROOMS[name]
    judged(outputs, marked_grammar(FORM_OF_JSON, room, outputs.marks), good, bad)


def test_channels(outputs: Outputs) -> None:
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    answers = [
        f"<|channel|>final<|message|>{ANSWER}",
        f"{thought}{thought}<|channel|>final<|message|>{ANSWER}",
        f"{thought}<|channel|>final <|constrain|>json<|message|>{ANSWER}",
    ]
    calls = [
        f"{thought}<|channel|>commentary to=functions.look <|constrain|>json<|message|>{{}}",
        f"{thought} to=functions.look<|channel|>commentary<|message|>{{}}",
    ]
    bad = [
        ANSWER,
        thought,
        f"{thought}{ANSWER}",
        "<|channel|>final<|message|>Yes.",
        "<|channel|>commentary<|message|>Yes.",
    ]
    judged(
        outputs,
        channelled_grammar(FORM_OF_JSON, Room(tools=[LOOSE]), outputs.marks, thinks=True),
        [*answers, *calls],
        bad,
    )
    judged(outputs, channelled_grammar(FORM_OF_JSON, Room(), outputs.marks, thinks=True), answers, [*calls, *bad])


SUN, WRONG = '{"at": "sun"}', '{"at": "star"}'
STRICT_FORMS = {
    "Hermes": (HERMES, '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>', 2),
    "Phi": (PHI, '<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]<|/tool_call|>', 2),
    "Granite": (GRANITE, '<|tool_call|>[{{"name": "{name}", "arguments": {arguments}}}]', 1),
    "Command": (
        COMMAND,
        '<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "{name}", "parameters": {arguments}}}\n]<|END_ACTION|>',
        2,
    ),
    "Mistral": (MISTRAL, '[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}, "id": "abcdefghi"}}]', 1),
    "newer Mistral": (MISTRAL, "[TOOL_CALLS]{name}[ARGS]{arguments}", 2),
    "Mistral with ids": (MISTRAL, "[TOOL_CALLS]{name}[CALL_ID]abc123XYZ[ARGS]{arguments}", 2),
    "DeepSeek V3": (
        DEEPSEEK,
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>"
        ),
        2,
    ),
    "DeepSeek V3.1": (
        DEEPSEEK,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        2,
    ),
}


@pytest.mark.parametrize("name", STRICT_FORMS)
def test_calls_of_strict_tools_follow_their_schemas_and_all_other_text_is_free(name: str) -> None:
    form, call, most = STRICT_FORMS[name]
    outputs = Outputs(MARKS)
    look, wrong, unknown = (
        call.format(name=called, arguments=arguments)
        for called, arguments in (("look", SUN), ("look", WRONG), ("come", SUN))
    )
    go = call.format(name="go", arguments='{"any": [1]}')
    tools = (STRICT, Function("go"))
    grammar = marked_grammar(None, Room(USUAL, calls=form, tools=tools), outputs.marks)
    assert grammar is not None
    free = ["", "Yes.", "{}", f"<think>Hm {form.begin} Hm.</think>Yes.", f"<think>Hm.</think>\n{look}"]
    good = [
        *free,
        look,
        f"I look.\n{look}",
        go,
        *([look + go] if most > 1 else []),
        *([f"{look} {look}"] if form.end else []),
    ]
    bad = [wrong, unknown, f"I look. {wrong}", form.begin, *([f"{look}{wrong}"] if most > 1 else [f"{look} And."])]
    judged(outputs, grammar, good, bad)
    bound = marked_grammar(FORM_OF_JSON, Room(None, calls=form, tools=tools), outputs.marks)
    assert bound is not None
    judged(outputs, bound, [ANSWER, look, go], ["Yes.", wrong, f"I look. {look}", ANSWER + look])
    for most_calls in (None, 1):
        room = Room(USUAL, calls=form, tools=tools, is_forced=True, most_calls=most_calls)
        forced = marked_grammar(None, room, outputs.marks)
        assert forced is not None
        good = [look, go, f"<think>Hm.</think>\n{look}"] if most_calls is None or "go<" not in call else [go]
        several = [look + go] if most > 1 else []
        bad = ["", "Yes.", wrong, unknown, f"I look. {look}", f"{look} And."]
        judged(outputs, forced, good + several * (most_calls is None), bad + several * (most_calls == 1))
    # Of tools that are not strict nothing is asked.
    assert marked_grammar(None, Room(USUAL, calls=form, tools=(LOOSE,)), outputs.marks) is None


def test_calls_of_strict_tools_in_channels() -> None:
    outputs = Outputs(MARKS)
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    spoken = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    calls = {
        arguments: [
            f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{arguments}",
            f" to=functions.look<|channel|>commentary json<|message|>{arguments}",
            f"<|channel|>commentary to=functions.look<|message|>{arguments}",
        ]
        for arguments in (SUN, WRONG)
    }
    tools = (STRICT, Function("go"))
    free, bound = (
        channelled_grammar(form, Room(tools=tools), outputs.marks, thinks=True) for form in (None, FORM_OF_JSON)
    )
    assert free is not None
    assert bound is not None
    good = [f"{final}Yes, {{.", final + ANSWER, *(before + call for before in ("", thought) for call in calls[SUN])]
    bad = [thought, "Yes.", *calls[WRONG], thought + calls[WRONG][0], f"{final}Yes.{calls[SUN][0]}"]
    judged(outputs, free, [*good, thought + spoken + calls[SUN][0], f"{spoken}{final}Yes."], bad)
    judged(outputs, bound, good[1:], [*bad, good[0], spoken + calls[SUN][0]])
    assert channelled_grammar(None, Room(tools=[LOOSE]), outputs.marks, thinks=True) is None
    forced, at_once = (
        channelled_grammar(None, Room(tools=tools, is_forced=True), outputs.marks, thinks=thinks)
        for thinks in (True, False)
    )
    assert forced is not None
    assert at_once is not None
    calls_alone = [call for call in good if SUN in call]
    judged(outputs, forced, calls_alone, [*bad, f"{final}Yes.", spoken + calls[SUN][0]])
    judged(outputs, at_once, calls[SUN], [*bad, thought + calls[SUN][0]])


@pytest.mark.parametrize("bound", [None, FORM_OF_JSON])
def test_strict_calls_without_marks_are_the_whole_output(bound: str | None) -> None:
    outputs = Outputs(MARKS)
    look, wrong, go = (
        json.dumps({"name": name, "parameters": json.loads(arguments)})
        for name, arguments in (("look", SUN), ("look", WRONG), ("go", WRONG))
    )
    tools = (STRICT, Function("go"))
    grammar = marked_grammar(bound, Room(None, calls=LLAMA, tools=tools), outputs.marks)
    assert grammar is not None
    bad = [
        wrong,
        '{"name": "come", "parameters": {}}',
        f"{look} And.",
        '{"x": 1, "name": "look"}',
        '{"tool_name": "look"}',
    ]
    free = ["", "Yes.", '{"b": 1}', "{", '["name"]', f"I look. {wrong}", "\n\nname"]
    good = [look, f"\n{go}", look.replace(" ", "\n"), *([ANSWER] if bound else free)]
    judged(outputs, grammar, good, [*bad, *(free if bound else [])])
    forced = marked_grammar(None, Room(None, calls=LLAMA, tools=tools, is_forced=True), outputs.marks)
    assert forced is not None
    judged(outputs, forced, [look, go], [*bad, *free, f"{look}; {go}"])


MARKUP_FORMS = {
    "Qwen3-Coder": (
        QWEN_CODER,
        "<tool_call>\n<function={}>{}\n</function>\n</tool_call>",
        "\n<parameter={}>\n{}\n</parameter>",
    ),
    "Seed-OSS": (
        SEED,
        "<seed:tool_call>\n<function={}>{}\n</function>\n</seed:tool_call>",
        "\n<parameter={}>{}</parameter>",
    ),
    "MiniMax": (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="{}">{}\n</invoke>\n</minimax:tool_call>',
        '\n<parameter name="{}">{}</parameter>',
    ),
    "GLM 4.5": (
        GLM,
        "<tool_call>{}{}\n</tool_call>",
        "\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>",
    ),
    "GLM 4.7": (GLM, "<tool_call>{}{}</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>"),
}
"""A form, and how its templates show a call and a parameter."""
CALL_MARKS = "<think> </think> <tool_call> </tool_call> <seed:tool_call> </seed:tool_call> <minimax:tool_call> </minimax:tool_call>"
KEY_MARKS = "<arg_key> </arg_key> <arg_value> </arg_value> <escape>"


class Written:
    """Calls as a form's templates show them."""

    def __init__(self, name: str, outputs: Outputs) -> None:
        self.outputs = outputs
        self.form, self._call, self._parameter = MARKUP_FORMS[name]

    def __call__(self, name: str, **values: str) -> str:
        return self._call.format(name, "".join(self._parameter.format(*one) for one in values.items()))

    def marked(self, value: str) -> str:
        """Return a value of Qwen3-Coder's form with the marks of this one."""
        markup = self.form.markup
        assert markup is not None
        call = markup.call or self.form.end
        marks = {
            "</parameter>": markup.value_end,
            "<parameter=": markup.key,
            "<function=": call,
            "</tool_call>": self.form.end,
        }
        for mark, other in marks.items():
            value = value.replace(mark, other)
        return value


@pytest.fixture(
    scope="module",
    params=[
        *((name, CALL_MARKS, True) for name in MARKUP_FORMS if name != "GLM 4.7"),
        *(("GLM 4.5", f"{CALL_MARKS} {KEY_MARKS}", are_special) for are_special in (True, False)),
        ("GLM 4.7", f"{CALL_MARKS} {KEY_MARKS}", True),
    ],
    ids=lambda param: "-".join(
        (param[0], *(["tokens"] if KEY_MARKS in param[1] else []), *([] if param[2] else ["plain"]))
    ),
)
def written(request) -> Written:
    """With marks of arguments that are text, special tokens, or other tokens."""
    name, marks, are_special = request.param
    return Written(name, Outputs(marks, are_special=are_special))


DATE, ZIP = {"type": "string", "format": "date"}, {"type": "string", "pattern": "^[0-9]{3}$"}
MAYBE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
MIXED = {"type": ["string", "integer", "array", "boolean"], "minimum": 3}
NAMED = {"$ref": "#/$defs/named"}
MARKUP_VALUES = {
    "a text": (
        {"type": "string"},
        ["", "a\nb", '"q"', "5", " x ", "a < b", "</function>", "</par"],
        ["a</parameter>b"],
    ),
    "a text with a mark": (
        {"type": "string"},
        [],
        ["<parameter=b>", "<function=", "x</tool_call>", "\n</parameter>\n"],
    ),
    "a length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "\n\n"], ["a", "abcd"]),
    "a pattern": (ZIP, ["123"], ["1234", "x123", ""]),
    "a pattern within": ({"type": "string", "pattern": "a|b[|$]"}, ["xax", "b$"], ["x", "b"]),
    "the beginning of a pattern": ({"type": "string", "pattern": "^a(b|c)"}, ["abz", "ac\n"], ["bab", "a"]),
    "a date": (DATE, ["2024-02-29"], ["2023-02-29", "today"]),
    "an address": ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a@b", "a b@c.de"]),
    "one of texts": ({"enum": ["c", "f g"]}, ["c", "f g"], ["f", '"c"', ""]),
    "a text or nothing": (MAYBE, ["", "null and void", "nullify", "null", "5"], ["None", " null", "null "]),
    "one of texts or a number": ({"enum": ["all", 7]}, ["all", "7"], ["8", '"all"']),
    "one of texts or nothing": (
        {"type": ["string", "null"], "enum": ["n", None, True]},
        ["n", "null"],
        ["nul", "true", "None"],
    ),
    "a text or a word": ({"type": ["boolean", "string"], "maxLength": 5}, ["true", "abc", "false"], ["True", "abcdef"]),
    "either": ({"oneOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]}, ["ab", "123"], ["abc"]),
    "one of many kinds": (MIXED, ["a5", "3", "[1]", "true", "truely"], ["2", "-1x", "True", "[1", " 5"]),
    "a number": ({"type": "integer", "minimum": 1}, ["1", "20"], ["0", "1.5", "x", '"1"']),
    "an object behind a reference": (NAMED, ['{"n": "</x>"}'], ['{"n": 1}', "{}", "n"]),
    "a list of them": ({"type": "array", "items": NAMED}, ["[]", '[{"n": "x"}]'], ['["x"]', "x"]),
    "anything": ({}, ["x", "5", '{"a": 1}'], []),
    "nothing but words": ({"description": "x", "allOf": [{"type": "boolean"}]}, ["true"], ["True", "x"]),
}


@pytest.mark.parametrize("name", MARKUP_VALUES)
def test_values_of_markup_follow_their_schemas_and_are_read_as_such(written: Written, name: str) -> None:
    schema, good, bad = MARKUP_VALUES[name]
    parameters = {
        "type": "object",
        "properties": {"a": schema, "b": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"named": {"type": "object", "properties": {"n": {"type": "string"}}, "required": ["n"]}},
    }
    tools = (Function("look", parameters=parameters, strict=True), Function("go"))
    grammar = marked_grammar(None, Room(None, calls=written.form, tools=tools), written.outputs.marks)
    assert grammar is not None
    calls = {value: written("look", a=written.marked(value)) for value in (*good, *bad)}
    judged(written.outputs, grammar, [calls[value] for value in good], [calls[value] for value in bad])
    for value in good:
        reader = ToolText(written.form, {"look": parameters})
        (call,) = [*reader.push(calls[value] + written("go")), *reader.finish()][:-1]
        read = json.loads(call.arguments)  # type: ignore[union-attr]  # it is a call
        jsonschema.validate(read, parameters)
        assert read["a"] == value or not isinstance(read["a"], str)


def test_calls_in_markup_are_of_the_tools_and_have_their_parameters_in_order(written: Written) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["b"],
    }
    more = {**parameters, "additionalProperties": {"type": "integer"}}
    tools = [
        Function("look", parameters=parameters, strict=True),
        Function("add", parameters=more, strict=True),
        Function("go"),
    ]
    form, marks = written.form, written.outputs.marks
    good = [written("look", b="1"), written("look", a="x", b="1"), written("go"), written("go", any="x", b="[1]")]
    good += [written("add", b="1", c="2", d="3")]
    bad = [written("look"), written("come"), written("look", b="1", a="x"), written("look", b="1", c="x")]
    bad += [written("add", b="1", c="x"), written("add", b="1", a="2"), written("look", b="1", b1="1")]
    grammar = marked_grammar(None, Room(USUAL, calls=form, tools=tools), marks)
    assert grammar is not None
    judged(written.outputs, grammar, [*good, "Yes.", f"I look.\n{good[0]}\n{good[1]}"], bad)
    # MiniMax writes several calls between its marks.
    begin, end = good[0].split("\n")[0], good[0].split("\n")[-1]
    several = good[0].removesuffix(end) + good[1].removeprefix(begin + "\n")
    listed = [several] if form is MINIMAX else []
    for most_calls in (None, 1):
        room = Room(USUAL, calls=form, tools=tools, is_forced=True, most_calls=most_calls)
        forced = marked_grammar(None, room, marks)
        assert forced is not None
        one = [*good, f"<think>Hm.</think>\n{good[0]}"]
        two = [good[0] + good[1], *listed]
        judged(written.outputs, forced, one + two * (most_calls is None), [*bad, "Yes.", *two * (most_calls == 1)])
    bound = marked_grammar(FORM_OF_JSON, Room(None, calls=form, tools=tools), marks)
    assert bound is not None
    judged(written.outputs, bound, [ANSWER, good[0]], ["Yes.", bad[0], f"I look. {good[0]}"])


TREE = {"$ref": "#/$defs/tree"}
GEMMA_VALUES = {
    "a text": ({"type": "string"}, ["<>", '<a "b", {c: 1}>', "<\n>", "<call:x>"], ["a", '"a"', "<", "<a>b>"]),
    "a pattern": (ZIP, ["<123>"], ["<12>", "123"]),
    "one of texts or a number": ({"enum": ["all", 7, None]}, ["<all>", "7", "null"], ["all", "8", "<7>"]),
    "a text or nothing": (MAYBE, ["<null>", "null"], ["None"]),
    "one of many kinds": (MIXED, ["<a>", "3", "[1,<b>]", "true"], ["2", "{}", "null"]),
    "a number": ({"type": ["integer", "null"], "minimum": 2}, ["2", "null"], ["1", "2.5", "<2>"]),
    "an object": (NAMED, ["{n:<x>}", "{n:<>}"], ["{n:1}", "{}", '{"n":<x>}', "{n:<x>,m:1}"]),
    "optional names": (
        {
            "type": "object",
            "properties": {"x": {"type": "null"}, "y": {"type": "null"}, "z": {"type": "null"}},
            "additionalProperties": {"type": "boolean"},
        },
        ["{}", "{x:null}", "{y:null,z:null}", "{x:null,z:null,any:true,b:false}", "{w:true}"],
        ["{,}", "{y:null,x:null}", "{x:null,}", "{w:1}", "{x:true}"],
    ),
    "a required name between": (
        {
            "type": "object",
            "properties": {"x": {"type": "null"}, "y": {"type": "null"}, "z": {"type": "null"}},
            "required": ["y"],
            "additionalProperties": False,
        },
        ["{y:null}", "{x:null,y:null}", "{y:null,z:null}"],
        ["{}", "{x:null}", "{y:null,w:null}"],
    ),
    "a list": (
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        ["[<a>]", "[<a>,<b>]"],
        ["[]", "[1]", "[<a>,<b>,<c>]", "[<a>,]"],
    ),
    "an empty list": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    "a tree": (TREE, ["{v:1}", "{v:1,sub:[{v:2,sub:[]}]}"], ["{sub:[]}", "{v:1,sub:[1]}"]),
    "anything": ({}, ["<x>", "-1.5", "null", "[]", "[1,{a:<b>,c-d:[{}]}]", "{}"], ["x", "[1,]", "{<a>:1}"]),
    "either": ({"oneOf": [{"type": "string"}, {"type": "array"}]}, ["<a>", "[1]"], ["1"]),
}


@pytest.mark.parametrize(
    "marks", ["<start_function_call> <end_function_call>", f"{KEY_MARKS} <start_function_call> <end_function_call>"]
)
@pytest.mark.parametrize("name", GEMMA_VALUES)
def test_values_of_function_gemma_follow_their_schemas_and_are_read_as_such(name: str, marks: str) -> None:
    schema, good, bad = GEMMA_VALUES[name]
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "$defs": {
            "named": {
                "type": "object",
                "properties": {"n": {"type": "string"}},
                "required": ["n"],
                "additionalProperties": False,
            },
            "tree": {
                "type": ["object"],
                "properties": {"v": {"type": "integer"}, "sub": {"type": "array", "items": TREE}},
                "required": ["v"],
            },
        },
    }

    def called(value: str) -> str:
        marked = re.sub("[<>]", "<escape>", value)
        return f"<start_function_call>call:look{{a:{marked}}}<end_function_call>"

    outputs, go = Outputs(marks), "<start_function_call>call:go{}<end_function_call>"
    tools = (Function("look", parameters=parameters, strict=True), Function("go"))
    grammar = marked_grammar(None, Room(None, calls=FUNCTION_GEMMA, tools=tools), outputs.marks)
    assert grammar is not None
    judged(
        outputs,
        grammar,
        ["Yes.", go, *(f"Hm.{called(value)}{go}" for value in good)],
        [called(value).replace("look", "come") for value in good] + [called(value) for value in bad],
    )
    for value in good:
        (call,) = ToolText(FUNCTION_GEMMA, {"look": parameters}).push(called(value))
        jsonschema.validate(json.loads(call.arguments), parameters)  # type: ignore[union-attr]  # it is a call
    forced = marked_grammar(None, Room(None, calls=FUNCTION_GEMMA, tools=tools, is_forced=True), outputs.marks)
    assert forced is not None
    judged(outputs, forced, [go, go + called(good[0])], ["", "Yes.", called(bad[0])])


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"enum": [[1]]}}}, "enum: [1] is not allowed in this form"),
        ({"properties": {"a": {"properties": {}}}}, "a value without a type is not allowed"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems is not allowed"),
        ({"properties": {"a:b": {"type": "null"}}}, "the name 'a:b' is not allowed"),
        ({"properties": {"a": {"type": "array", "minItems": "1"}}}, "minItems '1' and maxItems None are not allowed"),
    ],
)
def test_what_has_no_rules_in_the_form_of_function_gemma_is_told(schema: dict[str, object], problem: str) -> None:
    told = problem_of_tools(FUNCTION_GEMMA, [Function("look", parameters=schema)], Marks(lambda mark: None, []))
    assert told.startswith(f"'look': {problem}")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "pattern: '^a|b$' is not allowed"),
        ({"properties": {"a": {"type": "string", "pattern": "a(^b)"}}}, "allowed: ^ and $ around all of it"),
        ({"properties": {"a": {"type": "string", "format": "hostname"}}}, "format: 'hostname' is not allowed"),
        ({"properties": {"a": {"type": "string", "enum": ["x"], "minLength": 1}}}, "enum is not allowed with a"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not is not allowed in this form"),
        ({"properties": {"a": {"enum": ["<parameter=b>"]}}}, "the text '<parameter=b>' is not allowed"),
        ({"properties": {"a": {"enum": ["5", 6]}}}, "the text '5' is not allowed"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 1}}}, "a text or another"),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"const": None}]}}}, "true, false or null beside a text"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}, {"const": "x"}]}}}, "oneOf is not allowed in this form"),
        ({"properties": {"a": {"type": "integer", "enum": ["x"]}}}, "enum: no value of it has its type"),
        ({"properties": {"a>b": {}}}, "the name 'a>b' is not allowed"),
        ({"properties": {}, "required": ["a"]}, "required: 'a' is not allowed"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties is not allowed"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "it refers to others too often"),
    ],
)
def test_what_has_no_rules_in_markup_is_told(schema: dict[str, object], problem: str) -> None:
    told = problem_of_tools(
        QWEN_CODER, [Function("go"), Function("look", parameters=schema, strict=True)], Marks(lambda mark: None, [])
    )
    assert told.startswith("'look': ")
    assert problem in told
    assert told.endswith(", or the tool without strict")
    assert not problem_of_tools(
        HERMES, [Function("look", parameters=schema, strict=True)], Marks(lambda mark: None, [])
    )


def test_a_value_has_the_definitions_that_it_refers_to_and_no_others() -> None:
    definitions = {f"d{number}": {"type": "array", "items": {"enum": [number]}} for number in range(300)}
    definitions["d0"] = {"type": "array", "items": {"$ref": "#/$defs/d1"}}
    values = {f"p{number}": {"type": "array", "items": {"$ref": f"#/$defs/d{number}"}} for number in range(300)}
    tool = Function("look", parameters={"$defs": definitions, "properties": values}, strict=True)
    marks = Marks(lambda mark: None, [])
    assert not problem_of_tools(QWEN_CODER, [tool], marks)
    (rule,) = [rule for rule in rules_of_calls(QWEN_CODER, [tool], marks) if rule.startswith("arguments0:")]
    said = [json.loads(found) for found in re.findall(r'%json (\{.*?\}) "', rule)]
    assert [sorted(schema["$defs"]) for schema in said] == [["d0", "d1"], *([f"d{number}"] for number in range(1, 300))]


LADDER = {f"d{step}": {"anyOf": [{"$ref": f"#/$defs/d{step + 1}"}] * 20} for step in range(6)} | {
    "d6": {"type": "string"}
}
WIDE = {"anyOf": [{"type": "array", "items": {"const": number}} for number in range(2000)]}


@pytest.mark.parametrize("form", [QWEN_CODER, FUNCTION_GEMMA], ids=["markup", "gemma"])
@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": LADDER, "properties": {"a": {"$ref": "#/$defs/d0"}}},
        {"$defs": {"d": WIDE}, "properties": {f"p{number}": {"$ref": "#/$defs/d"} for number in range(2000)}},
        {"properties": {f"p{number}": {"type": ["string", "integer"]} for number in range(30_000)}},
    ],
    ids=["a ladder", "many of a wide one", "many"],
)
def test_a_short_schema_that_would_say_much_is_refused(form: CallForm, schema: dict[str, object]) -> None:
    tools = [Function(f"f{number}", parameters=schema, strict=True) for number in range(3)]
    told = problem_of_tools(form, tools, Marks(lambda mark: None, []))
    expected = "'f0': its rules are too long for this form; allowed: a shorter schema, or the tool without strict"
    assert told == expected


def test_what_tools_say_counts_together() -> None:
    values = {f"p{number}": {"type": "string"} for number in range(400)}
    tools = [Function(f"f{number}", parameters={"properties": values}, strict=True) for number in range(2000)]
    assert not problem_of_tools(QWEN_CODER, tools[:3], Marks(lambda mark: None, []))
    assert "its rules are too long" in problem_of_tools(QWEN_CODER, tools, Marks(lambda mark: None, []))


def test_a_pattern_with_classes_that_do_not_end_is_looked_through_once() -> None:
    schema = {"properties": {"a": {"type": "string", "pattern": "[" * 200_000}}}
    problem_of_tools(QWEN_CODER, [Function("look", parameters=schema, strict=True)], Marks(lambda mark: None, []))


@pytest.mark.parametrize("form", [HERMES, SEED, MINIMAX, GLM, FUNCTION_GEMMA, GEMMA_4])
def test_forms_whose_first_mark_is_no_token_leave_calls_as_they_are(form: CallForm) -> None:
    assert marked_grammar(None, Room(None, calls=form, tools=(STRICT,)), Outputs("").marks) is None


@pytest.mark.parametrize(
    ("sampling", "good", "bad"),
    [
        (SCHEMA_OF_ANSWER, ANSWER, '{"a": "1"}'),
        (api.SamplingParams(json_schema='{"type": "string", "pattern": "^a/\\"b$"}'), '"a/\\"b"', '"a/b"'),
        (api.SamplingParams(json_object=True), '{"b": [1]}', "[1]"),
        (api.SamplingParams(regex='a/b\\/c\nd\\\\|e[/"]+'), "a/b/c\nd\\", "a/b"),
        (api.SamplingParams(regex='a/b\\/c\nd\\\\|e[/"]+'), 'e/"/', "e"),
        (api.SamplingParams(choice=api.Choice(choices=['"yes"\n', "no", "no"])), '"yes"\n', "yes"),
    ],
)
def test_each_kind_binds_the_answer(sampling: api.SamplingParams, good: str, bad: str) -> None:
    bound = bound_by(sampling)
    assert bound is not None
    outputs = Outputs(MARKS)
    grammar = marked_grammar(bound, Room(USUAL), outputs.marks)
    judged(outputs, grammar, [good, f"<think>Hm.</think>\n{good}"], [bad, f"<think>Hm.</think>\n{bad}"])


@pytest.mark.parametrize(
    "sampling",
    [
        api.SamplingParams(),
        api.SamplingParams(json_schema="{"),
        api.SamplingParams(json_schema="[" * 100_000),
        api.SamplingParams(json_object=False),
        api.SamplingParams(grammar='start: "a"'),
        api.SamplingParams(choice=api.Choice()),
    ],
    ids=["none", "no JSON", "nested deeply", "no object", "own grammar", "no choice"],
)
def test_what_binds_the_whole_output_or_is_wrong_stays_as_it_is(sampling: api.SamplingParams) -> None:
    assert bound_by(sampling) is None


def test_a_schema_within_means_what_it_means_alone_and_its_faults_are_told_alike() -> None:
    outputs = Outputs(MARKS)
    # A tagged union that llguidance refuses as it stands, and white space.
    union = {"oneOf": [{"properties": {"k": {"const": kind}}, "required": ["k"], "type": "object"} for kind in "ab"]}
    grammar = marked_grammar(f"%json {json.dumps(union)}", Room(USUAL), outputs.marks)
    judged(outputs, grammar, ['{"k": "a"}', '<think>"%json 1"</think>{"k":"b"}'], ['{"k":  "a"}', '{"k": "c"}'])
    for schema, told in (
        ('{"not": {"items": {}}}', 'Unimplemented keys: ["not"]'),
        ("false", "Unsatisfiable schema: it is false"),
        ('{"multipleOf": 12345.678}', "multipleOf: their least common multiple exceeds"),
    ):
        for constraint in (
            Constraint("json_schema", schema),
            Constraint("grammar", marked_grammar(f"%json {schema}", Room(USUAL), outputs.marks)),
        ):
            with pytest.raises(ConstraintError) as caught:
                outputs._compiler.compile(constraint)
            assert str(caught.value).startswith(told)
