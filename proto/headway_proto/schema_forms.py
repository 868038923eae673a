"""JSON schemas in the words of the grammar library: what it refuses or takes loosely, said in another way.

Owns: which keywords have another way. Must not know: how a schema is compiled. A rewritten schema allows no output that
the given one forbids. It allows less in three cases: names that ``propertyNames`` lists come in that order, each at most
once, the property of a ``discriminator`` is always there, and the items of a larger set come in one order. What has no
other way is left to the library, which refuses it by name. A keyword in the path of a ``$ref`` is left alone, or the
reference would lose its target.
"""

import re
from typing import Any

from headway_proto.schema_additions import also, also_any_of, is_any
from headway_proto.schema_arrays import Arrays
from headway_proto.schema_discriminators import Discriminators
from headway_proto.schema_document import SchemaDocument, TooMuchError
from headway_proto.schema_formats import FORMATS, FORMATS_OF_DRAFTS, PATTERNS, UUID
from headway_proto.schema_keywords import BY_NAME, KEYWORDS, OF_MANY, OF_ONE, SAYS_NOTHING_OF_VALUES
from headway_proto.schema_negation import Negation, all_of
from headway_proto.schema_values import (
    Schema,
    Values,
    types_of,
)

_LOOKS_AHEAD = re.compile(r"\^\(\?([=!])")
_PARENTHESIS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([()|])", re.DOTALL)
_REPEATS = frozenset("*+?{")
_TEXTS = Values(frozenset({"string"}))
_MOST_BRANCHES = 64
_MOST_COMPARED = 100_000
_MOST_CHOICES = 8


def rewritten(schema: Schema) -> Schema:
    """Return the schema as the library reads it; the given one stays as it is.

    Raises:
        RecursionError: it is nested too deeply.
    """
    if not isinstance(schema, dict):
        return schema
    rewriting = _Rewriting(schema)
    found = rewriting.result()
    if rewriting.requires_more and rewriting.leaves_one_of:
        # What one branch no longer allows, the library could let pass through another.
        return _Rewriting(schema, may_require=False).result()
    return found


