"""Numbers in a JSON schema that the grammar library would change.

Owns: which numbers those are. Must not know: how a schema is compiled. The library stores doubles, then 64-bit
integers; a rounded limit allows wrong outputs. The schema's structure is ignored: every number of a known keyword
counts.
"""

import json
import math
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, TypeAlias

_Number: TypeAlias = int | Decimal

_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_EXCLUSIVE = ("exclusiveMinimum", "exclusiveMaximum")
_LITERAL = ("const", "enum")
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
_WITHOUT_BOUNDS = frozenset(
    [
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "type",
        "writeOnly",
    ]
)
_MOST_INT64 = (1 << 63) - 1
_MOST_EXACT = 1 << 53
_MOST_UINT32 = (1 << 32) - 1
_MOST_COUNTED: dict[str, int] = dict.fromkeys(("minLength", "maxLength"), _MOST_UINT32) | dict.fromkeys(
    ("minItems", "maxItems", "minProperties", "maxProperties"), _MOST_INT64
)
_SHOWN_CHARACTERS = 64
_ALLOWED = "allowed: integers from -2^53 to 2^53, and decimals of at most 15 digits"


def number_problem(text: str) -> str:
    """Return the first such number in the JSON ``text``, with its keyword, or ""."""
    schema = json.loads(text, parse_float=_decimal)
    parts = list(map(_with_numbers_for_ends, objects_within(schema)))
    for part in parts:
        for keyword, value in part.items():
            problem = _problem(keyword, value, is_integer=part.get("type") == "integer")
            if problem:
                return problem
    # Without combining keywords, bounds and divisors of different parts never meet.
    groups = [parts] if any(map(_combines, parts)) else [[part] for part in parts]
    return next(filter(None, (_problem_of_divisors(group) or _problem_of_open_ends(group) for group in groups)), "")


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # The exponent is out of range.
        return Decimal("Infinity")


def objects_within(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a schema, itself included, whatever it means there."""
    return (value for value in _values(schema) if isinstance(value, dict))


def _values(value: Any) -> Iterator[Any]:
    rest = [value]
    while rest:
        part = rest.pop()
        yield part
        if isinstance(part, dict):
            rest.extend(reversed(part.values()))
        elif isinstance(part, list):
            rest.extend(reversed(part))


def _with_numbers_for_ends(part: dict[str, Any]) -> dict[str, Any]:
    """In draft 4, ``true`` excludes the bound itself."""
    ends = {
        excluded: part[bound]
        for excluded, bound in zip(_EXCLUSIVE, ("minimum", "maximum"), strict=True)
        if part.get(excluded) is True and bound in part
    }
    return part | ends


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _problem(keyword: str, value: Any, *, is_integer: bool) -> str:
    if keyword in _LITERAL:
        return next((_inexact(keyword, one) for one in _values(value) if _is_number(one) and not _is_kept(one)), "")
    if keyword in _MOST_COUNTED and isinstance(value, int) and value > _MOST_COUNTED[keyword]:
        return f"{keyword}: {value!s:.{_SHOWN_CHARACTERS}} is too high to count to; allowed: at most {_MOST_COUNTED[keyword]}"
    if keyword not in (*_LOWER, *_UPPER) or not _is_number(value):
        return ""
    if is_integer and keyword == "maximum" and value == _MOST_INT64:
        return ""  # The library rounds it up and cuts it back to 64 bits.
    if keyword in _EXCLUSIVE and abs(value) >= _MOST_EXACT:
        return _inexact(keyword, value)  # The library adds 1 to find the next integer.
    return "" if _is_kept(value, is_integer=is_integer) else _inexact(keyword, value)


def _is_kept(value: _Number, *, is_integer: bool = False) -> bool:
    """Whether a double, as the library writes it, still equals ``value``."""
    if not -_MOST_INT64 <= value <= _MOST_INT64:
        return False
    double = float(value)
    return Decimal(repr(double)) == value or (is_integer and double == value)


def _inexact(keyword: str, value: object) -> str:
    return f"{keyword}: {value!s:.{_SHOWN_CHARACTERS}} cannot be kept exactly; {_ALLOWED}"


def _problem_of_divisors(group: list[dict[str, Any]]) -> str:
    """Check divisors of one number: the library computes in 32 bits and powers of ten."""
    values = [value for part in group if _is_number(value := part.get("multipleOf")) and value]
    found: list[tuple[int, int]] = []
    for value in values:
        read = _as_the_library_reads(value)
        if read is None or Decimal(read[0]).scaleb(-read[1]) != abs(value):
            return (
                f"multipleOf: {value!s:.{_SHOWN_CHARACTERS}} cannot be kept exactly; "
                "allowed: integers below 2^32, and steps such as 0.01, 0.05 and 0.25"
            )
        found.append(read)
    finest = max((places for _, places in found), default=0)
    scaled = [number * 10 ** (finest - places) for number, places in found]
    if len(scaled) > 1 and math.lcm(*scaled) * max(scaled) > _MOST_UINT32:
        shown = ", ".join(map(str, values))
        return f"multipleOf: {shown:.{_SHOWN_CHARACTERS}} have no common multiple within 32 bits; allowed: one within 32 bits"
    return ""


def _as_the_library_reads(value: _Number) -> tuple[int, int] | None:
    """Return a number and its decimal places, or None."""
    double, places = abs(float(value)), 0
    if not math.isfinite(double):
        return None
    while not double.is_integer():
        double *= 10.0
        places += 1
    return (int(double), places) if double <= _MOST_UINT32 else None


def _problem_of_open_ends(group: list[dict[str, Any]]) -> str:
    """Refuse bounds without an integer between an excluded integer and the other bound.

    The library then allows the excluded number: 5 with ``exclusiveMinimum`` 5 and ``maximum`` 5.5, or -0 with 0.
    """
    for excluded, others, sign in (("exclusiveMinimum", _UPPER, 1), ("exclusiveMaximum", _LOWER, -1)):
        ends = [end for _, end in _bounds(group, (excluded,)) if end == int(end) and sign * end >= 0]
        for end in ends:
            for keyword, other in _bounds(group, others):
                if 0 < sign * (other - end) < 1:
                    return (
                        f"{excluded}: {end!s:.{_SHOWN_CHARACTERS}} is not kept together with {keyword} "
                        f"{other!s:.{_SHOWN_CHARACTERS}}; allowed: a range with another integer"
                    )
    return ""


def _bounds(group: list[dict[str, Any]], keywords: tuple[str, ...]) -> list[tuple[str, _Number]]:
    return [
        (keyword, part[keyword])
        for part in group
        for keyword in keywords
        if part.get("type") != "integer" and _is_number(part.get(keyword))
    ]


def _combines(part: dict[str, Any]) -> bool:
    """Whether bounds of different parts may combine."""
    if "patternProperties" in part and "properties" in part:
        return True
    if isinstance(all_of := part.get("allOf"), list) and len(all_of) > 1:
        return True
    meaning = [keyword for keyword in part if keyword not in _WITHOUT_BOUNDS]
    return len(meaning) > 1 and any(keyword in _IN_PLACE for keyword in meaning)
