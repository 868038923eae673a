"""Discriminators of JSON schemas: the property that tells the branches of a ``oneOf`` apart.

Owns: which branches come to require it. Must not know: how the rest of a schema is rewritten.
"""

from itertools import count
from typing import Any

from headway_proto.schema_document import SchemaDocument
from headway_proto.schema_values import Schema


class Discriminators:
    """Those of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self.requires_more = False
        """Whether a branch has come to require more than it did."""
        self._requirings: dict[tuple[str, str], str] = {}
        """A definition's name for each reference with a property that it is to require."""

    def with_required(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Require the property that tells the branches apart, which Pydantic leaves out if it has a default."""
        told = schema.get("discriminator")
        name = told.get("propertyName") if isinstance(told, dict) else None
        branches = schema.get("oneOf")
        if not isinstance(name, str) or not isinstance(branches, list) or "oneOf" in self._document.pinned:
            return schema
        required = [self._requiring(branch, name) for branch in branches]
        if None in required:
            return schema
        self.requires_more |= required != branches
        return {**schema, "oneOf": required}

    def _requiring(self, branch: Schema, name: str) -> Schema | None:
        """Return the branch with a required property; None if it has none of that name."""
        body = self._document.resolved(branch)
        if body is branch and isinstance(body, dict) and isinstance(inner := body.get("oneOf"), list):
            parts = [self._requiring(one, name) for one in inner]
            return None if None in parts else {**body, "oneOf": parts}
        if not isinstance(body, dict) or not isinstance(own := body.get("properties"), dict) or name not in own:
            return None
        before = body.get("required", [])
        if not isinstance(before, list) or not isinstance(others := self._document.root.get("$defs", {}), dict):
            return None
        if name in before:
            return branch
        required = {**body, "required": [*before, name]}
        if body is branch:
            return required
        for key in ("$defs", "definitions", "$schema", "$id", "id", "$anchor"):
            required.pop(key, None)
        added = self._requirings.get((branch["$ref"], name))
        if added is None:
            numbered = (f"required-{number}" for number in count(len(self._document.added)))
            added = next(one for one in numbered if one not in others)
            self._requirings[branch["$ref"], name] = added
            return self._document.add(added, required)
        return self._document.reference_to(added)
