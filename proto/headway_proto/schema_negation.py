"""What holds where a JSON schema does not, said as a schema, as far as the grammar library has words for it.

Owns: which schemas have such a counterpart. Must not know: why it is asked for.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

from headway_proto.schema_formats import escaped
from headway_proto.schema_keywords import ASSERTIONS, OF_KINDS
from headway_proto.schema_values import (
    ALL_TYPES,
    ANYTHING,
    FEW,
    Schema,
    Values,
    own_values,
    texts_of,
    type_of,
    types_of,
)

_MOST_HOPS = 6
_MOST_WORK = 10_000
_MOST_EXACT = 2**53
_KEEPS_DEFINITIONS = frozenset(["$defs", "definitions"])
_SIZES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "minimum": ("integer", "maximum", -1),
    "maximum": ("integer", "minimum", 1),
}
"""The type of values that a bound is of, and its counterpart with the distance to it."""
_ONE = r"(\[\^?(?:\\[^bB]|[^\]\[\\])+\]|\\[dDsSwW]|\\[^\w]|[^\\\[\](){}.*+?^$|])"
"""One character of a pattern, or one of a class."""
_HAS_ONE = re.compile(rf"{_ONE}|\({_ONE}\)")
_HAS_IN_LINE = re.compile(rf"\^\.\*{_ONE}")
_HAS_ONLY = re.compile(rf"\^{_ONE}([*+])\$")
_SET_SIGNS = ("--", "&&", "~~")
"""What joins classes to the library, and does not in JavaScript."""
_MOST_SQUARES = 10_000
"""Of the lengths of texts: so long is a pattern of all others."""


class _UnsayableError(Exception):
    """There is no counterpart, or the search costs too much."""


class Negation:
    """Counterparts of the schemas of a document."""

    def __init__(self, target: Callable[[object], Schema]) -> None:
        """``target`` returns what a reference refers to; None if there is nothing."""
        self._target = target
        self._work = 0

    def of(self, schema: Schema, around: Values = ANYTHING) -> Schema | None:
        """Return a schema of those values of ``around`` that ``schema`` forbids; None if it cannot be said."""
        try:
            return self._of(schema, around, _MOST_HOPS)
        except _UnsayableError:
            return None

    def _of(self, schema: Schema, around: Values, hops: int) -> Schema:
        self._work += 1
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or not hops or self._work > _MOST_WORK:
            raise _UnsayableError
        said = ASSERTIONS.intersection(schema) - _KEEPS_DEFINITIONS
        return any_of([self._of_keyword(key, schema[key], around, hops) for key in sorted(said)])

    def _of_keyword(self, key: str, value: Any, around: Values, hops: int) -> Schema:
        kinds = {kind for kind, words in OF_KINDS.items() if key in words}
        if kinds and not kinds & around.types:
            return False
        if key in _SIZES:
            return _beyond(key, value, around)
        if key in ("const", "enum"):
            values = value if key == "enum" else [value]
            self._work += len(values) if isinstance(values, list) else 0
            return _of_other_values(values, around)
        if key in ("not", "$ref"):
            return value if key == "not" else self._of(self._target(value), around, hops - 1)
        match key, value:
            case "type", _:
                return _of_other_types(value, around)
            case "pattern", str():
                return {"type": "string", "pattern": _pattern_without(value)}
            case "required", list() if len(texts_of(value)) == len(value):
                return any_of([{"type": "object", "properties": {name: False}} for name in value])
            case (("allOf" | "anyOf"), [_, *_]):
                several = [self._of(one, around, hops - 1) for one in value]
                return any_of(several) if key == "allOf" else all_of(several)
            case "properties", dict():
                found = [(name, self._of(one, around.of(name), hops - 1)) for name, one in value.items()]
                parts = [
                    (one, {"type": "object", "properties": {name: one}, "required": [name]}) for name, one in found
                ]
                return any_of([part for one, part in parts if one is not False])
        raise _UnsayableError


def any_of(several: Sequence[Schema]) -> Schema:
    """Return a schema of which one of ``several`` holds."""
    found = [one for one in several if one is not False]
    if any(one is True or one == {} for one in found):
        return True
    return {"anyOf": found} if len(found) > 1 else found[0] if found else False


def all_of(several: Sequence[Schema]) -> Schema:
    """Return a schema of which all of ``several`` hold."""
    found = [one for one in several if one is not True and one != {}]
    if any(one is False for one in found):
        return False
    return {"allOf": found} if len(found) > 1 else found[0] if found else True


def _typed(types: Collection[str]) -> Schema:
    return {"type": sorted(set(types) - ({"integer"} if "number" in types else set()))} if types else False


def _of_other_types(named: Any, around: Values) -> Schema:
    types = types_of({"type": named})
    left = around.types - types
    if not types <= ALL_TYPES or not types or ("number" in left and "integer" in types):
        raise _UnsayableError
    return _typed(left)


def _of_other_values(values: Any, around: Values) -> Schema:
    if not isinstance(values, list):
        raise _UnsayableError
    listed = own_values({"enum": values})
    if around.literals is not None and listed.literals is not None:
        left = sorted(around.literals - listed.literals, key=lambda one: (one[0], str(one[1])))
        return {"enum": [value for _, value in left]} if left else False
    parts: list[Schema] = []
    free: set[str] = set()
    for kind in sorted(around.types - ({"integer"} if "number" in around.types else set())):
        own = [value for value in values if type_of(value) == kind or {type_of(value), kind} <= {"integer", "number"}]
        if not own:
            free.add(kind)
        elif kind == "string":
            parts.append({"type": "string", "pattern": _pattern_of_others(own)})
        elif kind in FEW:
            parts.append({"enum": [value for value in FEW[kind] if value not in own]})
        elif kind == "integer":
            parts += _gaps(own)
        else:
            raise _UnsayableError
    return any_of([*(one for one in parts if one != {"enum": []}), _typed(free)])


def _gaps(numbers: Sequence[float]) -> Iterator[Schema]:
    """Yield schemas of the integers between those given."""
    if any(abs(number) >= _MOST_EXACT for number in numbers):
        raise _UnsayableError
    known = sorted({int(number) for number in numbers if number == int(number)})
    if not known:
        yield {"type": "integer"}
        return
    yield {"type": "integer", "maximum": known[0] - 1}
    for one, other in pairwise(known):
        if other - one > 1:
            yield {"type": "integer", "minimum": one + 1, "maximum": other - 1}
    yield {"type": "integer", "minimum": known[-1] + 1}


def _beyond(key: str, bound: Any, around: Values) -> Schema:
    kind, other, distance = _SIZES[key]
    is_number = kind == "integer"
    if (
        not isinstance(bound, int)
        or isinstance(bound, bool)
        or abs(bound) >= _MOST_EXACT
        or (bound < 0 and not is_number)
    ):
        raise _UnsayableError
    if is_number and "number" in around.types:
        raise _UnsayableError
    return {"type": kind, other: bound + distance} if is_number or bound + distance >= 0 else False


def _pattern_of_others(words: Sequence[str]) -> str:
    """Return the pattern of all texts but these."""
    if sum(len(word) ** 2 for word in words) > _MOST_SQUARES:
        raise _UnsayableError
    said = []
    for begin in sorted({word[:size] for word in words for size in range(len(word) + 1)}):
        following = sorted({word[len(begin)] for word in words if word.startswith(begin) and word != begin})
        other = f"[^{escaped(''.join(following))}](?s:.*)" if following else "(?s:.+)"
        said.append(escaped(begin) + (other if begin in words else f"(?:{other})?"))
    return f"^(?:{'|'.join(said)})$"


def _pattern_without(regex: str) -> str:
    """Return the pattern of texts in which one is not found that is of one character, or of some of a class alone."""
    if any(sign in regex for sign in _SET_SIGNS):
        raise _UnsayableError
    if found := _HAS_ONE.fullmatch(regex):
        return f"^{_other_letters(found[1] or found[2])}*$"
    if found := _HAS_IN_LINE.fullmatch(regex):
        return _line_without(found[1])
    if found := _HAS_ONLY.fullmatch(regex):
        return _other_letters(found[1]) if found[2] == "*" else f"^(?:(?s:.*){_other_letters(found[1])}(?s:.*))?$"
    raise _UnsayableError


def _line_without(one: str) -> str:
    """Return the pattern of texts whose first line has none of these characters."""
    other = _other_letters(one)
    try:
        has_line_break = re.fullmatch(one, "\n") is not None
    except re.error:
        raise _UnsayableError from None
    if has_line_break:
        return f"^{other}*$"
    if not other.startswith("[^"):
        raise _UnsayableError
    return f"^{other[:-1]}\\n]*(?:\\n(?s:.*))?$"


def _other_letters(one: str) -> str:
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:]}" if one.startswith("[") else f"[^{one}]"
