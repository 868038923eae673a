"""Schemas of forced calls: their arguments are objects whatever a tool's schema leaves open."""

import json

import pytest
from tokenizers import Tokenizer

from headway_gateway.openai.bodies import Function
from headway_gateway.openai.tool_schemas import schema_of_calls
from headway_proto.grammars import ConstraintError, GrammarCompiler
from headway_proto.sampling import Constraint
from model_core import demo_model

TOKENIZER = (demo_model() / "tokenizer.json").read_text(encoding="utf-8")
ENCODER = Tokenizer.from_str(TOKENIZER)
ONE = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
NODE = {"type": "object", "properties": {"a": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_size=4096, eos_token_ids=(0, 2))


def passes(compiler: GrammarCompiler, schema: object, text: str) -> bool:
    matcher = compiler.compile(Constraint("json_schema", json.dumps(schema))).matcher()
    try:
        matcher.accept(ENCODER.encode(text).ids)
    except ConstraintError:
        return False
    return True


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        ONE,
        ONE | {"type": ["object", "null"]},
        {"anyOf": [ONE, {"required": ["b"]}]},
        ONE | {"$schema": "http://json-schema.org/draft-07/schema#"},
        {
            "$id": "https://example.com/tool",
            "properties": {"a": {"$ref": "#/$defs/n"}},
            "$defs": {"n": {"type": "integer"}},
        },
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
    ],
    ids=json.dumps,
)
def test_arguments_are_an_object(compiler, parameters) -> None:
    schema = schema_of_calls([Function(name="f", parameters=parameters)], 1)
    assert passes(compiler, schema, '[{"name": "f", "parameters": {"a": 1')
    for other in ("1", '"', "[", "null"):
        assert not passes(compiler, schema, f'[{{"name": "f", "parameters": {other}')
