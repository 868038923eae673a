"""Calls in markup, as ``<parameter=NAME>...</parameter>``, whose values are texts until a JSON schema says what they are.

Owns: the marks of each form. Must not know: where calls are in an output.
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec


class Markup(NamedTuple):
    """The marks around a call's name, and around the name and the value of each argument. Between marks there may be a line
    break.
    """

    call: str
    name_end: str
    end: str
    key: str
    key_end: str
    value: str
    value_end: str
    has_lines: bool = False
    """A value stands on lines of its own."""
    is_list: bool = False
    """Several calls may follow each other."""
    text_begin: str = ""
    """What a text begins with, where arguments are nearly JSON."""


CODER = Markup("<function=", ">", "</function>", "<parameter=", ">", "", "</parameter>", has_lines=True)
SEED = CODER._replace(has_lines=False)
MINIMAX = Markup('<invoke name="', '">', "</invoke>", '<parameter name="', '">', "", "</parameter>", is_list=True)
GLM = Markup("", "", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
FUNCTION_GEMMA = Markup("call:", "", "", "", ":", "", "<escape>", text_begin="<escape>")
GEMMA_4 = FUNCTION_GEMMA._replace(value_end='<|"|>', text_begin='<|"|>')


@cache
def _finder(markup: Markup) -> re.Pattern[str]:
    """Return what finds names and values. A value goes up to the last end before a name, so it may contain one.

    A name contains no mark of a name: without that, names that do not end would be looked through again for each of them.
    """
    key, key_end, value, end = map(re.escape, (markup.key, markup.key_end, markup.value, markup.value_end))
    behind_key = rf"\s*{value}" if value else ""
    return re.compile(
        rf"{key}((?:(?!{key}).)*?){key_end}{behind_key}(.*?)(?:{end}\s*(?={key}|\Z)|(?={key})|\Z)", re.DOTALL
    )


def is_in_value(markup: Markup, text: str) -> bool:
    """Return whether a text ends within a value, so that a mark there would be a part of it."""
    if markup.text_begin:
        return text.count(markup.text_begin) % 2 == 1
    return text.rfind(markup.value or markup.key) > text.rfind(markup.value_end)


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
        for name, content in _finder(markup).findall(text)
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
    """Yield the types that a schema allows, as far as it says so by itself."""
    for one in parts_of(schema, root):
        yield from kinds_said(one)


def kinds_said(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the types that ``type``, ``enum`` and ``const`` name."""
    named = schema.get("type")
    yield from (kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))
    for value in [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]:
        yield next((kind for kind, has in _KINDS.items() if has(value)), "string")


def parts_of(schema: Any, root: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all that it says are its alternatives or parts. Schemas may refer to each other in circles."""
    waiting, seen = [schema], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
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
