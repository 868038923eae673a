"""Values of ``<parameter=NAME>...</parameter>`` and its like, which are texts until a JSON schema says what they are.

Must not know: where calls are.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec


class Markup(NamedTuple):
    """``value`` finds names and values; with ``has_lines``, a value stands on lines of its own."""

    value: re.Pattern[str]
    has_lines: bool = False


def _between(begin: str, end: str, following: str) -> re.Pattern[str]:
    """A value goes up to the last ``end`` before what is ``following``, so it may contain one."""
    return re.compile(rf"{begin}(.*?)(?:{end}\s*(?={following}|\Z)|(?={following})|\Z)", re.DOTALL)


_PARAMETER = _between("<parameter=([^>]*)>", "</parameter>", "<parameter=")
CODER_VALUES, SEED_VALUES = Markup(_PARAMETER, has_lines=True), Markup(_PARAMETER)
MINIMAX_VALUES = Markup(_between('<parameter name="([^"]*)">', "</parameter>", "<parameter name="))
GLM_VALUES = Markup(_between(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", "</arg_value>", "<arg_key>"))

_KINDS: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}
_WORDS = {"True": True, "False": False, "None": None}
"""As templates show such values in earlier calls."""


def values_of(markup: Markup, text: str, schema: Any) -> dict[str, Any]:
    """Return the values by their names. A value that its schema does not allow stays a text, and so does one without."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = properties if isinstance(properties, dict) else {}
    others = schema.get("additionalProperties") if isinstance(schema, dict) else None
    return {
        name.strip(): _value(
            content.removeprefix("\n").removesuffix("\n") if markup.has_lines else content,
            set(kinds_of(known.get(name.strip(), others), schema)),
        )
        for name, content in markup.value.findall(text)
    }


def _value(text: str, kinds: set[str]) -> Any:
    if not kinds - {"string"}:
        return text
    try:
        value = _WORDS[text.strip()] if text.strip() in _WORDS else msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if any(_KINDS[kind](value) for kind in kinds & _KINDS.keys()) else text


def kinds_of(schema: Any, root: Any) -> Iterator[str]:
    """Yield the types that a schema allows, as far as it says so by itself. Schemas may refer to each other in circles."""
    waiting, seen = [schema], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        named = one.get("type")
        yield from (kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
        for value in [*_list(one.get("enum")), *([one["const"]] if "const" in one else [])]:
            yield next((kind for kind, has in _KINDS.items() if has(value)), "string")
        waiting += [*_list(one.get("anyOf")), *_list(one.get("oneOf")), *_list(one.get("allOf"))]
        if "$ref" in one:
            waiting.append(referred(one["$ref"], root))


def referred(path: Any, root: Any) -> Any:
    """Return what a ``$ref`` within ``root`` refers to."""
    for key in str(path).removeprefix("#").split("/")[1:]:
        root = root.get(key) if isinstance(root, dict) else None
    return root


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
