"""Schemas as people's libraries write them: what they say in words that the grammar library lacks is followed too."""

import datetime as dt
import enum
import ipaddress
import json
import random
import re
import time
import uuid
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pydantic
import pytest
from tokenizers import Tokenizer

from headway_proto.grammars import ConstraintError, GrammarCompiler
from headway_proto.sampling import Constraint
from headway_proto.schema_formats import PATTERNS
from headway_proto.schema_forms import rewritten
from model_core import demo_model

TOKENIZER = (demo_model() / "tokenizer.json").read_text(encoding="utf-8")
ENCODER = Tokenizer.from_str(TOKENIZER)
ENDS = (0, 2)
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=4096, eos_token_ids=ENDS)


def legal(compiler: GrammarCompiler, matcher: Any) -> list[int]:
    words = compiler.new_mask()
    matcher.fill_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def passes(compiler: GrammarCompiler, schema: object, value: object) -> bool:
    matcher = compiler.compile(Constraint("json_schema", json.dumps(schema))).matcher()
    for token_id in ENCODER.encode(json.dumps(value, ensure_ascii=False)).ids:
        if token_id not in legal(compiler, matcher):
            return False
        matcher.accept((token_id,))
    return ENDS[0] in legal(compiler, matcher)


def outputs(compiler: GrammarCompiler, schema: object, num: int) -> list[str]:
    """Drawn among what is allowed, those that came to an end."""
    grammar, draw, texts = compiler.compile(Constraint("json_schema", json.dumps(schema))), random.Random(5), []
    closing = {token for token in range(4096) if ENCODER.decode([token]).strip()[:1] in {'"', "}", "]"}}
    for _ in range(num):
        matcher, output = grammar.matcher(), []
        for _ in range(120):
            allowed = [token for token in legal(compiler, matcher) if token not in ENDS]
            if not allowed:
                texts.append(ENCODER.decode(output))
                break
            soon = [token for token in allowed if token in closing]
            output.append(draw.choice(soon if soon and draw.random() < 0.5 else allowed))
            matcher.accept(output[-1:])
    return texts


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Number(pydantic.BaseModel):
    kind: Literal["number"] = "number"
    value: int = 0


class Sum(pydantic.BaseModel):
    kind: Literal["sum"] = "sum"
    left: "Expression"
    right: "Expression"


Expression = Annotated[Number | Sum, pydantic.Field(discriminator="kind")]
Sum.model_rebuild()


class Calculation(pydantic.BaseModel):
    expression: Expression
    plain: Number | None = None


