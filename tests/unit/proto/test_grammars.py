"""What a constraint means: which outputs each kind lets pass, what is refused, and what a stranger's schema may cost."""

import json
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headway_proto.grammars import MAX_CHOICES, ConstraintError, GrammarCompiler, TokenizerUnusableError
from headway_proto.sampling import Constraint, SamplingParams, violations
from model_core import demo_model

TOKENIZER = (demo_model() / "tokenizer.json").read_text(encoding="utf-8")
ENCODER = Tokenizer.from_str(TOKENIZER)
VOCAB_SIZE = 4100
"""Wider than the tokenizer: models pad their logits."""

ENDS = (0, 2)
TREE = {"$defs": {"t": {"type": "object", "properties": {"l": {"$ref": "#/$defs/t"}}, "additionalProperties": False}}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=ENDS)


def legal(compiler: GrammarCompiler, matcher) -> set[int]:
    words = compiler.new_mask()
    matcher.fill_mask(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), count=VOCAB_SIZE, bitorder="little")).tolist())


def passes(compiler: GrammarCompiler, constraint: Constraint, text: str) -> bool:
    """Whether ``text`` may be drawn token by token, and an end behind it."""
    matcher = compiler.compile(constraint).matcher()
    for token_id in ENCODER.encode(text).ids:
        if token_id not in legal(compiler, matcher):
            return False
        matcher.accept((token_id,))
    return ENDS[0] in legal(compiler, matcher)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_object", "", ['{"a": [1, {"b": null}]}', "{}"], ["[]", "1", '{"a": ', '{"a":  1}', '{\n"a": 1}']),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 17}', ["5", "17"], ["4", "18", '"5"', "5.5"]),
        ("json_schema", '{"enum": ["a", 1, null]}', ['"a"', "1", "null"], ["a", "2"]),
        ("json_schema", '{"type": "string", "maxLength": 3}', ['"abc"', '""'], ['"abcd"', '"']),
        ("json_schema", '{"type": "array", "items": {"type": "boolean"}, "minItems": 1}', ["[true, false]"], ["[]"]),
        ("json_schema", json.dumps(TREE | {"$ref": "#/$defs/t"}), ['{"l": {"l": {}}}'], ['{"r": {}}']),
        ("json_schema", "true", ["{}", "[1]", '"x"'], ["x"]),
        ("regex", "a+|b[0-9]{2}", ["a", "aaa", "b12"], ["", "b1", "ab"]),
        ("regex", "[^x]*é", ["né", "é"], ["n", "xé"]),
        ("grammar", 'root ::= "x" tail\ntail ::= "" | "," root', ["x", "x,x,x"], ["x,", ",x"]),
        ("grammar", 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/', ["1", "12+3"], ["+1", "1+"]),
        (
            "choice",
            json.dumps(['say "hi"\n', "a\\b", "é\u2028", "a/b"]),
            ['say "hi"\n', "a\\b", "é\u2028", "a/b"],
            ["a"],
        ),
        ("choice", '["yes", "yes", "yesterday"]', ["yes", "yesterday"], ["yester", "no"]),
    ],
)
def test_what_passes(compiler, kind, text, good, bad) -> None:
    constraint = Constraint(kind, text)
    assert {given: passes(compiler, constraint, given) for given in [*good, *bad]} == (
        dict.fromkeys(good, True) | dict.fromkeys(bad, False)
    )


def test_when_all_is_said_only_the_models_ends_are_left_and_what_comes_behind_them_is_nobodys(compiler) -> None:
    for end in ENDS:
        matcher = compiler.compile(Constraint("choice", '["no"]')).matcher()
        matcher.accept(ENCODER.encode("no").ids)
        assert legal(compiler, matcher) == set(ENDS)
        matcher.accept((end,))
        matcher.accept((77,))
        assert legal(compiler, matcher) == set(ENDS)


def test_matchers_of_one_grammar_know_nothing_of_each_other(compiler) -> None:
    grammar = compiler.compile(Constraint("regex", "ab|cd"))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(ENCODER.encode("a").ids)
    assert legal(compiler, second) == legal(compiler, grammar.matcher()) != legal(compiler, first)


def test_what_does_not_follow_is_an_error(compiler) -> None:
    matcher = compiler.compile(Constraint("regex", "[0-9]+")).matcher()
    with pytest.raises(ConstraintError) as caught:
        matcher.accept(ENCODER.encode("abc").ids)
    assert str(caught.value).startswith("the output does not follow its constraint: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", "{", "^is not a JSON schema: Expecting"),
        ("json_schema", "[1]", "^holds a list; allowed: a JSON schema$"),
        ("json_schema", '{"type": "text"}', "Invalid type: text"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', r'Unimplemented keys: \["uniqueItems"\]'),
        ("json_schema", '{"not": {"items": {}}, "x-guidance": {"lenient": true}}', r'Unimplemented keys: \["not"\]'),
        ("json_schema", '{"$ref": "http://127.0.0.1/x"}', "Default retriever does not fetch resources"),
        ("json_schema", "false", "Unsatisfiable schema"),
        ("json_schema", '{"minimum": 1' + "0" * 400 + "}", "^minimum: 1000000"),
        ("json_schema", "[" * 20_000, "^is not a JSON schema: "),
        ("json_schema", '{"items":' * 400 + "{}" + "}" * 400, "recursion"),
        ("json_schema", '{"multipleOf": 999983}', "^multipleOf: their least common multiple exceeds 10000"),
        ("json_schema", '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}', "^multipleOf"),
        ("json_schema", '{"multipleOf": 1e300}', "^multipleOf"),
        ("regex", "(a", "unclosed group"),
        ("regex", "a(?=b)", "look-around"),
        ("grammar", 'start: x\nx: %json {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}', "^multipleOf"),
        ("grammar", 'start: x\nx: %json  {"items": {"minimum": 9007199254740993}}', "^minimum: 9007199254740993"),
        ("grammar", "start: nothing", "unknown name"),
        ("grammar", "root ::= " + "(" * 3000, "recursion|nested"),
        ("choice", "[]", f"^0 choices are not allowed; allowed: 1 to {MAX_CHOICES} texts$"),
        ("choice", "[1]", "choices are not allowed"),
        ("choice", json.dumps([str(number) for number in range(MAX_CHOICES + 1)]), "^1025 choices"),
        ("tags", "", "^'tags' is not a kind of constraint$"),
    ],
    ids=lambda value: value[:24],
)
def test_what_cannot_be_followed_is_refused_in_a_line(compiler, kind, text, reason) -> None:
    with pytest.raises(ConstraintError, match=reason) as caught:
        compiler.compile(Constraint(kind, text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "number", "multipleOf": 0.01}',
        '{"allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}',
        '{"properties": {"multipleOf": {"type": "integer"}}}',
        '{"enum": [{"multipleOf": "x"}]}',
    ],
)
def test_ordinary_multiples_pass(compiler, text) -> None:
    compiler.compile(Constraint("json_schema", text))


