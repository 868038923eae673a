"""Constraints: which tokens may continue an output.

Owns: the library llguidance, the dialects, cost limits. Must not know: requests, rows, which numbers the library rounds
(``schema_numbers``).

Gateway and executor both compile here, so both accept the same. Limits count work, not time, so every machine decides
alike; the automaton of ``multipleOf``, which the library does not count, is counted here. JSON has at most one space
between tokens, or a model could emit white space forever.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray

from headway_proto.sampling import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX, Constraint
from headway_proto.schema_forms import rewritten
from headway_proto.schema_numbers import number_problem
from headway_proto.wording import shown

MAX_CHOICES = 1024
_MAX_REASON_CHARACTERS = 200
_WORD_BITS = 32
_ALL_BITS = (1 << _WORD_BITS) - 1
_MAX_EARLEY_ITEMS = 50_000
_MAX_LEXER_STATES = 20_000
_MAX_GRAMMAR_SYMBOLS = 100_000
_FUEL_TO_BUILD = 1_000_000
_FUEL_PER_MASK = 200_000
_MOST_COMMON_MULTIPLE = 10_000

_JSON_DEFAULTS: Any = {"whitespace_flexible": True, "whitespace_pattern": " ?"}
_JSON_OVERRIDES: Any = {"lenient": False}
"""An unknown keyword is always an error."""

_SCHEMA_WITHIN = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*|(%json\s*)')
"""Behind what a literal or a comment may hold, the first group begins a schema."""
_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_EXCERPT = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_MAY_OVERLAP = (
    "oneOf: one value may be of several of its schemas; allowed: anyOf, or schemas that differ in type or in the const "
    "or enum of a required property"
)
_ALLOWED = {
    'Unimplemented keys: ["uniqueItems"]': "; allowed: an enum of few items, maxItems 1, or an array that may repeat some",
    "Unimplemented keys": "; allowed: a schema without them",
    "Unknown format": "; allowed: a pattern, another format, or none",
}
_DEAD_END = "NoExtension"
"""The library's error begins with this if no token is left."""

Mask = NDArray[np.int32]


class ConstraintError(ValueError):
    """A constraint cannot be compiled, or an output violates it; one line."""


class TokenizerUnusableError(ValueError):
    """The library cannot use this tokenizer; one line."""


