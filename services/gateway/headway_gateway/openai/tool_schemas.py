"""The schemas of calls in JSON, as a request forces them or a template's form has them. Must not know: how calls are read."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from headway_gateway.openai.bodies import Function


class CallKeys(NamedTuple):
    """The keys of a call in JSON. An id comes first or last, and may be left out."""

    name: str = "name"
    arguments: str = "parameters"
    first_id: str = ""
    last_id: str = ""


FORCED_KEYS = CallKeys()

_WORDS = frozenset(("description", "title", "$comment"))
_VALUES = frozenset(("const", "default", "enum", "example", "examples"))


def schema_of_calls(tools: Sequence[Function], most: int | None, keys: CallKeys = FORCED_KEYS) -> dict[str, Any]:
    """Return the JSON schema of an array of calls of these tools, one or more; ``most`` bounds their number.

    Every model can be bound to it, whatever form it was taught.
    """
    one = schema_of_call(tools, keys)
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": one["anyOf"]},
        "$defs": one["$defs"],
    }
    return schema if most is None else schema | {"maxItems": most}


def schema_of_call(tools: Sequence[Function], keys: CallKeys) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools."""
    return {
        "anyOf": [_call(tool.name, place, keys) for place, tool in enumerate(tools)],
        "$defs": {f"{place}": moved(schema_of_arguments(tool), f"#/$defs/{place}") for place, tool in enumerate(tools)},
    }


def schema_of_arguments(tool: Function) -> dict[str, Any]:
    """Return the schema of a tool's arguments: an object, also if the tool leaves that open."""
    schema = _without_words(tool.parameters or {})
    rest = {key: value for key, value in schema.items() if key != "$id"}  # References begin at the whole schema.
    kinds = rest.get("type", ["object"])
    is_open = "$ref" not in rest and isinstance(kinds, list) and "object" in kinds
    return rest | {"type": "object"} if is_open else rest


def _without_words(schema: Any) -> Any:
    """A tool's schema says much to the model that says nothing of values, and a grammar may not be long."""
    if isinstance(schema, list):
        return [_without_words(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VALUES else _without_words(value)
        for key, value in schema.items()
        if not (key in _WORDS and isinstance(value, str))
    }


def _call(name: str, place: int, keys: CallKeys) -> dict[str, Any]:
    ids = {key: {"type": "string", "maxLength": 40} for key in (keys.first_id, keys.last_id) if key}
    first = {key: value for key, value in ids.items() if key == keys.first_id}
    return {
        "type": "object",
        "properties": first | {keys.name: {"const": name}, keys.arguments: {"$ref": f"#/$defs/{place}"}} | ids,
        "required": [keys.name, keys.arguments],
        "additionalProperties": False,
    }


def references_in(schema: Any) -> Iterator[str]:
    """Yield each ``$ref`` of a schema that is a place within the whole."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("$ref"), str) and one["$ref"].startswith("#"):
                yield one["$ref"]
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def moved(schema: Any, root: str) -> Any:
    """Return a schema with its references as they are where the schema is ``root``."""
    if isinstance(schema, list):
        return [moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        found["$ref"] = root + reference[1:]
    return found