class Black(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    color: Literal["black"] = "black"


class White(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    color: Literal["white"] = "white"


Cat = Annotated[Black | White, pydantic.Field(discriminator="color")]


class Dog(pydantic.BaseModel):
    kind: Literal["dog", "wolf"] = "dog"


class Folder(pydantic.BaseModel):
    name: str
    folders: list["Folder"] = []


def of(kind: object) -> dict[str, Any]:
    return pydantic.TypeAdapter(kind).json_schema()


ONE, TWO = {"kind": "number", "value": 1}, {"kind": "number", "value": 2}
COLORS = {"type": "object", "additionalProperties": {"type": "integer"}}
ADDRESS = "4f6c1b9a-0d3e-4a57-9c1e-2b7a8d9e0f11"


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # Pydantic
        (of(Calculation),
         [{"expression": {"kind": "sum", "left": ONE, "right": {"kind": "sum", "left": ONE, "right": TWO}}},
          {"expression": ONE, "plain": {"value": 3}}],
         [{"expression": {"value": 1}}, {"expression": {"kind": "product"}}]),
        (of(Expression), [ONE, {"kind": "sum", "left": ONE, "right": TWO}], [{"value": 1}]),
        (of(Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]),
         [{"kind": "cat", "color": "white"}, {"kind": "wolf"}], [{}, {"kind": "cat"}, {"color": "white"}]),
        (of(Folder), [{"name": "a", "folders": [{"name": "b"}]}], [{"folders": []}]),
        (of(dict[Color, int]), [{}, {"red": 1}, {"red": 1, "blue": 2}], [{"green": 1}, {"red": "x"}]),
        (of(dict[uuid.UUID, int]), [{ADDRESS: 1}], [{"x": 1}]),
        (of(dict[dt.date, int]), [{"2024-02-29": 1}], [{"2023-02-29": 1}]),
        (of(dict[Annotated[str, pydantic.Field(min_length=2, max_length=4)], int]), [{"abcd": 1}], [{"a": 1}, {"abcde": 1}]),
        (of(dict[Annotated[str, pydantic.Field(max_length=255)], int]), [{"é" * 40: 1}], [{"e": None}]),
        (of(set[Literal["a", "b", "c"]]), [[], ["c", "a"], ["b", "c", "a"]], [["a", "a"], ["d"]]),
        (of(set[Literal["a", "b", "c", "d", "e", "f", "g", "h"]]), [[], ["h"], ["a", "c", "h"], list("abcdefgh")], [["a", "a"], ["i"]]),
        ({"type": "array", "items": {"enum": list("abcdefghijkl")}, "uniqueItems": True, "maxItems": 2}, [["k", "b"]], [["k", "k"]]),
        (of(set[Literal[1, 2]]), [[2, 1]], [[1, 1], [3]]),
        ({"type": "array", "items": {"type": "string", "enum": ["a", 1]}, "uniqueItems": True}, [["a"]], [[1]]),
        (of(Annotated[set[bool], pydantic.Field(min_length=1)]), [[True], [False, True]], [[], [True, True]]),
        (of(Annotated[set[str], pydantic.Field(max_length=1)]), [[], ["x"]], [["x", "y"]]),
        (of(pydantic.UUID4), [ADDRESS], [ADDRESS.replace("-4", "-1")]),
        (of(pydantic.Base64Bytes), ["YWJj", "YQ=="], ["YWJ", "a b="]),
        (of(pydantic.IPvAnyAddress), ["10.0.0.1", "::1"], ["10.0.0.256"]),
        (of(pydantic.SecretStr), ["any text"], [1]),
        # zod 4
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
         [{"a": 1, "b": 2.5}], [{"a": "1"}]),
        ({"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]},
          "additionalProperties": {"type": "number"}, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "c": 1}]),
        ({"type": "object", "propertyNames": {"type": "string", "pattern": "^[a-z]+$"}}, [{"a": 1}], [{"A": 1}]),
        ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "string"}}}, [{"b": "x"}], [{"a": 1}]),
        ({"type": "string", "format": "e164", "pattern": "^\\+[1-9]\\d{6,14}$"}, ["+4912345678"], ["4912345678"]),
        ({"type": "string", "format": "cuid", "pattern": "^[cC][0-9a-z]{6,}$"}, ["cabcdef"], ["xabcdef"]),
        # others
        (COLORS | {"propertyNames": {"enum": ["red", "blue"]}, "properties": {"green": {}, "blue": {"maximum": 3}}},
         [{"blue": 3, "red": 9}], [{"green": 1}, {"blue": 4}]),
        ({"type": "object", "properties": {"radius": {}, "length": {}, "width": {}}, "additionalProperties": False,
          "oneOf": [{"required": ["radius"]}, {"required": ["length", "width"]}]},
         [{"radius": 1}, {"radius": 1, "width": 2}, {"length": 1, "width": 2}],
         [{}, {"length": 1}, {"radius": 1, "length": 1, "width": 2}]),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "dependentRequired": {"a": ["b"], "c": []}},
         [{}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": 2, "c": 3}], [{"a": 1}, {"a": 1, "c": 1}]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, [["a", "a"]], [[1]]),
        # what is not
        ({"type": "string", "not": {"enum": ["", "logs", "log", "it's…"]}}, ["l", "logo", "logss", "x", "é", "it's"],
         ["logs", "log", "", "it's…"]),
        ({"type": "string", "minLength": 2, "pattern": "^[a-z]+$", "not": {"const": "no"}}, ["yes", "nope"], ["no", "n", "N!"]),
        ({"enum": ["a", "b", 3, None], "not": {"enum": ["b", None]}}, ["a", 3], ["b", None]),
        ({"type": "integer", "minimum": 0, "not": {"enum": [3, 1, 2]}}, [0, 4], [1, 3, -1]),
        ({"not": {"type": "string"}}, [1, None, {"a": "x"}], ["x"]),
        ({"type": "string", "not": {"pattern": "[^a-zA-Z0-9.,()@&' -]"}}, ["a b", ""], ["a_b"]),
        ({"type": "string", "not": {"pattern": "^[\\.\\s]+$"}}, ["a.", "", ".a."], [".", ". "]),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": 1}],
         [{"a": 1, "b": 1}]),
        ({"type": "object", "properties": {"id": {}, "site": {}, "app": {}},
          "not": {"allOf": [{"required": ["site"]}, {"required": ["app"]}]}}, [{"id": 1, "app": 1}], [{"site": 1, "app": 1}]),
        ({"type": "object", "properties": {"a": {}, "b": {}, "c": {}},
          "not": {"anyOf": [{"required": ["a", "b"]}, {"required": ["c"]}]}}, [{"a": 1}, {"b": 1}], [{"c": 1}, {"a": 1, "b": 1}]),
        # cases
        ({"type": "object", "properties": {"country": {"enum": ["US", "NL"]}, "code": {"type": "string"}}, "required": ["country"],
          "if": {"properties": {"country": {"const": "US"}}}, "then": {"properties": {"code": {"pattern": "^[0-9]{2}$"}}},
          "else": {"required": ["code"], "properties": {"code": {"pattern": "^[A-Z]{2}$"}}}},
         [{"country": "US"}, {"country": "US", "code": "12"}, {"country": "NL", "code": "AB"}],
         [{"country": "NL"}, {"country": "NL", "code": "12"}, {"country": "US", "code": "AB"}, {"code": "12"}]),
        ({"type": "object", "properties": {"kind": {"type": "string"}, "size": {}}, "required": ["kind"], "allOf": [
            {"if": {"properties": {"kind": {"const": "box"}}, "required": ["kind"]}, "then": {"required": ["size"]}},
            {"if": {"properties": {"kind": {"enum": ["dot", "box"]}}}, "then": True, "else": {"properties": {"size": False}}}]},
         [{"kind": "box", "size": 1}, {"kind": "dot"}, {"kind": "bo"}], [{"kind": "box"}, {"kind": "any", "size": 1}]),
        ({"type": "object", "properties": {"gift": {"type": "boolean"}, "note": {}},
          "if": {"properties": {"gift": {"const": True}}, "required": ["gift"]}, "then": {"required": ["note"]}},
         [{}, {"gift": False}, {"gift": True, "note": 1}], [{"gift": True}]),
        ({"type": "integer", "then": {"minimum": 5}}, [1], ["x"]),
        ({"type": "object", "properties": {"a": {}, "b": {"type": "integer"}},
          "dependentSchemas": {"a": {"properties": {"b": {"minimum": 3}}, "required": ["b"]}}, "dependencies": {"b": {}}},
         [{}, {"b": 1}, {"a": 1, "b": 3}], [{"a": 1}, {"a": 1, "b": 2}]),
        # one alone
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, ["abcd"], ["abc", 1]),
        ({"anyOf": [{"type": "object"}, {"type": "null"}], "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
         [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}, None, 1]),
        ({"type": "object", "properties": {"a": {}, "b": {"enum": ["x", "y"]}}, "additionalProperties": False,
          "oneOf": [{"required": ["a"]}, {"properties": {"b": {"const": "x"}}, "required": ["b"]}]},
         [{"a": 1}, {"b": "x"}, {"a": 1, "b": "y"}], [{}, {"b": "y"}, {"a": 1, "b": "x"}]),
        # some of the items
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 3, "contains": {"const": 7}}, [[7], [1, 7], [1, 2, 7]],
         [[], [1], [1, 2, 3], [7, 1, 2, 3]]),
        ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 7}, "minContains": 0}, [[], [1]], [["x"]]),
        ({"type": "string", "format": "url"}, ["https://example.com/a?b#c"], ["no url"]),
        ({"oneOf": [{"$ref": "#/components/schemas/Cat"}, {"$ref": "#/components/schemas/Dog"}],
          "discriminator": {"propertyName": "type"},
          "components": {"schemas": {
              "Cat": {"type": "object", "properties": {"type": {"enum": ["cat"]}, "born": {"format": "date", "type": "string"}}},
              "Dog": {"type": "object", "properties": {"type": {"enum": ["dog", "wolf"]}}}}}},
         [{"type": "cat", "born": "2024-02-29"}, {"type": "wolf"}], [{}, {"type": "cat", "born": "2023-02-29"}]),
        ({"type": "object", "properties": {"next": {"oneOf": [{"$ref": "#"}, {"type": "null"}]}, "v": {"type": "integer"}},
          "required": ["v"]}, [{"next": {"next": None, "v": 1}, "v": 2}], [{"next": 1, "v": 1}]),
        ({"type": "object", "oneOf": [{"properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
                                      {"properties": {"b": {}}, "required": ["b"], "additionalProperties": False}]},
         [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_what_passes(compiler, schema, good, bad) -> None:
    assert {json.dumps(value): passes(compiler, schema, value) for value in [*good, *bad]} == (
        {json.dumps(value): True for value in good} | {json.dumps(value): False for value in bad}
    )
    for text in outputs(compiler, schema, 8):
        jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator, format_checker=FORMATS)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0001-01-01", "9999-12-31"],
         ["2023-02-29", "1900-02-29", "2024-02-30", "0000-01-01", "2024-13-01"]),
        ("date-time", ["2024-02-29T23:59:59Z", "2024-01-01t00:00:00.123+02:00"],
         ["2023-02-29T00:00:00Z", "2024-01-01T00:00:60Z", "2024-01-01T24:00:00Z", "2024-01-01T00:00:00"]),
        ("time", ["12:00:00Z", "23:59:59.5-11:30"], ["12:00:60Z", "12:00:00"]),
    ],
)  # fmt: skip
def test_dates_and_times_exist(compiler, kind, good, bad) -> None:
    for schema in ({"type": "string", "format": kind}, {"type": "string", "format": kind, "pattern": "^[0-9]"}):
        assert [passes(compiler, schema, value) for value in good] == [True] * len(good)
        assert [passes(compiler, schema, value) for value in bad] == [False] * len(bad)
    readers = {"date": dt.date, "date-time": dt.datetime, "time": dt.time}
    for text in outputs(compiler, {"type": "string", "format": kind}, 60):
        pydantic.TypeAdapter(readers[kind]).validate_json(text)


