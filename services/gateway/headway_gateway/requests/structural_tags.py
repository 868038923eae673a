"""Tags within free text (``structural_tag``), as vLLM and SGLang have them, as a grammar.

Owns: the older form, of structures and triggers, and the kinds of the newer one that have rules. Must not know: requests,
what stands before such a text.

Free text ends where a trigger begins, and none of it holds one. So text of an open end comes last, or before the end of a
tag.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from headway_gateway.text.grammar_literals import pattern, text
from headway_proto.sampling import MAX_CONSTRAINT_BYTES
from headway_proto.wording import one_line, shown

TAGGED = "start: tagged\n"
"""The beginning of each such grammar: ``tagged`` is what a request asks for."""

_Schema: TypeAlias = dict[str, Any] | bool


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: _Schema = True


class _Older(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


class _Kind(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    """A part of an output."""


class _ConstString(_Kind, tag="const_string"):
    value: str


class _JsonSchema(_Kind, tag="json_schema"):
    json_schema: _Schema
    style: Literal["json"] = "json"


class _Regex(_Kind, tag="regex"):
    pattern: str


class _AnyText(_Kind, tag="any_text"):
    pass


class _Sequence(_Kind, tag="sequence"):
    elements: list["_Format"]


class _Or(_Kind, tag="or"):
    elements: list["_Format"]


class _Tag(_Kind, tag="tag"):
    begin: str
    content: "_Format"
    end: str | list[str]


class _TriggeredTags(_Kind, tag="triggered_tags"):
    triggers: list[str]
    tags: list[_Tag]
    at_least_one: bool = False
    stop_after_first: bool = False


class _TagsWithSeparator(_Kind, tag="tags_with_separator"):
    tags: list[_Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


_Format: TypeAlias = (
    _ConstString | _JsonSchema | _Regex | _AnyText | _Sequence | _Or | _Tag | _TriggeredTags | _TagsWithSeparator
)


class _Newer(msgspec.Struct, forbid_unknown_fields=True):
    format: _Format
    type: Literal["structural_tag"] = "structural_tag"


_KINDS = "any_text, const_string, json_schema, or, regex, sequence, tag, tags_with_separator, triggered_tags"


def grammar_of_tags(given: bytes | str) -> str:
    """Return the grammar of a structural tag in JSON. It begins with ``TAGGED``.

    Raises:
        ValueError: it is no structural tag, or has no rules; one line.
    """
    if len(given) > MAX_CONSTRAINT_BYTES:
        raise ValueError(f"{len(given)} bytes are not allowed; allowed: at most {MAX_CONSTRAINT_BYTES}")
    try:
        return _grammar_of_tags(given)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _grammar_of_tags(given: bytes | str) -> str:
    wanted: _Format
    try:
        fields = msgspec.json.decode(given, type=dict[str, msgspec.Raw])
        if "format" in fields:
            wanted = msgspec.json.decode(given, type=_Newer).format
        else:
            older = msgspec.json.decode(given, type=_Older)
            tags = [_Tag(one.begin, _JsonSchema(one.schema), one.end) for one in older.structures]
            wanted = _TriggeredTags(older.triggers, tags)
    except msgspec.ValidationError as error:
        kinds = f", of the types {_KINDS}" if "Invalid value" in str(error) else ""
        raise ValueError(f"{one_line(error)}; allowed: a format{kinds}, or structures with triggers") from None
    rules = _Rules()
    whole = rules.said(wanted, is_last=True)
    return "\n".join((f"{TAGGED}tagged: {whole}", *rules.lines))


class _Rules:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._numbers = itertools.count()

    def said(self, one: _Format, *, is_last: bool) -> str:
        """Return the right side of a rule; ``is_last``: nothing comes behind it."""
        match one:
            case _ConstString(value=value):
                return text(value)
            case _JsonSchema(json_schema=schema):
                return f"%json {json.dumps(schema, ensure_ascii=False)}"
            case _Regex(pattern=regex):
                return pattern(regex)
            case _Tag():
                return f"{text(one.begin)} {self._rest(one)}"
            case _TagsWithSeparator():
                return self._separated(one)
            case _:
                return self._of_others(one, is_last=is_last)

    def _of_others(self, one: _Or | _Sequence | _AnyText | _TriggeredTags, *, is_last: bool) -> str:
        if isinstance(one, _Or):
            return f"({' | '.join(self._each(one.elements, [is_last] * len(one.elements)))})"
        if isinstance(one, _Sequence):
            return " ".join(self._each(one.elements, [False] * (len(one.elements) - 1) + [is_last]))
        if not is_last:
            kind = one.__struct_config__.tag
            raise ValueError(f"{kind} is not allowed before something else; allowed: last, or any_text alone in a tag")
        return self._terminal(pattern("(?s:.*)")) if isinstance(one, _AnyText) else self._triggered(one)

    def _each(self, elements: Sequence[_Format], are_last: Sequence[bool]) -> Iterator[str]:
        if not elements:
            raise ValueError("elements: an empty list is not allowed; allowed: one or more")
        for one, is_last in zip(elements, are_last, strict=True):
            yield f"({self.said(one, is_last=is_last)})"

    def _rest(self, tag: _Tag) -> str:
        """A tag behind its beginning."""
        ends = [tag.end] if isinstance(tag.end, str) else tag.end
        if not isinstance(tag.content, _AnyText):
            return f"({self.said(tag.content, is_last=False)}) ({' | '.join(map(text, ends)) or text('')})"
        if not all(ends):
            raise ValueError("end: an empty text is not allowed behind any_text; allowed: a text")
        return self._up_to(ends)

    def _separated(self, one: _TagsWithSeparator) -> str:
        tags = f"({' | '.join(self.said(tag, is_last=False) for tag in _some(one.tags, 'tags'))})"
        several = tags if one.stop_after_first else f"{tags} ({text(one.separator)} {tags})*"
        return several if one.at_least_one else f"({several})?"

    def _triggered(self, one: _TriggeredTags) -> str:
        triggers = set(_some(one.triggers, "triggers"))
        lengths = sorted(set(map(len, triggers)))
        by_trigger: dict[str, list[str]] = {}
        for tag in _some(one.tags, "tags"):
            trigger = next((tag.begin[:length] for length in lengths if tag.begin[:length] in triggers), None)
            if trigger is None:
                raise ValueError(f"begin: {shown(tag.begin)} is not allowed; allowed: what begins with a trigger")
            behind = tag.begin.removeprefix(trigger)
            by_trigger.setdefault(trigger, []).append(f"{text(behind) if behind else ''} {self._rest(tag)}")
        tags = [f"{self._up_to([trigger])} ({' | '.join(several)})" for trigger, several in by_trigger.items()]
        first = f"({' | '.join(tags)})"
        none = f"(?s:.*)(?:{'|'.join(map(_literal, by_trigger))})(?s:.*)"
        end = self._terminal(f"{pattern('(?s:.*)')} & ~{pattern(none)}")
        if one.stop_after_first:
            return first if one.at_least_one else f"({first} | {end})"
        return f"{first}{'+' if one.at_least_one else '*'} {end}"

    def _up_to(self, ends: Sequence[str]) -> str:
        """Text up to the first of some ends, with it."""
        name = f"tagged_text{next(self._numbers)}"
        self.lines.append(f"{name}[lazy]: {pattern('(?s:.*)(?:' + '|'.join(map(_literal, ends)) + ')')}")
        return name

    def _terminal(self, said: str) -> str:
        name = f"TAGGED_TEXT{next(self._numbers)}"
        self.lines.append(f"{name}: {said}")
        return name


def _some(values: Sequence[Any], name: str) -> Sequence[Any]:
    if not values or "" in values:
        raise ValueError(f"{name}: {shown(values)} is not allowed; allowed: one or more, none of them empty")
    return values


def _literal(words: str) -> str:
    return re.sub(r"[^\w\s<>=/]", lambda found: "\\" + found[0], words)
