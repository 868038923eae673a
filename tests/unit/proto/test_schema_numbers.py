"""Numbers in JSON schemas: what is taken is kept to the last digit, and what would be rounded is refused by name."""

import json
import random
from decimal import Decimal, InvalidOperation

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from headway_proto.grammars import ConstraintError, GrammarCompiler
from headway_proto.sampling import Constraint
from headway_proto.schema_numbers import number_problem
from model_core import demo_model

TOKENIZER = (demo_model() / "tokenizer.json").read_text(encoding="utf-8")
ENCODER = Tokenizer.from_str(TOKENIZER)
ENDS = (0, 2)
MOST_INT64 = (1 << 63) - 1
INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=4096, eos_token_ids=ENDS)


def sampled(compiler: GrammarCompiler, matcher, draw: random.Random) -> str | None:
    """An output drawn among what is allowed; None if it does not come to an end soon."""
    words, output = compiler.new_mask(), []
    for _ in range(100):
        matcher.fill_mask(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        going_on = [token for token in allowed if token not in ENDS]
        if not going_on or (len(going_on) < len(allowed) and draw.random() < 0.3):
            return ENCODER.decode(output)
        output.append(draw.choice(going_on))
        matcher.accept(output[-1:])
    return None


def exact(text: str) -> object:
    """The JSON with each number as it is written."""

    def number(digits: str) -> object:
        try:
            return Decimal(digits)
        except InvalidOperation:
            return float(digits)

    return json.loads(text, parse_float=number)


@pytest.mark.parametrize(
    "schema",
    [
        INTEGER | {"minimum": -(2**53), "maximum": 2**53},
        INTEGER | {"minimum": 2**53 - 3, "maximum": 2**53},
        INTEGER | {"exclusiveMinimum": 2**53 - 3, "exclusiveMaximum": 2**53 - 1},
        INTEGER | {"minimum": -(10**18) - 1280, "maximum": -(10**18)},
        INTEGER | {"minimum": 2**60, "maximum": 2**60 + 2048},
        INTEGER | {"minimum": MOST_INT64 - 1023 - 1024, "maximum": MOST_INT64},
        INTEGER | {"maximum": MOST_INT64},
        INTEGER | {"minimum": -5, "maximum": -1},
        NUMBER | {"minimum": -0.001, "maximum": 0},
        NUMBER | {"exclusiveMinimum": -0.001, "exclusiveMaximum": 0.001},
        NUMBER | {"exclusiveMinimum": 5, "exclusiveMaximum": 6},
        NUMBER | {"exclusiveMinimum": 0, "maximum": 1},
        NUMBER | {"exclusiveMinimum": 0.5, "maximum": 0.75},
        NUMBER | {"minimum": 1e-300, "maximum": 1e-299},
        NUMBER | {"minimum": 1e18, "maximum": 2e18},
        NUMBER | {"multipleOf": 0.3, "minimum": 0.3, "maximum": 30},
        NUMBER | {"multipleOf": 0.05, "minimum": -1, "maximum": 1},
        {"allOf": [NUMBER | {"multipleOf": 0.25}, {"multipleOf": 0.1, "minimum": 0, "maximum": 50}]},
        {"const": -(2**53)},
        {"enum": [10**17, 0.1, 1e-7, -0.0, 123456.789012345]},
        {"type": "array", "prefixItems": [NUMBER | {"exclusiveMinimum": 0}, NUMBER | {"minimum": 0.25, "maximum": 0.5}],
         "minItems": 2, "items": False},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_is_taken_is_kept(compiler, schema) -> None:
    grammar, draw = compiler.compile(Constraint("json_schema", json.dumps(schema))), random.Random(7)
    outputs = {sampled(compiler, grammar.matcher(), draw) for _ in range(40)} - {None}
    assert outputs
    for output in outputs:
        jsonschema.validate(exact(output), exact(json.dumps(schema)), cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (INTEGER | {"minimum": 2**62 + 1, "maximum": 2**62 + 2}, f"minimum: {2**62 + 1} cannot be kept exactly; allowed: "),
        (INTEGER | {"minimum": -(2**63), "maximum": MOST_INT64}, f"minimum: {-(2**63)} cannot"),
        (INTEGER | {"minimum": MOST_INT64}, f"minimum: {MOST_INT64} cannot"),
        (INTEGER | {"minimum": 0, "maximum": 2**64 - 1}, f"maximum: {2**64 - 1} cannot"),
        (INTEGER | {"exclusiveMinimum": 2**53}, f"exclusiveMinimum: {2**53} cannot"),
        (INTEGER | {"minimum": 2**53, "exclusiveMinimum": True}, f"exclusiveMinimum: {2**53} cannot"),
        (INTEGER | {"exclusiveMaximum": -(2**53)}, f"exclusiveMaximum: {-(2**53)} cannot"),
        ({"maximum": MOST_INT64}, f"maximum: {MOST_INT64} cannot"),
        (NUMBER | {"minimum": 2**60}, f"minimum: {2**60} cannot"),
        ('{"minimum": 0.12345678901234567891}', "minimum: 0.12345678901234567891 cannot"),
        ('{"maximum": 1e300}', "maximum: 1E+300 cannot"),
        ('{"maximum": 1e999999999999999999999}', "maximum: Infinity cannot"),
        ('{"minimum": NaN}', "is not a JSON schema: NaN is not a JSON number"),
        ({"const": 2**53 + 1}, f"const: {2**53 + 1} cannot"),
        ({"enum": ["a", {"b": [-(2**63)]}]}, f"enum: {-(2**63)} cannot"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"additionalProperties": {"const": 2**64}}}}, f"const: {2**64}"),
        ({"items": {"properties": {"x": {"minimum": 2**53 + 1}}}}, f"minimum: {2**53 + 1} cannot"),
        (NUMBER | {"minimum": -0.001, "exclusiveMaximum": 0},
         "exclusiveMaximum: 0 is not kept together with minimum -0.001; allowed: a range with another integer"),
        (NUMBER | {"exclusiveMinimum": 5, "maximum": 5.5}, "exclusiveMinimum: 5 is not kept together with maximum 5.5"),
        (NUMBER | {"minimum": 5, "exclusiveMinimum": True, "maximum": 5.5}, "exclusiveMinimum: 5 is not kept"),
        ({"allOf": [NUMBER | {"exclusiveMinimum": 5}, {"maximum": 5.5}]}, "exclusiveMinimum: 5 is not kept"),
        (NUMBER | {"multipleOf": 0.07}, "multipleOf: 0.07 cannot be kept exactly; allowed: integers below"),
        (NUMBER | {"multipleOf": 2**53 + 1}, f"multipleOf: {2**53 + 1} cannot"),
        ({"allOf": [{"multipleOf": 19.53125}, {"multipleOf": 0.001953125}]}, "multipleOf: 19.53125, 0.001953125 have no"),
        ({"type": "string", "maxLength": 2**32}, f"maxLength: {2**32} is too high to count to; allowed: at most {2**32 - 1}"),
        ({"type": "array", "minItems": 10**30}, f"minItems: {10**30} is too high to count to"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_what_would_not_be_kept_is_refused_by_keyword_and_value(compiler, schema, problem) -> None:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(ConstraintError) as caught:
        compiler.compile(Constraint("json_schema", text))
    assert str(caught.value).startswith(problem)
    assert len(str(caught.value)) < 250


def test_parts_that_nothing_combines_are_looked_at_alone() -> None:
    apart = {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"minimum": 0.25, "maximum": 0.5}}}
    assert number_problem(json.dumps(apart)) == ""
    assert number_problem(json.dumps(apart | {"allOf": [{"$ref": "#/$defs/p"}], "title": "x"})) != ""
    assert number_problem(json.dumps({"allOf": [apart], "title": "x", "default": None})) == ""
    assert "is not kept together" in number_problem(json.dumps(apart | {"allOf": [{}, {}]}))
    refined = {"$ref": "#/$defs/p", "description": "x", "$defs": {"p": apart}}
    assert number_problem(json.dumps(refined)) == ""
    assert "is not kept together" in number_problem(json.dumps(refined | {"maximum": 1}))


def test_a_fault_of_the_library_is_a_verdict(compiler, monkeypatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*given, **more):
        raise PanicException("attempt to negate with overflow")

    monkeypatch.setattr("headway_proto.grammars.LLMatcher", panic)
    monkeypatch.setattr("headway_proto.grammars._grammar_of", lambda constraint: "")
    with pytest.raises(ConstraintError, match="the grammar library fails on it"):
        compiler.compile(Constraint("regex", "a"))