EMAIL, DURATION, HOSTNAME = PATTERNS
LONG = ".".join(["a" * 60] * 5)


@pytest.mark.parametrize(
    ("pattern", "kind", "good", "bad"),
    [
        (EMAIL, "email", ["a@b.de", "a.b+c_'d-e@x-y.z1.com", "A@B.CD", "a.'b@c.de"],
         [".a@b.de", "a..b@c.de", "a.@b.de", "a'@b.de", "a@b", "a@-b.de", "a@b..de", "a@b.d1", "@b.de"]),
        (DURATION, "duration", ["P1W", "P1Y2M3D", "P3D", "PT1H", "P1YT2M", "PT1H3.5S", "PT4M5S"],
         ["P", "PT", "P1YT", "P1W1D", "P1D1Y", "1D", "PT1S2H", "P1.5D"]),
        (HOSTNAME, "hostname", ["a", "a-b.c1.de", "x" * 63], ["", "-a", "a..b", "x" * 64, "a_b", LONG]),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_zod_says_with_look_ahead_is_said_without(compiler, pattern, kind, good, bad) -> None:
    assert [bool(re.search(pattern, value)) for value in good + bad] == [True] * len(good) + [False] * len(bad)
    for more in ({}, {"format": kind}, {"maxLength": 200}):
        schema = {"type": "string", "pattern": pattern, **more}
        said = [value for value in good if more.get("format") != "duration" or "." not in value]
        assert [passes(compiler, schema, value) for value in said + bad] == [True] * len(said) + [False] * len(bad)
    for text in outputs(compiler, {"type": "string", "pattern": pattern, "maxLength": 60}, 40):
        assert re.search(pattern, json.loads(text))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (r"^(?!\s*$).+", ["a", " a ", "a\nb"], ["", " ", "\t \t"]),
        (r"^(?!\s+$)(?=.{2,4}$)[a-z ]*$", ["ab", " abc"], ["a", "  ", "abcde", "aB"]),
        (r"^(?=.*[A-Z])(?=.*\d)(?=.*[()!])\S{4,}$", ["aB1!", "(9Z9("], ["aB11", "B1!", "ab1!", "aB1! "]),
        (r"^(?!.*\s)[^x]+$", ["ab"], ["a b", "ax"]),
        (r"^(?!.*[_(])(?:(?s:.*))$", ["", "a", "a\n_"], ["_", "a(b", "(\n"]),
        (r"^(?=[(\])a]|b)(?:a|b|.)", ["ax", "b", ")", "("], ["c", ""]),
    ],
)
def test_what_a_pattern_looks_ahead_to_at_its_beginning_is_followed(compiler, pattern, good, bad) -> None:
    assert [bool(re.search(pattern, value)) for value in good + bad] == [True] * len(good) + [False] * len(bad)
    for schema in ({"type": "string", "pattern": pattern}, {"type": "string", "pattern": pattern, "maxLength": 40}):
        assert [passes(compiler, schema, value) for value in good + bad] == [True] * len(good) + [False] * len(bad)
        for text in outputs(compiler, schema, 8):
            assert re.search(pattern, json.loads(text))


