"""Arguments as ``<parameter=NAME>...</parameter>`` that follow a JSON schema, as rules of a grammar.

Owns: how texts stand there, which have no quotes; all else is JSON. Must not know: where calls are, how values are read
(``markup_values``).

A text is one terminal with its end, if that is a text too, so that no other terminal begins or ends within it. Where a value may be a text or
something else, no text looks like something else: a reader could not tell them apart.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from headway_gateway.openai.grammar_marks import Marks
from headway_gateway.openai.markup_values import kinds_said, parts_of, referred
from headway_gateway.openai.tool_calls import CallForm
from headway_gateway.openai.tool_schemas import moved, references_in
from headway_gateway.text.grammar_literals import pattern, text
from headway_proto.sampling import MAX_CONSTRAINT_BYTES
from headway_proto.schema_formats import DURATION, FORMATS, FORMATS_OF_DRAFTS, PATTERNS, UUID, escaped
from headway_proto.schema_keywords import ASSERTIONS, OF_KINDS
from headway_proto.wording import shown

BREAK = '"\\n"?'
"""What may stand between marks."""
_NUMBER = r"\s*-?[0-9](?s:.*)"
_LOOKS_LIKE = {
    "array": r"\s*\[(?s:.*)",
    "object": r"\s*\{(?s:.*)",
    "integer": _NUMBER,
    "number": _NUMBER,
    "boolean": r"\s*(?:[tT]rue|[fF]alse)\s*",
    "null": r"\s*(?:null|None)\s*",
}
_WORDS = {"boolean": ("true", "false"), "null": ("null",)}
_LETTERS_OF_URIS = "[A-Za-z0-9._~:/?#@!$&'()*+,;=%-]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "uuid": UUID,
    "duration": DURATION,
    "email": r"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?\.)+[A-Za-z]{2,}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "uri": f"[a-z][a-z0-9+.-]*://{_LETTERS_OF_URIS}+",
    "url": f"https?://{_LETTERS_OF_URIS}+",
}
"""The usual ones of each; nothing else is written."""
_OF_ARGUMENTS = frozenset(("$defs", "additionalProperties", "definitions", "properties", "required", "type"))
_OF_TEXTS = frozenset(("const", "enum", "format", "maxLength", "minLength", "pattern", "type"))
_SAYS_NOTHING_OF = {kind: frozenset().union(*OF_KINDS.values()) - own for kind, own in OF_KINDS.items()}
_DEFINITIONS = ("$defs", "definitions")
_MOST_HOPS = 8
_NAME = r"[^<>{quote}\s](?:[^<>{quote}\n]*[^<>{quote}\s])?"
_GROUP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*(?:\]|\Z)|([()|^$])", re.DOTALL)
"""A class that does not end goes up to the end, so that it is looked through once."""


class UnsayableError(ValueError):
    """A schema has no rules; one line."""


class Allowance:
    """How much may be said of tools together, in bytes of rules and in parts of schemas looked at.

    A short schema may say much: by references to one part, each place that refers to it has all of it.
    """

    def __init__(self) -> None:
        self._left = 2 * MAX_CONSTRAINT_BYTES  # the whole grammar is measured for itself

    def spend(self, count: int) -> None:
        """Count what is said or looked at.

        Raises:
            UnsayableError: it is more than a constraint may have.
        """
        self._left -= count
        if self._left < 0:
            raise UnsayableError("its rules are too long for this form; allowed: a shorter schema")


class MarkupRules:
    """Rules of all parameters by the ``root`` schema of a tool's arguments, in its order. The form is markup."""

    def __init__(self, name: str, root: dict[str, Any], form: CallForm, marks: Marks, allowance: Allowance) -> None:
        """``name`` is that of the first rule; others begin with it, and terminals with it in capitals."""
        assert form.markup is not None
        markup = form.markup
        self._more: list[str] = []
        """Rules and terminals beside the first."""
        self._name, self._root, self._spend = name, root, allowance.spend
        said = marks.said
        lines = ' "\\n"' if markup.has_lines else ""
        self._key = f"{BREAK} {said(markup.key)}"
        self._key_end = f"{said(markup.key_end)} {BREAK if markup.value else ''} {said(markup.value)}{lines}"
        self._name_of_any = _NAME.replace("{quote}", '"' if '"' in markup.key_end else "")
        is_token = marks.token_id(markup.value_end) is not None
        self._text_end = ("\n" if markup.has_lines else "") + ("" if is_token else markup.value_end)
        """What a text and its end as one terminal end with."""
        self._token_end = said(markup.value_end) if is_token else ""
        all_marks = map(
            escaped, filter(None, (markup.key, markup.value_end, "" if markup.text_begin else markup.call, form.end))
        )
        self._holds_a_mark = f"(?s:.*)(?:{'|'.join(all_marks)})(?s:.*)"

    def rules(self) -> list[str]:
        """Return all rules.

        Raises:
            UnsayableError: the schema says something for which there is no rule.
        """
        return [f"{self._name}: {self._all(self._plain(self._root))}", *self._more]

    def _all(self, schema: dict[str, Any]) -> str:
        """Return the right side of the first rule."""
        own, required, rest = self._properties(schema)
        parts = [
            f"({self._begin(text(name))} ({self._value(value)})){'' if name in required else '?'}"
            for name, value in own.items()
        ]
        if rest is not False:
            parts.append(f"({self._begin(self._other_name(own))} ({self._value(rest)}))*")
        return " ".join(parts) or '""'

    def _properties(self, schema: dict[str, Any]) -> tuple[dict[str, Any], list[Any], Any]:
        """Return those that there may be, which of them are required, and what others are."""
        require_only(schema, _OF_ARGUMENTS)
        own, required = schema.get("properties", {}), schema.get("required", [])
        rest = schema.get("additionalProperties", not own)
        if not isinstance(own, dict) or not isinstance(required, list):
            raise UnsayableError("properties and required are not readable; allowed: an object, and a list")
        for name in own:
            if not re.fullmatch(self._name_of_any, name):
                raise UnsayableError(
                    f"the name {shown(name)} is not allowed; allowed: names without marks and line breaks"
                )
        if lacking := [name for name in required if own.get(name, False) is False]:
            raise UnsayableError(f"required: {shown(lacking[0])} is not allowed; allowed: names of properties")
        return {name: value for name, value in own.items() if value is not False}, required, rest

    def _other_name(self, own: Iterable[str]) -> str:
        return self._terminal([self._name_of_any], map(escaped, own))

    def _begin(self, name: str) -> str:
        return f"{self._key} {name} {self._key_end}"

    def _value(self, schema: Any) -> str:
        """Return the value with its end as the right side of a rule."""
        kinds = self._kinds(schema)
        if kinds and "string" not in kinds:
            return self._json(schema)
        members = list(self._members(schema))
        others = {kind for member in members for kind in self._kinds(member)} - {"string"}
        said = dict.fromkeys(one for member in members for one in self._member(member, others))
        return " | ".join(said)

    def _members(self, schema: Any, hops: int = _MOST_HOPS) -> Iterator[dict[str, Any]]:
        """Yield schemas of which a value follows one; each is of texts, or of other things."""
        plain = self._plain(schema)
        self._spend(len(plain))
        kinds = self._kinds(plain)
        if not hops:
            raise UnsayableError("it refers to others too often; allowed: fewer $ref")
        several = [key for key in ("anyOf", "oneOf") if key in plain]
        if several and len(ASSERTIONS.intersection(plain)) == 1 and isinstance(plain[several[0]], list):
            if several == ["oneOf"]:
                self._require_different(plain["oneOf"])
            for one in plain[several[0]]:
                yield from self._members(one, hops - 1)
        elif kinds - {"string"} and "string" in kinds and isinstance(plain.get("enum"), list):
            require_only(plain, frozenset(("enum", "type")))
            types = types_of(plain)
            found = [one for one in plain["enum"] if is_of(one, types)]
            if not found:
                raise UnsayableError("enum: no value of it has its type; allowed: one or more")
            texts = [one for one in found if isinstance(one, str)]
            yield from ({"enum": some} for some in (texts, [one for one in found if not isinstance(one, str)]) if some)
        elif kinds - {"string"} and "string" in kinds and isinstance(plain.get("type"), list):
            for kind in types_of(plain):
                yield from self._members(of_type(plain, kind), hops - 1)
        elif kinds - {"string"} and "string" in kinds:
            raise UnsayableError(
                "a text or another value is not allowed in this form; allowed: type, enum or anyOf alone"
            )
        else:
            yield plain

    def _member(self, schema: dict[str, Any], others: set[str]) -> Iterator[str]:
        kinds = self._kinds(schema)
        if not kinds - {"string"}:
            yield from self._texts(schema, others)
        elif len(kinds) == 1 and kinds <= _WORDS.keys() and set(ASSERTIONS.intersection(schema)) == {"type"}:
            yield from map(self._text, _WORDS[kinds.pop()])
        elif isinstance(schema.get("enum"), list) and set(ASSERTIONS.intersection(schema)) == {"enum"}:
            # A word is one terminal, as a text is: another could begin with it.
            words = [one for one in schema["enum"] if one is None or isinstance(one, bool)]
            yield from (self._text(json.dumps(one)) for one in words)
            if rest := [one for one in schema["enum"] if one is not None and not isinstance(one, bool)]:
                yield self._json({"enum": rest})
        elif kinds & _WORDS.keys():
            raise UnsayableError(
                "true, false or null beside a text is not allowed in this form; allowed: as a type or enum alone"
            )
        else:
            yield self._json(schema)

    def _require_different(self, schemas: Sequence[Any]) -> None:
        """A value must be of one alone."""
        seen: set[str] = set()
        for one in schemas:
            kinds = {"number" if kind == "integer" else kind for kind in self._kinds(self._plain(one))}
            if not kinds or kinds & seen:
                raise UnsayableError("oneOf is not allowed in this form for values of one type; allowed: anyOf")
            seen |= kinds

    def _texts(self, schema: dict[str, Any], others: set[str]) -> Iterator[str]:
        require_only(schema, _OF_TEXTS)
        if "enum" in schema or "const" in schema:
            if schema.keys() & {"format", "maxLength", "minLength", "pattern"}:
                raise UnsayableError("enum is not allowed with a pattern, format or length; allowed: enum alone")
            found = schema["enum"] if "enum" in schema else [schema["const"]]
            for one in found:
                if any(re.fullmatch(regex, one) for regex in self._unlike(others)):
                    raise UnsayableError(f"the text {shown(one)} is not allowed in this form; allowed: others")
                yield self._text(one)
            return
        known = PATTERNS.get(schema.get("pattern", ""), {})
        schema = {**known, **schema, **{key: known[key] for key in known if key == "pattern"}}
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        whole = [f"(?s:.{{{least},{most}}})" if (least, most) != (0, "") else "(?s:.*)"]
        if "pattern" in schema:
            whole.append(_searched(schema["pattern"]))
        if "format" in schema and not (known or _is_beside_its_pattern(schema)):
            whole.append(_of_format(schema["format"]))
        end = escaped(self._text_end)
        terminal = self._terminal([one + end for one in whole], [one + end for one in self._unlike(others)])
        yield f"{terminal} {self._token_end}"

    def _unlike(self, others: set[str]) -> list[str]:
        """Return expressions, none of which matches a text where a value may be of other types, too."""
        return [self._holds_a_mark, *(_LOOKS_LIKE[one] for one in sorted(others))]

    def _text(self, words: str) -> str:
        self._spend(len(words))
        return f"{text(words + self._text_end)} {self._token_end}"

    def _kinds(self, schema: Any) -> set[str]:
        """Return the types that a schema allows, as far as it says so by itself."""
        kinds: set[str] = set()
        for one in parts_of(schema, self._root):
            self._spend(1 + len(str(one.get("$ref", ""))))
            for kind in kinds_said(one):
                self._spend(1)
                kinds.add(kind)
        return kinds

    def _json(self, schema: Any) -> str:
        known = self._definitions_for(schema)
        if known is None:
            within = {**moved(schema, "#/$defs/whole"), "$defs": {"whole": moved(self._root, "#/$defs/whole")}}
        else:
            within = {**schema, **known} if known else schema
        said = json.dumps(within, ensure_ascii=False)
        self._spend(len(said))
        return f"%json {said} {self._text('')}"

    def _definitions_for(self, schema: Any) -> dict[str, dict[str, Any]] | None:
        """Return the definitions that a schema refers to, and what these refer to; None if it refers to something else."""
        found: dict[str, dict[str, Any]] = {}
        waiting = [schema]
        while waiting:
            for path in references_in(waiting.pop()):
                self._spend(len(path))
                key, _, rest = path.removeprefix("#/").partition("/")
                name = rest.partition("/")[0]
                definitions = self._root.get(key) if key in _DEFINITIONS and path.startswith("#/") else None
                if not isinstance(definitions, dict) or name not in definitions:
                    return None
                if name not in found.setdefault(key, {}):
                    found[key][name] = definitions[name]
                    waiting.append(definitions[name])
        return found

    def _terminal(self, alike: Iterable[str], unlike: Iterable[str]) -> str:
        """Return a new terminal of what all of ``alike`` match, and none of ``unlike``."""
        name = f"{self._name.upper()}_{len(self._more)}"
        said = " & ".join((*map(pattern, alike), *(f"~{pattern(one)}" for one in unlike)))
        self._spend(len(said))
        self._more.append(f"{name}: {said}")
        return name

    def _plain(self, schema: Any) -> dict[str, Any]:
        """Return what a schema says, without words, and behind references that stand alone."""
        for _ in range(_MOST_HOPS):
            plain = {} if schema is True else schema
            if not isinstance(plain, dict):
                raise UnsayableError(f"the schema {shown(schema)} is not allowed; allowed: an object")
            said = ASSERTIONS.intersection(plain)
            if said == {"allOf"} and isinstance(plain["allOf"], list) and len(plain["allOf"]) == 1:
                schema = plain["allOf"][0]
            elif said.difference(_DEFINITIONS) == {"$ref"}:
                self._spend(len(str(plain["$ref"])))
                schema = referred(plain["$ref"], self._root)
            else:
                return plain
        raise UnsayableError("it refers to others too often; allowed: fewer $ref")


