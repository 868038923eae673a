"""JSON schemas in the words of the grammar library: what it refuses or takes loosely, said in another way.

Owns: which keywords have another way. Must not know: how a schema is compiled. A rewritten schema allows no output that
the given one forbids. It allows less in three cases: names that ``propertyNames`` lists come in that order, each at most
once, the property of a ``discriminator`` is always there, and the items of a larger set come in one order. What has no
other way is left to the library, which refuses it by name. A keyword in the path of a ``$ref`` is left alone, or the
reference would lose its target.
"""

import math
import re
from collections.abc import Callable, Iterable
from itertools import combinations, count, permutations
from typing import Any
from urllib.parse import unquote

from headway_proto.schema_formats import FORMATS, FORMATS_OF_DRAFTS, PATTERNS, UUID
from headway_proto.schema_keywords import BY_NAME, KEYWORDS, OF_MANY, OF_ONE, SAYS_NOTHING_OF_VALUES
from headway_proto.schema_negation import Negation, all_of, any_of
from headway_proto.schema_numbers import objects_within
from headway_proto.schema_values import ALL_TYPES, ANYTHING, NOTHING, Values, own_values, texts_of, type_of, types_of

Schema = Any
"""An object or a bool."""

_LOOKS_AHEAD = re.compile(r"\^\(\?([=!])")
_PARENTHESIS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|([()|])", re.DOTALL)
_REPEATS = frozenset("*+?{")
_TEXTS = Values(frozenset({"string"}))
_LISTING = frozenset(["const", "enum", "type"])
_ADDED = "#/$defs/"
_MOST_BRANCHES = 64
_MOST_HOPS = 6
_MOST_WORK = 10_000
_MOST_COMPARED = 100_000
_MOST_CHOICES = 8
_MOST_ARRAYS = 400
_MOST_ARRAYS_IN_ALL = 1000


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


class _TooMuchError(Exception):
    """The search for branches that exclude each other costs too much."""