class _Rewriting:
    def __init__(self, root: dict[str, Any], *, may_require: bool = True) -> None:
        self._root = root
        self._may_require = may_require
        self.leaves_one_of = False
        self._document = SchemaDocument(root)
        self._pinned = self._document.pinned
        self._negation = Negation(self._document.target)
        self._discriminators = Discriminators(self._document)
        self._arrays = Arrays(self._document)

    @property
    def requires_more(self) -> bool:
        return self._discriminators.requires_more

    def result(self) -> Schema:
        schema = self._schema(self._root)
        added: dict[str, Schema] = {}
        while len(added) < len(self._document.added):  # Each may add more.
            for name, one in list(self._document.added.items())[len(added) :]:
                added[name] = self._schema(one)
        if added and isinstance(schema, dict):
            schema["$defs"] = {**schema.get("$defs", {}), **added}
        return schema

    def _schema(self, given: Schema) -> Schema:
        if not isinstance(given, dict):
            return given
        schema = self._discriminators.with_required(given) if self._may_require else given
        schema = {key: value for key, value in schema.items() if key in KEYWORDS or key in self._pinned}
        if is_any(schema.get("not")) and "not" not in self._pinned:
            return False
        self._drop_what_says_nothing(schema)
        _say_pattern(schema)
        self._say_look_ahead(schema)
        self._say_format(schema)
        self._say_names(schema)
        self._say_not(schema)
        self._say_condition(schema)
        self._say_any_of(schema)
        self.leaves_one_of |= "oneOf" in schema
        self._say_dependent(schema)
        self._arrays.say_contains(schema)
        self._arrays.say_unique(schema)
        return {key: self._beneath(key, value) for key, value in schema.items()}

    def _beneath(self, key: str, value: Any) -> Any:
        if key in BY_NAME and isinstance(value, dict):
            return {name: self._schema(one) for name, one in value.items()}
        if key in OF_MANY and isinstance(value, list):
            return [self._schema(one) for one in value]
        if key in OF_ONE:
            return self._schema(value)
        return value if key in KEYWORDS else self._elsewhere(value)

    def _elsewhere(self, value: Any) -> Any:
        """Rewrite the targets of references in what is no keyword, as in ``components``."""
        if self._document.is_target(value):
            return self._schema(value)
        if isinstance(value, dict):
            return {key: self._elsewhere(one) for key, one in value.items()}
        return [self._elsewhere(one) for one in value] if isinstance(value, list) else value

    def _drop_what_says_nothing(self, schema: dict[str, Any]) -> None:
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        for key in ("unevaluatedItems", "unevaluatedProperties"):
            if is_any(schema.get(key)) and key not in self._pinned:
                del schema[key]

    def _say_look_ahead(self, schema: dict[str, Any]) -> None:
        """Say what a pattern looks ahead to at the beginning of a text with patterns beside it."""
        rest, ahead = schema.get("pattern"), []
        while isinstance(rest, str) and (found := _LOOKS_AHEAD.match(rest)):
            size = _size_of_group(rest[1:])
            inner = rest[found.end() : size]
            said = (
                {"pattern": f"^(?:{inner})"} if found[1] == "=" else self._negation.of({"pattern": f"^{inner}"}, _TEXTS)
            )
            if not size or said is None or rest[size + 1 : size + 2] in _REPEATS:
                return
            ahead.append(said)
            rest = f"^{rest[size + 1 :]}"
        if ahead:
            schema["pattern"] = rest
            also(schema, all_of(ahead))

    def _say_format(self, schema: dict[str, Any]) -> None:
        name = schema.get("format")
        if not isinstance(name, str) or name in FORMATS_OF_DRAFTS or not types_of(schema) & {"string"}:
            return
        if "pattern" in schema and name not in {"date", "date-time", "time"}:
            del schema["format"]  # zod writes its formats as patterns, and names them beside.
            return
        said = FORMATS.get(name)
        if said is None:
            return
        del schema["format"]
        if said.keys() & schema.keys():
            also(schema, said)
        else:
            schema.update(said)

    def _say_names(self, schema: dict[str, Any]) -> None:
        """Say ``propertyNames`` with properties or a pattern."""
        if "propertyNames" not in schema or self._pinned & {"additionalProperties", "propertyNames"}:
            return
        said = self._document.resolved(schema["propertyNames"])
        meaning = said.keys() - SAYS_NOTHING_OF_VALUES if isinstance(said, dict) else set()
        if isinstance(said, dict) and meaning - {"type"}:
            if "string" not in types_of(said):
                return
            meaning.discard("type")
        elif said is True or (isinstance(said, dict) and "string" in types_of(said)):
            del schema["propertyNames"]
            return
        rest = schema.get("additionalProperties", True)
        own = schema.get("properties", {})
        if "patternProperties" in schema or not isinstance(own, dict):
            return
        if meaning in ({"enum"}, {"const"}):
            listed = said["enum"] if "enum" in said else [said["const"]]
            if not isinstance(listed, list):
                return
            names = dict.fromkeys(name for name in listed if isinstance(name, str))
            schema["properties"] = {name: value if name in names else False for name, value in own.items()} | {
                name: rest for name in names if name not in own
            }
        elif not own and (pattern := _pattern_of(said, meaning)):
            schema["patternProperties"] = {pattern: rest}
        else:
            return
        schema["additionalProperties"] = False
        del schema["propertyNames"]

    def _say_any_of(self, schema: dict[str, Any]) -> None:
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or "oneOf" in self._pinned or len(branches) > _MOST_BRANCHES:
            return
        try:
            around = self._document.values({key: value for key, value in schema.items() if key != "oneOf"})
            found = [self._document.values(branch).both(around) for branch in branches]
        except TooMuchError:
            return
        if len(found) * sum(len(one.required) for one in found) > _MOST_COMPARED:
            return
        if not all(one.excludes(other) for place, one in enumerate(found) for other in found[:place]):
            branches = self._one_alone(branches, found, around)
        if branches:
            del schema["oneOf"]
            also_any_of(schema, branches)

    def _one_alone(self, branches: list[Schema], found: list[Values], around: Values) -> list[Schema]:
        """Return schemas of which any may hold, where one alone may of the ``branches``; none if they cannot be said."""
        if len(branches) > _MOST_CHOICES:
            return []
        others = [self._negation.of(branch, around) for branch in branches]
        alone = []
        for place, branch in enumerate(branches):
            rest = [others[at] for at, one in enumerate(found) if at != place and not one.excludes(found[place])]
            if None in rest:
                return []
            alone.append(all_of([branch, *rest]))
        return alone

    def _say_not(self, schema: dict[str, Any]) -> None:
        if "not" not in schema or "not" in self._pinned:
            return
        said = self._negated(schema["not"], schema, "not")
        if said is not None:
            del schema["not"]
            also(schema, said)

    def _say_condition(self, schema: dict[str, Any]) -> None:
        """Say ``if`` with its two cases."""
        words = ("if", "then", "else")
        if self._pinned.intersection(words) or not all(
            isinstance(schema.get(word, True), dict | bool) for word in words
        ):
            return
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if "if" in schema and not is_any(then):
            condition = schema["if"]
            other = self._negated(condition, schema, *words)
            if other is None:
                return
            # What follows in one case alone needs no second.
            cases = [other, then] if is_any(otherwise) else [all_of([condition, then]), all_of([other, otherwise])]
        else:
            cases = [schema.get("if", True), otherwise]
        for word in words:
            schema.pop(word, None)
        also_any_of(schema, cases)

    def _negated(self, given: Schema, schema: dict[str, Any], *words: str) -> Schema | None:
        """Return what holds where ``given`` does not, beside the rest of ``schema``; None if it cannot be said."""
        try:
            around = self._document.values({key: value for key, value in schema.items() if key not in words})
        except TooMuchError:
            return None
        return self._negation.of(given, around)

    def _say_dependent(self, schema: dict[str, Any]) -> None:
        for key in ("dependencies", "dependentRequired", "dependentSchemas"):
            given = schema.get(key)
            if not isinstance(given, dict) or len(given) > _MOST_CHOICES or key in self._pinned:
                continue
            are_schemas = key != "dependentRequired"
            if not all(_are_texts(one) or (are_schemas and isinstance(one, dict | bool)) for one in given.values()):
                continue
            del schema[key]
            for name, one in given.items():
                needed = {"required": one} if isinstance(one, list) else one
                also_any_of(schema, [{"properties": {name: False}}, needed])


def _say_pattern(schema: dict[str, Any]) -> None:
    known = schema.get("pattern")
    said = PATTERNS.get(known) if isinstance(known, str) else None
    if said is None:
        return
    del schema["pattern"]
    if said.keys() & schema.keys():
        also(schema, said)
    else:
        schema.update(said)


def _size_of_group(regex: str) -> int:
    """Return the length of the group that an expression begins with; 0 if it does not end, or is one of several choices."""
    depth = size = 0
    for found in _PARENTHESIS.finditer(regex):
        depth += {"(": 1, ")": -1}.get(found[1], 0)
        if found[1] == "|" and not depth:
            return 0
        if found[1] and not depth and not size:
            size = found.end()
    return size


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _pattern_of(names: dict[str, Any], meaning: set[str]) -> str:
    """Return the pattern of all names of a schema, or ""."""
    if meaning == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if meaning == {"format"} and isinstance(names["format"], str):
        if names["format"] == "uuid":
            return f"^{UUID}$"
        return str(FORMATS.get(names["format"], {}).get("pattern", ""))
    if meaning and meaning <= {"minLength", "maxLength"}:
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        if all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in (least, most or 0)):
            return f"^(?s:.){{{least},{most}}}$"
    return ""
