"""A JSON schema with its references: what they refer to, and what is known of the values that they allow.

Owns: the targets of references, and the budget of looking at them. Must not know: what is rewritten.
"""

from typing import Any
from urllib.parse import unquote

from headway_proto.schema_keywords import SAYS_NOTHING_OF_VALUES
from headway_proto.schema_numbers import objects_within
from headway_proto.schema_values import ANYTHING, NOTHING, Schema, Values, own_values, texts_of

_ADDED = "#/$defs/"
_MOST_HOPS = 6
_MOST_WORK = 10_000


class TooMuchError(Exception):
    """Looking at what schemas allow costs too much."""


class SchemaDocument:
    """A schema that is being rewritten. ``pinned`` are the steps of the paths of its references, which have to stay."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        parts = list(objects_within(root))
        refs = {ref for part in parts if isinstance(ref := part.get("$ref"), str)}
        self.pinned = {_unescaped(step) for ref in refs for step in ref.split("/")[1:]}
        # With another base, a reference has another target.
        self._is_one_document = not any(
            isinstance(part.get(key), str) for part in parts if part is not root for key in ("$id", "id")
        )
        self.added: dict[str, Schema] = {}
        """Further definitions, by names that the document does not have."""
        self._targets = {id(self.target(ref)) for ref in refs}
        self._work = 0

    def is_target(self, value: object) -> bool:
        """Return whether a reference refers to this object."""
        return id(value) in self._targets

    def add(self, name: str, schema: Schema) -> dict[str, str]:
        """Add a definition, and return the reference to it."""
        self.added[name] = schema
        return self.reference_to(name)

    @staticmethod
    def reference_to(name: str) -> dict[str, str]:
        """Return the reference to a definition that was added."""
        return {"$ref": _ADDED + name}

    def resolved(self, schema: Schema) -> Schema:
        """Follow references without anything beside them."""
        for _ in range(_MOST_HOPS):
            if (
                not isinstance(schema, dict)
                or "$ref" not in schema
                or schema.keys() - SAYS_NOTHING_OF_VALUES - {"$ref"}
            ):
                return schema
            schema = self.target(schema["$ref"])
        return None

    def target(self, ref: object) -> Schema:
        """Return what a reference refers to; None if it is not known."""
        if not isinstance(ref, str) or not self._is_one_document or not (ref == "#" or ref.startswith("#/")):
            return None
        if (added := ref.removeprefix(_ADDED)) in self.added:
            return self.added[added]
        found: Any = self.root
        for step in map(_unescaped, ref.split("/")[1:]):
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
        return found

    def values(self, schema: Schema) -> Values:
        """Return what is known of a schema's values; of properties of properties nothing.

        Raises:
            TooMuchError: all calls together have cost too much.
        """
        return self._values(schema, _MOST_HOPS)

    def _values(self, schema: Schema, hops: int, *, is_property: bool = False) -> Values:
        self._work += 1
        if self._work > _MOST_WORK:
            raise TooMuchError
        if not isinstance(schema, dict) or not hops:
            return NOTHING if schema is False else ANYTHING
        found = own_values(schema)
        if "$ref" in schema:
            found = found.both(self._values(self.target(schema["$ref"]), hops - 1, is_property=is_property))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                several = [self._values(branch, hops - 1, is_property=is_property) for branch in branches]
                joined = several[0]
                for one in several[1:]:
                    joined = joined.both(one) if key == "allOf" else joined.either(one)
                found = found.both(joined)
        own = schema.get("properties", {})
        if is_property or not isinstance(own, dict):
            return found
        return found.both(
            Values(
                required=texts_of(schema.get("required")),
                properties={name: self._values(one, hops - 1, is_property=True) for name, one in own.items()},
                names=frozenset(own)
                if schema.get("additionalProperties") is False and "patternProperties" not in schema
                else None,
            )
        )


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")
