"""The schema of calls that a request forces: an array, which every model can be bound to, whatever form it was taught.

Must not know: how the calls are read.
"""

from collections.abc import Sequence
from typing import Any

from headway_gateway.openai.bodies import Function


def schema_of_calls(tools: Sequence[Function], most: int | None) -> dict[str, Any]:
    """Return the JSON schema of one or more calls of these tools; ``most`` bounds their number."""
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call(tool.name, place) for place, tool in enumerate(tools)]},
        "$defs": {
            f"{place}": _moved(_an_object(tool.parameters or {}), f"#/$defs/{place}")
            for place, tool in enumerate(tools)
        },
    }
    return schema if most is None else schema | {"maxItems": most}


def _call(name: str, place: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments are an object, also if the schema leaves it open; and their references begin at the whole schema."""
    rest = {key: value for key, value in schema.items() if key != "$id"}
    kinds = rest.get("type", ["object"])
    is_open = "$ref" not in rest and isinstance(kinds, list) and "object" in kinds
    return rest | {"type": "object"} if is_open else rest


def _moved(schema: Any, root: str) -> Any:
    """References within a schema, from where the schema is now."""
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