class _Rewriting:
    def __init__(self, root: dict[str, Any], *, may_require: bool = True) -> None:
        self._root = root
        self._may_require = may_require
        self.requires_more = False
        self.leaves_one_of = False
        parts = list(objects_within(root))
        self._refs = {ref for part in parts if isinstance(ref := part.get("$ref"), str)}
        self._pinned = {_unescaped(step) for ref in self._refs for step in ref.split("/")[1:]}
        # With another base, a reference has another target.
        self._is_one_document = not any(
            isinstance(part.get(key), str) for part in parts if part is not root for key in ("$id", "id")
        )
        self._requirings: dict[tuple[str, str], str] = {}
        """A definition's name for each reference with a property that it is to require."""
        self._added: dict[str, Schema] = {}
        self._targets = {id(self._target(ref)) for ref in self._refs}
        self._negation = Negation(self._target)
        self._work = 0
        self._num_arrays = 0

    def result(self) -> Schema:
        schema = self._schema(self._root)
        added: dict[str, Schema] = {}
        while len(added) < len(self._added):  # Each may add more.
            for name, one in list(self._added.items())[len(added) :]:
                added[name] = self._schema(one)
        if added and isinstance(schema, dict):
            schema["$defs"] = {**schema.get("$defs", {}), **added}
        return schema

    def _schema(self, given: Schema) -> Schema:
        if not isinstance(given, dict):
            return given
        schema = self._with_discriminator(given) if self._may_require else given
        schema = {key: value for key, value in schema.items() if key in KEYWORDS or key in self._pinned}
        if _is_any(schema.get("not")) and "not" not in self._pinned:
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
        self._say_contains(schema)
        self._say_unique(schema)
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
        if id(value) in self._targets:
            return self._schema(value)
        if isinstance(value, dict):
            return {key: self._elsewhere(one) for key, one in value.items()}
        return [self._elsewhere(one) for one in value] if isinstance(value, list) else value

    def _drop_what_says_nothing(self, schema: dict[str, Any]) -> None:
        if schema.get("uniqueItems") is False:
            del schema["uniqueItems"]
        for key in ("unevaluatedItems", "unevaluatedProperties"):
            if _is_any(schema.get(key)) and key not in self._pinned:
                del schema[key]

    def _say_look_ahead(self, schema: dict[str, Any]) -> None:
        """Say what a pattern looks ahead to at the beginning of a text with patterns beside it."""
        rest, also = schema.get("pattern"), []
        while isinstance(rest, str) and (found := _LOOKS_AHEAD.match(rest)):
            size = _size_of_group(rest[1:])
            inner = rest[found.end() : size]
            said = (
                {"pattern": f"^(?:{inner})"} if found[1] == "=" else self._negation.of({"pattern": f"^{inner}"}, _TEXTS)
            )
            if not size or said is None or rest[size + 1 : size + 2] in _REPEATS:
                return
            also.append(said)
            rest = f"^{rest[size + 1 :]}"
        if also:
            schema["pattern"] = rest
            _also(schema, all_of(also))

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
            _also(schema, said)
        else:
            schema.update(said)

    def _say_names(self, schema: dict[str, Any]) -> None:
        """Say ``propertyNames`` with properties or a pattern."""
        if "propertyNames" not in schema or self._pinned & {"additionalProperties", "propertyNames"}:
            return
        said = self._resolved(schema["propertyNames"])
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
            around = self._values({key: value for key, value in schema.items() if key != "oneOf"}, _MOST_HOPS)
            found = [self._values(branch, _MOST_HOPS).both(around) for branch in branches]
        except _TooMuchError:
            return
        if len(found) * sum(len(one.required) for one in found) > _MOST_COMPARED:
            return
        if not all(one.excludes(other) for place, one in enumerate(found) for other in found[:place]):
            branches = self._one_alone(branches, found, around)
        if branches:
            del schema["oneOf"]
            _also_any_of(schema, branches)

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
            _also(schema, said)

    def _say_condition(self, schema: dict[str, Any]) -> None:
        """Say ``if`` with its two cases."""
        words = ("if", "then", "else")
        if self._pinned.intersection(words) or not all(
            isinstance(schema.get(word, True), dict | bool) for word in words
        ):
            return
        then, otherwise = schema.get("then", True), schema.get("else", True)
        if "if" in schema and not _is_any(then):
            condition = schema["if"]
            other = self._negated(condition, schema, *words)
            if other is None:
                return
            # What follows in one case alone needs no second.
            cases = [other, then] if _is_any(otherwise) else [all_of([condition, then]), all_of([other, otherwise])]
        else:
            cases = [schema.get("if", True), otherwise]
        for word in words:
            schema.pop(word, None)
        _also_any_of(schema, cases)

    def _negated(self, given: Schema, schema: dict[str, Any], *words: str) -> Schema | None:
        """Return what holds where ``given`` does not, beside the rest of ``schema``; None if it cannot be said."""
        try:
            around = self._values({key: value for key, value in schema.items() if key not in words}, _MOST_HOPS)
        except _TooMuchError:
            return None
        return self._negation.of(given, around)

    def _say_contains(self, schema: dict[str, Any]) -> None:
        """Say that one of few items is of a schema, or none is."""
        words = ("contains", "minContains", "maxContains")
        if self._pinned.intersection(words):
            return
        least, most, size = schema.get("minContains", 1), schema.get("maxContains"), schema.get("maxItems")
        said: Schema = True
        if "contains" in schema and (least, most) == (1, None) and isinstance(size, int) and 0 <= size <= _MOST_CHOICES:
            sizes = range(size)
            places = [{"prefixItems": [True] * place + [schema["contains"]], "minItems": place + 1} for place in sizes]
            said = any_of([*places, {"type": sorted(ALL_TYPES - {"array", "integer"})}])
        elif "contains" in schema and (least, most) != (0, None):
            return
        for word in words:
            schema.pop(word, None)
        _also(schema, said)

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
                _also_any_of(schema, [{"properties": {name: False}}, needed])

    def _say_unique(self, schema: dict[str, Any]) -> None:
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
        items = self._resolved(schema.get("items"))
        if "items" in self._pinned or not isinstance(items, dict) or items.keys() - _LISTING - SAYS_NOTHING_OF_VALUES:
            return
        known = own_values(items)
        listed = [(kind, value) for kind, value in known.literals or () if type_of(value) in known.types]
        arrangements: Callable[[list[Any], int], Iterable[tuple[Any, ...]]] = permutations
        if (num_arrays := _num_arrays(len(listed), most, math.perm)) > _MOST_ARRAYS:
            arrangements, num_arrays = combinations, _num_arrays(len(listed), most, math.comb)
        self._num_arrays += num_arrays
        if known.literals is None or num_arrays > _MOST_ARRAYS or self._num_arrays > _MOST_ARRAYS_IN_ALL:
            return
        values = [value for _, value in sorted(listed, key=lambda one: (one[0], str(one[1])))]
        sizes = range(max(least, 0), min(len(values), len(values) if most is None else most) + 1)
        for key in ("uniqueItems", "type", "items", "minItems", "maxItems"):  # Beside the list they cost tenfold.
            schema.pop(key, None)
        schema["enum"] = [list(some) for size in sizes for some in arrangements(values, size)]

    def _with_discriminator(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Require the property that tells the branches apart, which Pydantic leaves out if it has a default."""
        told = schema.get("discriminator")
        name = told.get("propertyName") if isinstance(told, dict) else None
        branches = schema.get("oneOf")
        if not isinstance(name, str) or not isinstance(branches, list) or "oneOf" in self._pinned:
            return schema
        required = [self._requiring(branch, name) for branch in branches]
        if None in required:
            return schema
        self.requires_more |= required != branches
        return {**schema, "oneOf": required}

    def _requiring(self, branch: Schema, name: str) -> Schema | None:
        """Return the branch with a required property; None if it has none of that name."""
        body = self._resolved(branch)
        if body is branch and isinstance(body, dict) and isinstance(inner := body.get("oneOf"), list):
            parts = [self._requiring(one, name) for one in inner]
            return None if None in parts else {**body, "oneOf": parts}
        if not isinstance(body, dict) or not isinstance(own := body.get("properties"), dict) or name not in own:
            return None
        before = body.get("required", [])
        if not isinstance(before, list) or not isinstance(others := self._root.get("$defs", {}), dict):
            return None
        if name in before:
            return branch
        required = {**body, "required": [*before, name]}
        if body is branch:
            return required
        for key in ("$defs", "definitions", "$schema", "$id", "id", "$anchor"):
            required.pop(key, None)
        added = self._requirings.get((branch["$ref"], name))
        if added is None:
            numbered = (f"required-{number}" for number in count(len(self._added)))
            added = next(one for one in numbered if one not in others)
            self._requirings[branch["$ref"], name] = added
            self._added[added] = required
        return {"$ref": _ADDED + added}

    def _resolved(self, schema: Schema) -> Schema:
        """Follow references without anything beside them."""
        for _ in range(_MOST_HOPS):
            if (
                not isinstance(schema, dict)
                or "$ref" not in schema
                or schema.keys() - SAYS_NOTHING_OF_VALUES - {"$ref"}
            ):
                return schema
            schema = self._target(schema["$ref"])
        return None

    def _target(self, ref: object) -> Schema:
        if not isinstance(ref, str) or not self._is_one_document or not (ref == "#" or ref.startswith("#/")):
            return None
        if (added := ref.removeprefix(_ADDED)) in self._added:
            return self._added[added]
        found: Any = self._root
        for step in map(_unescaped, ref.split("/")[1:]):
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list):
                found = found[int(step)] if step.isdecimal() and int(step) < len(found) else None
        return found

    def _values(self, schema: Schema, hops: int, *, is_property: bool = False) -> Values:
        """Return what is known of a schema's values; of properties of properties nothing."""
        self._work += 1
        if self._work > _MOST_WORK:
            raise _TooMuchError
        if not isinstance(schema, dict) or not hops:
            return NOTHING if schema is False else ANYTHING
        found = own_values(schema)
        if "$ref" in schema:
            found = found.both(self._values(self._target(schema["$ref"]), hops - 1, is_property=is_property))
        for key in ("allOf", "anyOf", "oneOf"):
            if isinstance(branches := schema.get(key), list) and branches:
                several = [self._values(branch, hops - 1, is_property=is_property) for branch in branches]
                joined = several[0]
                for one in several[1:]:
                    joined = joined.both(one) if key == "allOf" else joined.either(one)
                found = found.both(joined)
        own = schema.get("properties", {})
        if is_property or not isinstance(own, dict):
            return found
        return found.both(
            Values(
                required=texts_of(schema.get("required")),
                properties={name: self._values(one, hops - 1, is_property=True) for name, one in own.items()},
                names=frozenset(own)
                if schema.get("additionalProperties") is False and "patternProperties" not in schema
                else None,
            )
        )


def _unescaped(step: str) -> str:
    return unquote(step).replace("~1", "/").replace("~0", "~")


def _say_pattern(schema: dict[str, Any]) -> None:
    known = schema.get("pattern")
    said = PATTERNS.get(known) if isinstance(known, str) else None
    if said is None:
        return
    del schema["pattern"]
    if said.keys() & schema.keys():
        _also(schema, said)
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


def _is_any(schema: Schema) -> bool:
    return schema is True or schema == {}


def _num_arrays(num_items: int, most: int | None, count_of: Callable[[int, int], int]) -> int:
    """Return how many arrays of different items there are, as far as that matters."""
    sizes = range(min(num_items, num_items if most is None else most, _MOST_ARRAYS) + 1)
    return sum(count_of(num_items, size) for size in sizes)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _also(schema: dict[str, Any], more: Schema) -> None:
    """Add a schema that holds, too; what stands in the place of a list is left for the library to refuse."""
    before = schema.get("allOf", [])
    if isinstance(before, list) and not _is_any(more):
        schema["allOf"] = [*before, more]


def _also_any_of(schema: dict[str, Any], several: list[Schema]) -> None:
    """Add that one of the schemas holds."""
    said = any_of(several)
    if "anyOf" not in schema and isinstance(said, dict) and said.keys() == {"anyOf"}:
        schema.update(said)
    else:
        _also(schema, said)


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