def require_only(schema: dict[str, Any], allowed: frozenset[str]) -> None:
    """Raise UnsayableError if a schema says more."""
    if more := ASSERTIONS.intersection(schema) - allowed:
        raise UnsayableError(f"{min(more)} is not allowed in this form; allowed: {', '.join(sorted(allowed))}")


def of_type(schema: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return what a schema says of values of one type."""
    nothing = _SAYS_NOTHING_OF.get(kind, frozenset()) if isinstance(kind, str) else frozenset()
    return {**{key: value for key, value in schema.items() if key not in nothing}, "type": kind}


def types_of(schema: dict[str, Any]) -> dict[str, None]:
    """Return the types that ``type`` names, each once."""
    named = schema.get("type")
    return dict.fromkeys(kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str))


def is_of(value: Any, types: Collection[str]) -> bool:
    """Return whether a value has one of the types, if there are any."""
    kinds = set(kinds_said({"const": value}))
    return not types or any(kind in types for kind in kinds | ({"number"} if kinds == {"integer"} else set()))


def _is_beside_its_pattern(schema: dict[str, Any]) -> bool:
    """As zod writes its formats, and names them beside."""
    return "pattern" in schema and schema["format"] not in FORMATS_OF_DRAFTS.union(("date", "date-time", "time"))


def _of_format(name: object) -> str:
    if isinstance(name, str) and name in _FORMATS:
        return _FORMATS[name]
    said = FORMATS.get(name) if isinstance(name, str) else None
    if said is None or said.keys() - {"pattern"}:
        allowed = sorted({*_FORMATS, *(known for known, words in FORMATS.items() if not words.keys() - {"pattern"})})
        raise UnsayableError(f"format: {shown(name)} is not allowed in this form; allowed: {', '.join(allowed)}")
    return _searched(said["pattern"]) if said else "(?s:.*)"


def _searched(regex: object) -> str:
    """Return an expression for the whole of a text in which ``regex`` is found.

    Anchors may stand at its ends alone: the library has none.
    """
    if not isinstance(regex, str):
        raise UnsayableError(f"pattern: {shown(regex)} is not allowed; allowed: a text")
    depth, choices, anchors = 0, 0, []
    for found in _GROUP.finditer(regex):
        depth += {"(": 1, ")": -1}.get(found[1], 0)
        choices += found[1] == "|" and not depth
        anchors += [found.start()] if found[1] in ("^", "$") else []
    begins, ends = 0 in anchors, len(regex) - 1 in anchors
    if len(anchors) > begins + ends or (anchors and choices):
        raise UnsayableError(f"pattern: {shown(regex)} is not allowed in this form; allowed: ^ and $ around all of it")
    inner = regex[begins : len(regex) - ends]
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