HOSTILE = {
    "nested counts": ("regex", "(a{1,1000}){1,1000}"),
    "ambiguous": ("grammar", 'start: a\na: a a | "x" | b\nb: a b a | "x"'),
    "cyclic": ("grammar", 'start: start start | start start start | "a" | ""'),
    "repeated": ("grammar", 'start: a{1,100000}\na: b{1,100000}\nb: "x"'),
    "doubling references": (
        "json_schema",
        json.dumps(
            {
                "$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(24)}
                | {"d24": {"type": "integer"}},
                "$ref": "#/$defs/d0",
            }
        ),
    ),
    "every combination": (
        "json_schema",
        json.dumps(
            {"allOf": [{"anyOf": [{"properties": {f"p{n}": {"const": k}}} for k in range(4)]} for n in range(12)]}
        ),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_ends_in_an_error_or_goes_on_at_a_bounded_cost(compiler, name) -> None:
    draw = np.random.default_rng(0)
    began = time.thread_time()
    try:
        matcher = compiler.compile(Constraint(*HOSTILE[name])).matcher()
        for _ in range(60):
            going_on = sorted(legal(compiler, matcher) - set(ENDS))
            if not going_on:
                break
            matcher.accept((int(draw.choice(going_on)),))
    except ConstraintError:
        pass  # that is as good
    assert time.thread_time() - began < 8, "masks of tens of milliseconds at worst; seconds would be no bound"


def test_equal_constraints_allow_the_same_tokens_everywhere() -> None:
    schema = Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}')
    walks = []
    for _ in range(2):
        compiler = GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=ENDS)
        matcher, draw, walk = compiler.compile(schema).matcher(), np.random.default_rng(4), []
        for _ in range(40):
            allowed = sorted(legal(compiler, matcher))
            walk.append(allowed)
            matcher.accept((int(draw.choice(allowed)),))
        walks.append(walk)
    assert walks[0] == walks[1]


def test_a_tokenizer_without_use_is_told() -> None:
    with pytest.raises(TokenizerUnusableError, match="no token that ends an output"):
        GrammarCompiler(TOKENIZER, vocab_size=VOCAB_SIZE, eos_token_ids=())
    with pytest.raises(TokenizerUnusableError):
        GrammarCompiler("{}", vocab_size=VOCAB_SIZE, eos_token_ids=ENDS)
    no_byte = Tokenizer(models.WordLevel({"<unk>": 0, "<0xZZ>": 1}, unk_token="<unk>"))
    no_byte.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    with pytest.raises(TokenizerUnusableError, match="InvalidDigit"):  # The library panics, which is no Exception.
        GrammarCompiler(no_byte.to_str(), vocab_size=VOCAB_SIZE, eos_token_ids=ENDS)


def test_an_added_token_that_the_model_lacks_takes_nothing_away() -> None:
    tokenizer = Tokenizer.from_str(TOKENIZER)
    width = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    compiler = GrammarCompiler(tokenizer.to_str(), vocab_size=width, eos_token_ids=ENDS)
    assert passes(compiler, Constraint("regex", "a+b"), "aab")


@pytest.mark.parametrize("inside", [False, True])
def test_a_space_that_the_tokenizer_puts_before_a_text_is_not_drawn(inside: bool) -> None:
    """What must come next is tokenised by the library, and was not what the constraint wants."""
    tokenizer = Tokenizer.from_str(TOKENIZER)
    step = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), step]) if inside else step
    compiler = GrammarCompiler(tokenizer.to_str(), vocab_size=VOCAB_SIZE, eos_token_ids=ENDS)
    assert passes(compiler, Constraint("regex", "hello[.]"), "hello.")


def test_what_both_front_ends_check_of_a_constraint() -> None:
    def found(constraint: Constraint, **more: int) -> list[tuple[str, str]]:
        return violations(SamplingParams(constraint=constraint, **more), VOCAB_SIZE)

    assert found(Constraint("regex", "a")) == []
    assert found(Constraint("tag", "a"))[0][0] == "constraint"
    assert found(Constraint("regex", "é" * 131_073)) == [
        ("regex", "262146 bytes are not allowed; allowed: at most 262144")
    ]
    assert found(Constraint("regex", "a"), min_tokens=3) == [
        ("min_tokens", "3 is not allowed together with a constraint; allowed: 0")
    ]
