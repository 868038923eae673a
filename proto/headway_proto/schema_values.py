"""What is known of the values that a part of a JSON schema allows.

Must not know: references, rewriting.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

Schema: TypeAlias = Any
"""An object or a bool."""

ALL_TYPES = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])
FEW: Mapping[str, tuple[Any, ...]] = {"boolean": (False, True), "null": (None,)}
"""All values of a type."""


class Values(NamedTuple):
    """What is known of the values that a schema allows.

    ``literals``: all of them, each with its type, if they can be listed. ``names``: of all properties, if they can.
    """

    types: frozenset[str] = ALL_TYPES
    literals: frozenset[tuple[str, Any]] | None = None
    required: frozenset[str] = frozenset()
    properties: Mapping[str, "Values"] = {}
    names: frozenset[str] | None = None

    def both(self, other: "Values") -> "Values":
        """What is known if both hold."""
        shared = self.properties.keys() & other.properties.keys()
        return Values(
            self.types & other.types,
            _both(self.literals, other.literals),
            self.required | other.required,
            {
                **self.properties,
                **other.properties,
                **{name: self.properties[name].both(other.properties[name]) for name in shared},
            },
            _both(self.names, other.names),
        )

    def either(self, other: "Values") -> "Values":
        """What is known if one of them holds."""
        shared = self.properties.keys() & other.properties.keys()
        return Values(
            self.types | other.types,
            _either(self.literals, other.literals),
            self.required & other.required,
            {name: self.properties[name].either(other.properties[name]) for name in shared},
            _either(self.names, other.names),
        )

    def excludes(self, other: "Values") -> bool:
        """Whether no value is of both."""
        types = self.types & other.types
        if self.literals is not None and other.literals is not None and not self.literals & other.literals:
            return True
        if types <= {"object"}:
            return not types or any(self.of(name).excludes(other.of(name)) for name in self.required | other.required)
        return False

    def of(self, name: str) -> "Values":
        """What is known of a property."""
        is_absent = self.names is not None and name not in self.names
        return NOTHING if is_absent else self.properties.get(name, ANYTHING)


ANYTHING = Values()
NOTHING = Values(frozenset(), frozenset())


def _both(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    return one & other if one is not None and other is not None else other if one is None else one


def _either(one: frozenset[Any] | None, other: frozenset[Any] | None) -> frozenset[Any] | None:
    return one | other if one is not None and other is not None else None


def types_of(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that ``type`` allows."""
    given = schema.get("type")
    types = ALL_TYPES if given is None else texts_of([given] if isinstance(given, str) else given)
    return types | {"integer"} if "number" in types else types


def texts_of(value: object) -> frozenset[str]:
    """Return the texts of a list, and none of anything else."""
    return frozenset(one for one in value if isinstance(one, str)) if isinstance(value, list) else frozenset()


def own_values(schema: dict[str, Any]) -> Values:
    """Return what type, const and enum say."""
    found = Values(types := types_of(schema))
    if types <= FEW.keys():
        found = found.both(_listed([value for one in sorted(types) for value in FEW[one]]))
    if "const" in schema:
        found = found.both(_listed([schema["const"]]))
    if isinstance(listed := schema.get("enum"), list):
        found = found.both(_listed(listed))
    return found


def _listed(values: list[Any]) -> Values:
    types = {type_of(value) for value in values}
    if types & {"array", "object"}:
        return Values(frozenset(types | {"integer"} if "number" in types else types))
    # A number may be written as an integer or not.
    literals = frozenset(("number" if type_of(one) == "integer" else type_of(one), one) for one in values)
    return Values(frozenset(types | {"integer", "number"} if types & {"integer", "number"} else types), literals)


def type_of(value: Any) -> str:
    """Return the type of a value."""
    if value is None:
        return "null"
    for kinds, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kinds):
            return name
    return "object"
