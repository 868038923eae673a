"""Adding to a JSON schema that which must hold as well. Must not know: why."""

from typing import Any

from headway_proto.schema_negation import any_of
from headway_proto.schema_values import Schema


def is_any(schema: Schema) -> bool:
    """Return whether a schema allows every value."""
    return schema is True or schema == {}


def also(schema: dict[str, Any], more: Schema) -> None:
    """Add a schema that holds, too; what stands in the place of a list is left for the library to refuse."""
    before = schema.get("allOf", [])
    if isinstance(before, list) and not is_any(more):
        schema["allOf"] = [*before, more]


def also_any_of(schema: dict[str, Any], several: list[Schema]) -> None:
    """Add that one of the schemas holds."""
    said = any_of(several)
    if "anyOf" not in schema and isinstance(said, dict) and said.keys() == {"anyOf"}:
        schema.update(said)
    else:
        also(schema, said)