def test_networks_have_no_bits_behind_their_masks(compiler) -> None:
    for kind in (ipaddress.IPv4Network, ipaddress.IPv4Interface):
        for text in outputs(compiler, pydantic.TypeAdapter(kind).json_schema(), 20):
            pydantic.TypeAdapter(kind).validate_json(text)
    assert passes(compiler, {"type": "string", "format": "ipv4network"}, "10.1.0.0/16")
    assert not passes(compiler, {"type": "string", "format": "ipv4network"}, "10.1.2.0/16")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "^oneOf: "),
        ({"oneOf": [{"enum": [1, "a"]}, {"const": 1.0}]}, "^oneOf: "),
        ({"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}, {"properties": {"a": {"const": 2}}}]}, "^oneOf"),
        ({"type": "object", "oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}]}, "^oneOf"),
        (of(set[str]), "uniqueItems.*; allowed: an enum of few items, maxItems 1"),
        ({"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"], "patternProperties": {}}]}, "^oneOf: one value may be"),
        ({"not": {}}, "Unsatisfiable"),
        ({"type": "boolean", "not": {"enum": [True, False]}}, "Unsatisfiable"),
        ({"type": "string", "not": {"pattern": "^ab"}}, '"not"'),
        ({"type": "string", "pattern": "^(?!ab)a"}, "look-?around"),
        ({"type": "string", "pattern": "^(?!.*[^\n])"}, "look-?around"),
        ({"type": "string", "pattern": "^(?=a"}, "regex parse error"),
        ({"type": "string", "pattern": "^(?=a)a|b"}, "look-?around"),
        ({"type": "string", "pattern": "^(?=a)?b"}, "look-?around"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-?around"),
        ({"type": "string", "not": {"format": "date"}}, '"not"'),
        ({"type": "number", "not": {"const": 0}}, '"not"'),
        ({"type": "number", "not": {"minimum": 0}}, '"not"'),
        ({"not": {"const": "x" * 200}}, '"not"'),
        ({"not": {"items": {"type": "string"}}}, '"not"'),
        ({"not": {"oneOf": [{"type": "string"}]}}, '"not"'),
        ({"not": {"pattern": "[^a-c&&b]"}}, '"not"'),
        ({"if": {"minProperties": "x"}, "then": {"required": ["a"]}}, '"if", "then"'),
        ({"if": 5, "else": {}}, '"if"'),
        ({"type": "array", "contains": {"type": "string"}}, '"contains"'),
        ({"type": "array", "contains": {"type": "string"}, "minContains": 2, "maxItems": 3}, '"contains", "minContains"'),
        ({"dependentSchemas": {"a": {"not": {"pattern": "ab"}}}}, '"not"'),
        (COLORS | {"propertyNames": {"pattern": "^a"}, "patternProperties": {"b$": {}}}, "propertyNames"),
        (COLORS | {"propertyNames": {"pattern": "^a", "maxLength": 3}}, "propertyNames"),
        (COLORS | {"propertyNames": {"not": {"const": "a"}}}, "propertyNames"),
        ({"type": "string", "format": "ipv6network"}, "Unknown format: ipv6network; allowed: a pattern, another format"),
        ({"type": "string", "format": "uri-reference", "pattern": "a"}, "Unknown format: uri-reference"),
        ({"properties": {"a": {"$ref": "#/oneOf/0"}}, "oneOf": [{"type": "string"}, {"$ref": "#/oneOf/0"}]}, "oneOf"),
    ],
    ids=lambda value: json.dumps(value)[:60],
)  # fmt: skip
def test_what_has_no_other_way_is_refused_by_name(compiler, schema, reason) -> None:
    with pytest.raises(ConstraintError, match=reason) as caught:
        compiler.compile(Constraint("json_schema", json.dumps(schema)))
    assert "\n" not in str(caught.value)


