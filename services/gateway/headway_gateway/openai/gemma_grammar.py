"""Arguments as FunctionGemma and Gemma 4 have them, that follow a JSON schema, as rules of a grammar.

Must not know: where calls are, how they are read.

They are nearly JSON: names have no quotes, texts stand between marks, and nothing stands between the parts.
"""

import json
from collections.abc import Iterator
from typing import Any

from headway_gateway.openai.grammar_marks import Marks
from headway_gateway.openai.markup_grammar import (
    Allowance,
    MarkupRules,
    UnsayableError,
    is_of,
    of_type,
    require_only,
    types_of,
)
from headway_gateway.openai.tool_calls import CallForm
from headway_gateway.text.grammar_literals import text
from headway_proto.schema_keywords import ASSERTIONS
from headway_proto.wording import shown

_OF_LISTED = frozenset(("const", "enum", "type"))
_OF_ARRAYS = frozenset(("items", "maxItems", "minItems", "type"))
_OF_SCALARS = frozenset(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf", "type"))
_NAME = r'[^\s"{}\[\],:<>]+'
_SCALARS = '%json {"type": ["number", "boolean", "null"]}'


class GemmaRules(MarkupRules):
    """As those of markup. Each schema behind a reference is a rule, since schemas may refer to each other in circles."""

    def __init__(self, name: str, root: dict[str, Any], form: CallForm, marks: Marks, allowance: Allowance) -> None:
        super().__init__(name, root, form, marks, allowance)
        assert form.markup is not None
        self._text_begin = marks.said(form.markup.text_begin)
        self._name_of_any = _NAME
        self._made: dict[int, str] = {}
        """The rules' names, by the identities of parts of the root."""

    def _all(self, schema: dict[str, Any]) -> str:
        return self._object(schema)

    def _rule(self, schema: Any) -> str:
        """Return the name of the rule of a value."""
        plain = self._plain(schema)
        is_any = not ASSERTIONS.intersection(plain)
        place = 0 if is_any else id(plain)
        if place not in self._made:
            name = self._made[place] = f"{self._name}_{len(self._made)}"
            said = self._any(name) if is_any else (one for part in self._members(plain) for one in self._parts(part))
            self._more.append(f"{name}: {' | '.join(dict.fromkeys(said))}")
        return self._made[place]

    def _any(self, name: str) -> Iterator[str]:
        yield from self._texts({}, set())
        yield from (_SCALARS, _listed(name), self._object({}))

    def _texts(self, schema: dict[str, Any], others: set[str]) -> Iterator[str]:
        yield from (f"{self._text_begin} {one}" for one in super()._texts(schema, others))

    def _parts(self, schema: dict[str, Any]) -> Iterator[str]:
        """Yield what a value may be."""
        self._spend(len(schema))
        kind = schema.get("type")
        if "enum" in schema or "const" in schema:
            yield from self._listed_parts(schema)
        elif isinstance(kind, list):
            for one in types_of(schema):
                yield from self._parts(of_type(schema, one))
        elif kind == "string":
            yield from self._texts(schema, set())
        elif kind == "object":
            yield self._object(schema)
        elif kind == "array":
            require_only(schema, _OF_ARRAYS)
            yield _listed(self._rule(schema.get("items", True)), schema.get("minItems", 0), schema.get("maxItems"))
        elif kind in ("integer", "number", "boolean", "null"):
            require_only(schema, _OF_SCALARS)
            yield f"%json {json.dumps(schema)}"
        else:
            raise UnsayableError(
                "a value without a type is not allowed in this form; allowed: one with type, enum or anyOf"
            )

    def _listed_parts(self, schema: dict[str, Any]) -> Iterator[str]:
        require_only(schema, _OF_LISTED)
        types = types_of(schema)
        for one in schema["enum"] if "enum" in schema else [schema["const"]]:
            if isinstance(one, dict | list):
                raise UnsayableError(f"enum: {shown(one)} is not allowed in this form; allowed: no object and no array")
            if is_of(one, types):
                yield from self._texts({"const": one}, set()) if isinstance(one, str) else (text(json.dumps(one)),)

    def _object(self, schema: dict[str, Any]) -> str:
        own, required, rest = self._properties(schema)
        parts = [(f"{text(f'{name}:')} {self._rule(value)}", name in required) for name, value in own.items()]
        first = next((place for place, (_, is_required) in enumerate(parts) if is_required), None)
        more = [f'("," {part}){"" if is_required else "?"}' for part, is_required in parts]
        if rest is not False:
            other = f'{self._other_name(own)} ":" {self._rule(rest)}'
            more.append(f'("," {other})*')
        if first is not None:
            before = [f'({part} ",")?' for part, _ in parts[:first]]
            said = [" ".join((*before, parts[first][0], *more[first + 1 :]))]
        else:
            said = []
            for place, (part, _) in enumerate(parts):
                said.append(" ".join((part, *more[place + 1 :])))
                self._spend(len(said[-1]))
            said += ['""', *([f"{other} {more[-1]}"] if rest is not False else [])]
        return f'"{{" ({" | ".join(said)}) "}}"'


def _listed(item: str, least: Any = 0, most: Any = None) -> str:
    if not (isinstance(least, int) and isinstance(most, int | None)):
        raise UnsayableError(f"minItems {shown(least)} and maxItems {shown(most)} are not allowed; allowed: numbers")
    if most == 0:
        return '"[" "]"'
    further = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    return f'"[" ({item} {further}){"" if least else "?"} "]"'