def num_mask_words(vocab_size: int) -> int:
    """Return the int32 words for one bit per token."""
    return -(-vocab_size // _WORD_BITS)


class Matcher:
    """An output's position in its grammar. Not thread-safe; releases the interpreter lock."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by ``token_ids``.

        Raises:
            ConstraintError: they violate the grammar, or it became too complex; do not use the matcher again.
        """
        matcher = self._matcher
        if matcher.is_stopped() and not matcher.is_error():
            return  # The output ended; later tokens come from a step in flight.
        if not (
            matcher.consume_token(token_ids[0]) if len(token_ids) == 1 else matcher.consume_tokens(list(token_ids))
        ):
            raise ConstraintError(f"the output does not follow its constraint: {_reason(matcher.get_error())}")

    def fill_mask(self, words: Mask) -> int:
        """Set the bits of exactly the tokens that may come next; return the token if there is only one, else -1.

        ``words``: int32, contiguous, ``num_mask_words(vocab_size)``; bit ``i % 32`` of word ``i // 32`` is token i.

        Raises:
            ConstraintError: no token may come next, or the search costs too much.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        error = self._matcher.get_error()
        filled = words.nonzero()[0]
        if _DEAD_END in error or not len(filled):
            raise ConstraintError("no token of the model continues the constrained output")
        if error:
            raise ConstraintError(f"the constraint cannot be followed further: {_reason(error)}")
        if len(filled) > 1:
            return -1
        word = int(words[filled[0]]) & _ALL_BITS
        return int(filled[0]) * _WORD_BITS + word.bit_length() - 1 if word.bit_count() == 1 else -1


class Grammar:
    """A compiled constraint, for any number of outputs."""

    def __init__(self, beginning: LLMatcher) -> None:
        self._beginning = beginning

    def matcher(self) -> Matcher:
        """Start an output."""
        return Matcher(self._beginning.deep_copy())


class GrammarCompiler:
    """Compiles constraints for one tokenizer."""

    def __init__(self, tokenizer: str, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """``tokenizer``: the text of tokenizer.json; ``vocab_size``: width of the logits.

        Raises:
            TokenizerUnusableError: the library cannot use it, or no token ends an output.
        """
        if not eos_token_ids:
            raise TokenizerUnusableError("the model has no token that ends an output")
        self.vocab_size = vocab_size
        try:
            known = _for_library(tokenizer, vocab_size)
            self._tokenizer = LLTokenizer(known, n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except BaseException as error:  # A defective tokenizer makes the library raise many types.
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise TokenizerUnusableError(_reason(str(error))) from error
        self._limits = LLParserLimits(
            initial_lexer_fuel=_FUEL_TO_BUILD,
            step_lexer_fuel=_FUEL_PER_MASK,
            step_max_items=_MAX_EARLEY_ITEMS,
            max_lexer_states=_MAX_LEXER_STATES,
            max_grammar_size=_MAX_GRAMMAR_SYMBOLS,
            verbose_errors=False,
        )

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint.

        Raises:
            ConstraintError: malformed, unsupported, or too costly.
        """
        grammar = _grammar_of(constraint)
        try:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise ConstraintError("the grammar library fails on it") from error
        if matcher.is_error():
            raise ConstraintError(_reason(matcher.get_error()))
        return Grammar(matcher)

    def new_mask(self) -> Mask:
        """Return an empty mask."""
        return np.zeros(num_mask_words(self.vocab_size), dtype=np.int32)


class _AddedToken(msgspec.Struct):
    id: int


class _TokenizerParts(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    pre_tokenizer: Any = None


def _for_library(tokenizer: str, vocab_size: int) -> str:
    """Drop added tokens that have no logit: the library refuses them, and no output has them.

    Nor does an output begin with the space that some tokenizers put before every text: the library would draw it.
    """
    known = msgspec.json.decode(tokenizer, type=_TokenizerParts)
    has_space = any(step.get("add_prefix_space") for step in _byte_level_steps(known.pre_tokenizer))
    if not has_space and all(token.id < vocab_size for token in known.added_tokens):
        return tokenizer
    fields = msgspec.json.decode(tokenizer)
    fields["added_tokens"] = [token for token in fields.get("added_tokens", ()) if token["id"] < vocab_size]
    for step in _byte_level_steps(fields.get("pre_tokenizer")):
        step["add_prefix_space"] = False
    return msgspec.json.encode(fields).decode()


def _byte_level_steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    """A sequence may hold others."""
    if not isinstance(pre_tokenizer, dict):
        return []
    if pre_tokenizer.get("type") == "ByteLevel":
        return [pre_tokenizer]
    return [step for inner in pre_tokenizer.get("pretokenizers", ()) for step in _byte_level_steps(inner)]


def _grammar_of(constraint: Constraint) -> str:
    if constraint.kind == JSON_SCHEMA:
        schema = _parsed(constraint.text, "a JSON schema", (dict, bool))
        _check_numbers(constraint.text, schema)
        return _json_grammar(schema)
    if constraint.kind == JSON_OBJECT:
        return _json_grammar({"type": "object"})
    if constraint.kind == CHOICE:
        choices = _parsed(constraint.text, "a JSON list", (list,))
        if not 0 < len(choices) <= MAX_CHOICES or not all(isinstance(choice, str) for choice in choices):
            raise ConstraintError(f"{len(choices)} choices are not allowed; allowed: 1 to {MAX_CHOICES} texts")
        # In a fixed order, so that the grammar is the same in every process.
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
        )
    if constraint.kind == REGEX:
        return LLMatcher.grammar_from_regex(constraint.text)
    if constraint.kind == GRAMMAR:
        grammar = _with_known_schemas(constraint.text)
        try:
            return grammar_from("grammar", grammar)
        except (ValueError, RecursionError) as error:
            raise ConstraintError(_reason(str(error))) from error
    raise ConstraintError(f"{shown(constraint.kind)} is not a kind of constraint")


def _json_grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(_in_library_words(schema))


def _in_library_words(schema: Any) -> str:
    """Return the schema as the library reads it, with what is asked of its JSON."""
    try:
        known = rewritten(schema)
        if known is False:
            raise ConstraintError("Unsatisfiable schema: it is false")
        fields = {} if known is True else known
        own = fields.get("x-guidance", {})
        if isinstance(own, dict):  # Else the library says so.
            fields = fields | {"x-guidance": {**_JSON_DEFAULTS, **own, **_JSON_OVERRIDES}}
        return json.dumps(fields, ensure_ascii=False)
    except RecursionError as error:
        raise ConstraintError(_reason(str(error))) from error


def _is_panic(error: BaseException) -> bool:
    """Whether the library panicked, which is no ``Exception``."""
    return type(error).__name__ == "PanicException"


def _with_known_schemas(grammar: str) -> str:
    """Return a grammar with its schemas in the library's words."""
    parts, end = [], 0
    while found := _SCHEMA_WITHIN.search(grammar, end):
        begin, behind = found.end(), found.end()
        parts.append(grammar[end:begin])
        if found[1] is not None:
            with suppress(ValueError, RecursionError):  # The library reports it.
                schema, behind = json.JSONDecoder(parse_constant=_no_number).raw_decode(grammar, begin)
        if behind > begin:
            _check_numbers(grammar[begin:behind], schema)
            parts.append(_in_library_words(schema))
        end = behind
    return "".join((*parts, grammar[end:]))


def _check_numbers(text: str, schema: Any) -> None:
    problem = number_problem(text)
    if problem:
        raise ConstraintError(problem)
    _check_multiples(schema)


def _check_multiples(schema: Any) -> None:
    """Limit the least common multiple of all ``multipleOf``: it is the number of states."""
    found = {Fraction(str(value)) for value in _values_of(schema, "multipleOf") if _is_divisor(value)}
    unit = math.lcm(*(value.denominator for value in found))
    common = math.lcm(*(int(value * unit) for value in found))
    if common > _MOST_COMMON_MULTIPLE:
        raise ConstraintError(
            f"multipleOf: their least common multiple exceeds {_MOST_COMMON_MULTIPLE} of their finest unit; allowed: up to that"
        )


def _is_divisor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _values_of(schema: Any, keyword: str) -> Iterator[Any]:
    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            if keyword in part:
                yield part[keyword]
            rest.extend(part.values())
        elif isinstance(part, list):
            rest.extend(part)


def _parsed(text: str, what: str, kinds: tuple[type, ...]) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"is not {what}: {_reason(str(error) or type(error).__name__)}") from error
    if not isinstance(value, kinds):
        raise ConstraintError(f"holds a {type(value).__name__}; allowed: {what}")
    return value


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _reason(message: str) -> str:
    words = " ".join(_PLACE.sub("", _EXCERPT.sub("", message.replace("<non-verbose/>", ""))).split())
    if "coerce_one_of" in words:
        return _MAY_OVERLAP
    allowed = next((said for begin, said in _ALLOWED.items() if words.startswith(begin)), "")
    return words[:_MAX_REASON_CHARACTERS] + allowed or "no reason was given"