def test_values_that_look_like_schemas_are_left_alone() -> None:
    schema = {
        "const": {"not": {}, "format": "date", "x": 1},
        "default": {"uniqueItems": False, "x": 1},
        "properties": {"format": {"const": "url"}, "not": True, "x": {"enum": [{"format": "url"}]}},
    }
    assert rewritten(schema) == schema


def test_the_given_schema_stays_as_it_is_and_what_is_made_of_it_is_the_same_everywhere() -> None:
    schema = of(Calculation) | {"x-extension": [1]}
    before = json.dumps(schema)
    made = json.dumps(rewritten(schema))
    assert json.dumps(schema) == before
    assert json.dumps(rewritten(json.loads(before))) == made
    assert "x-extension" not in made
    letters = {"type": "array", "items": {"enum": ["b", "a"]}, "uniqueItems": True}
    assert rewritten(letters)["enum"] == [[], ["a"], ["b"], ["a", "b"], ["b", "a"]]


def test_schemas_that_are_none_are_the_librarys_to_refuse() -> None:
    """Each keyword with each kind of value, alone and behind a reference."""
    values = (None, True, 0, -1, 1.5, "x", "#", "#/x/0", [], [[]], [{}], {}, {"": {}}, {"x": 1}, ["a", {"a": []}])
    keywords = ["$ref", "$defs", "additionalProperties", "allOf", "anyOf", "const", "contains", "dependencies", "dependentRequired",
                "discriminator", "else", "enum", "format", "if", "items", "maxContains", "maxItems", "minItems", "minLength", "not", "oneOf", "pattern", "patternProperties", "properties",
                "propertyNames", "required", "then", "type", "uniqueItems"]  # fmt: skip
    draw = random.Random(3)
    for _ in range(20_000):
        schema = {keyword: draw.choice(values) for keyword in draw.sample(keywords, draw.randint(1, 5))}
        if draw.random() < 0.5:
            inner = {keyword: draw.choice(values) for keyword in draw.sample(keywords, 3)}
            schema |= {
                "oneOf": [inner, {"$ref": "#/$defs/a"}],
                "discriminator": {"propertyName": "a"},
                "$defs": {"a": inner},
            }
            schema |= {"type": "array", "uniqueItems": True, "items": inner, "propertyNames": inner}
        rewritten(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"allOf": [{"$ref": "#/$defs/a"}] * 30}] * 30, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 30}}},
        {"oneOf": [{"type": "object", "properties": {f"p{n}": {"const": n}}, "required": [f"p{n}"]} for n in range(250)]},
        {"type": "array", "uniqueItems": True, "items": {"enum": list(range(10**4))}},
        {"anyOf": [{"oneOf": [{"const": n} for n in range(200)]}] * 10},
        {"anyOf": [{"type": "array", "uniqueItems": True, "items": {"enum": list(range(5))}}] * 900},
        {"not": {"anyOf": [{"$ref": "#/$defs/a"}] * 30}, "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 30}}},
        {"allOf": [{"not": {"enum": [f"{n}{m}" for m in range(100)]}} for n in range(1000)]},
    ],
    ids=["references", "objects", "items", "constants", "sets", "denied references", "denied texts"],
)  # fmt: skip
def test_the_search_is_bounded(schema) -> None:
    began = time.thread_time()
    rewritten(schema)
    assert time.thread_time() - began < 1


