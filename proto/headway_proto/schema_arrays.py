"""What JSON schemas say of the items of arrays together, said by lists of what is allowed.

Owns: how many arrays may be listed. Must not know: how the rest of a schema is rewritten.
"""

import math
from collections.abc import Callable, Iterable
from itertools import combinations, permutations
from typing import Any

from headway_proto.schema_additions import also
from headway_proto.schema_document import SchemaDocument
from headway_proto.schema_keywords import SAYS_NOTHING_OF_VALUES
from headway_proto.schema_negation import any_of
from headway_proto.schema_values import ALL_TYPES, Schema, own_values, type_of

_LISTING = frozenset(["const", "enum", "type"])
_MOST_PLACES = 8
_MOST_ARRAYS = 400
_MOST_ARRAYS_IN_ALL = 1000


class Arrays:
    """Those of one document."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._num_listed = 0

    def say_contains(self, schema: dict[str, Any]) -> None:
        """Say that one of few items is of a schema, or none is."""
        words = ("contains", "minContains", "maxContains")
        if self._document.pinned.intersection(words):
            return
        least, most, size = schema.get("minContains", 1), schema.get("maxContains"), schema.get("maxItems")
        said: Schema = True
        if "contains" in schema and (least, most) == (1, None) and isinstance(size, int) and 0 <= size <= _MOST_PLACES:
            sizes = range(size)
            places = [{"prefixItems": [True] * place + [schema["contains"]], "minItems": place + 1} for place in sizes]
            said = any_of([*places, {"type": sorted(ALL_TYPES - {"array", "integer"})}])
        elif "contains" in schema and (least, most) != (0, None):
            return
        for word in words:
            schema.pop(word, None)
        also(schema, said)

    def say_unique(self, schema: dict[str, Any]) -> None:
        """List the arrays of different items, if they are few."""
        if (
            schema.get("uniqueItems") is not True
            or schema.get("type") != "array"
            or schema.keys() & {"enum", "prefixItems"}
        ):
            return
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            return
        if most in (0, 1):
            del schema["uniqueItems"]
            return
        items = self._document.resolved(schema.get("items"))
        if (
            "items" in self._document.pinned
            or not isinstance(items, dict)
            or items.keys() - _LISTING - SAYS_NOTHING_OF_VALUES
        ):
            return
        known = own_values(items)
        listed = [(kind, value) for kind, value in known.literals or () if type_of(value) in known.types]
        arrangements: Callable[[list[Any], int], Iterable[tuple[Any, ...]]] = permutations
        if (num_arrays := _num_arrays(len(listed), most, math.perm)) > _MOST_ARRAYS:
            arrangements, num_arrays = combinations, _num_arrays(len(listed), most, math.comb)
        self._num_listed += num_arrays
        if known.literals is None or num_arrays > _MOST_ARRAYS or self._num_listed > _MOST_ARRAYS_IN_ALL:
            return
        values = [value for _, value in sorted(listed, key=lambda one: (one[0], str(one[1])))]
        sizes = range(max(least, 0), min(len(values), len(values) if most is None else most) + 1)
        for key in ("uniqueItems", "type", "items", "minItems", "maxItems"):  # Beside the list they cost tenfold.
            schema.pop(key, None)
        schema["enum"] = [list(some) for size in sizes for some in arrangements(values, size)]


def _num_arrays(num_items: int, most: int | None, count_of: Callable[[int, int], int]) -> int:
    """Return how many arrays of different items there are, as far as that matters."""
    sizes = range(min(num_items, num_items if most is None else most, _MOST_ARRAYS) + 1)
    return sum(count_of(num_items, size) for size in sizes)