NAMES = ("a", "b", "c")


def drawn_value(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.random()
    if depth and kind < 0.55:
        return {name: drawn_value(draw, depth - 1) for name in draw.sample(NAMES, draw.randint(0, 3))}
    if depth and kind < 0.7:
        return [drawn_value(draw, depth - 1) for _ in range(draw.randint(0, 3))]
    return draw.choice([None, True, False, 0, 1, 1.0, 1.5, "", "x", "y", "xy", "yx", "a", 2])


def drawn_denied(draw: random.Random, depth: int) -> Any:
    """Mostly what has a counterpart."""
    return draw.choice([
        {"required": draw.sample(NAMES, draw.randint(1, 2))},
        {"properties": {draw.choice(NAMES): {"enum": draw.sample(["x", "xy", "a", 1, 1.0, True, None, 2], draw.randint(1, 4))}}},
        {"properties": {draw.choice(NAMES): {"const": draw.choice(["x", "y", 1, 0])}}, "required": draw.sample(NAMES, 1)},
        {"enum": draw.sample(["", "x", "xy", "yx", "y", "a"], draw.randint(1, 3))},
        {"type": draw.choice(["string", "integer", "number", ["null", "boolean"], "object"])},
        {draw.choice(["minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "minProperties"]): draw.randint(0, 2)},
        {"pattern": draw.choice(["[xa]", "[^xa]", "^[xy]+$", "^[^x]*$", "x", "(y)", "\\d"])},
        {draw.choice(["allOf", "anyOf"]): [drawn_schema(draw, depth - 1), {"required": ["a"]}]},
        {"not": {"properties": {"a": drawn_schema(draw, depth - 1)}}},
        drawn_schema(draw, depth),
    ])  # fmt: skip


def drawn_schema(draw: random.Random, depth: int = 3) -> Any:
    if depth <= 0 or draw.random() < 0.2:
        return draw.choice([True, False, {"type": "string"}, {"const": 1}, {"enum": ["x", 1, None]}, {"$ref": "#/$defs/s"},
                            {"type": ["integer", "null"]}, {"not": {}}, {"type": "boolean"}])  # fmt: skip
    makers = {
        "properties": lambda: {name: drawn_schema(draw, depth - 1) for name in draw.sample(NAMES, draw.randint(1, 3))},
        "required": lambda: draw.sample(NAMES, draw.randint(1, 2)),
        "additionalProperties": lambda: drawn_schema(draw, depth - 2),
        "oneOf": lambda: draw.choice([
            [{"required": draw.sample(NAMES, draw.randint(1, 2))} for _ in range(2)],
            [drawn_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))],
        ]),
        "anyOf": lambda: [drawn_schema(draw, depth - 1) for _ in range(2)],
        "propertyNames": lambda: draw.choice([{"enum": ["a", "b"]}, {"pattern": "^[ab]$"}, {"type": "string"}, {"minLength": 2},
                                              {"const": "a"}, {"type": "string", "enum": ["c", 1]}, {"$ref": "#/$defs/s"}]),
        "uniqueItems": lambda: True,
        "dependentRequired": lambda: {name: draw.sample(NAMES, draw.randint(0, 2)) for name in draw.sample(NAMES, 2)},
        "discriminator": lambda: {"propertyName": "a"},
        "not": lambda: drawn_denied(draw, depth - 1),
        "if": lambda: drawn_denied(draw, depth - 1),
        "then": lambda: drawn_schema(draw, depth - 1),
        "else": lambda: drawn_schema(draw, depth - 1),
        "dependentSchemas": lambda: {draw.choice(NAMES): drawn_schema(draw, depth - 1)},
        "contains": lambda: drawn_schema(draw, depth - 1),
        "minContains": lambda: draw.randint(0, 1),
        "maxContains": lambda: draw.randint(0, 2),
        "items": lambda: draw.choice([{"enum": ["x", 1, 2]}, {"type": "integer", "enum": [1, 2, "x"]}, drawn_schema(draw, 0)]),
        "maxItems": lambda: draw.randint(0, 3),
        "minItems": lambda: draw.randint(0, 2),
    }  # fmt: skip
    kind = draw.choice(["object", "object", "array", "string", ["object", "null"], "number", "integer"])
    return {"type": kind} | {key: makers[key]() for key in draw.sample(sorted(makers), draw.randint(1, 5))}


@pytest.mark.parametrize("seed", range(4))
def test_a_rewritten_schema_allows_nothing_else(seed) -> None:
    draw, counts = random.Random(seed), {True: 0, False: 0}
    for _ in range(400):
        schema = {"allOf": [drawn_schema(draw)], "$defs": {"s": {"type": "string", "enum": ["a", "x"]}}}
        after = rewritten(schema)
        for value in [drawn_value(draw) for _ in range(12)]:
            allowed = jsonschema.Draft202012Validator(schema).is_valid(value)
            assert allowed or not jsonschema.Draft202012Validator(after).is_valid(value), (schema, value)
            if "discriminator" not in str(schema):
                assert allowed == jsonschema.Draft202012Validator(after).is_valid(value), (schema, value)
            counts[allowed] += 1
    assert min(counts.values()) > 300
