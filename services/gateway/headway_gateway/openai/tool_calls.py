"""Tool calls in the text of an output, in the forms that published chat templates teach their models.

Owns: which form a template has, and where calls begin and end in a growing text. Must not know: requests, events.

What looks like a call and is none stays text. White space before a call belongs to it. A mark within an argument, as of a tool
that writes files about tools, is a part of it.
"""

# ruff: noqa: RUF001 (marks of DeepSeek have full-width lines)

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import msgspec

from headway_gateway.openai import markup_values
from headway_gateway.openai.marks import num_uncertain
from headway_gateway.openai.markup_values import Markup, is_in_value, values_of

Schemas: TypeAlias = Mapping[str, Any]
"""The JSON schemas of the tools' parameters, by the tools' names."""


class ToolCall(NamedTuple):
    """A call. ``arguments`` is a JSON object."""

    name: str
    arguments: str


class CallForm(NamedTuple):
    """Calls stand between ``begin`` and ``end``; without an ``end`` up to the end; without either they are the whole output."""

    begin: str
    end: str
    read: Callable[[str, Schemas], list[ToolCall]]
    """Returns the calls in what stands between; none if one cannot be read."""
    signs: tuple[str, ...]
    """A template that has them all teaches this form, if no form before it is taught."""
    last: str = ""
    """What a call without ``end`` ends with, or else it was cut short. In JSON this shows by itself."""
    markup: Markup | None = None
    """How calls and their arguments are marked, if they are markup."""

    def arguments(self) -> "Arguments":
        """Return what reads one call's arguments."""
        return Arguments('"', _is_in_json_text) if self.markup is None else _arguments_in(self.markup)


class Arguments:
    """Tells whether the text of a call, as far as it goes, ends within an argument. It reads each part once: a text may be long
    and have many marks.
    """

    def __init__(self, opening: str, is_open: Callable[[str], bool]) -> None:
        """``is_open``: whether a text ends within an argument, which one that begins with ``opening`` does."""
        self._opening = opening
        self._is_open = is_open
        self._ends_inside = False

    def end_inside(self, part: str) -> bool:
        """Return whether the text so far, with ``part`` at its end, ends within an argument."""
        self._ends_inside = self._is_open(self._opening * self._ends_inside + part)
        return self._ends_inside


class _Call(msgspec.Struct):
    name: str = ""
    tool_name: str = ""
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


def call_of(name: str, arguments: str) -> ToolCall | None:
    """Return a call with its arguments as the model wrote them; None if they are no JSON object, or there is no name."""
    try:
        read = msgspec.json.decode(arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, msgspec.json.encode(read).decode()) if name else None


def _from_json(text: str, schemas: Schemas) -> list[ToolCall]:
    """One call, an array, or several behind semicolons."""
    try:
        found = msgspec.json.decode(text, type=_Call | list[_Call])
    except (ValueError, RecursionError):
        parts = _split_json(text, ";")
        several = [_from_json(part, schemas) for part in parts] if len(parts) > 1 else []
        return [call for some in several for call in some] if all(several) else []
    calls = [_call(one) for one in (found if isinstance(found, list) else [found])]
    return calls if all(call.name for call in calls) else []


def _call(found: _Call) -> ToolCall:
    arguments = found.arguments if found.arguments is not None else found.parameters
    return ToolCall(found.name or found.tool_name, msgspec.json.encode(arguments or {}).decode())


def _of_mistral(text: str, schemas: Schemas) -> list[ToolCall]:
    """An array; or in newer models names, each behind a mark, perhaps with an id."""
    calls = [
        call_of(named.partition(MISTRAL_CALL_ID)[0].strip(), arguments)
        for named, _, arguments in (part.partition(MISTRAL_ARGUMENTS) for part in _split_json(text, _MISTRAL_BEGIN))
    ]
    return _from_json(text, schemas) or _all_or_none(calls)


def _of_deepseek(text: str, schemas: Schemas) -> list[ToolCall]:  # noqa: ARG001
    """V3.1 has the name before the separator. V3 and R1 have ``function`` there, and the arguments as a block of code."""
    calls = []
    for part in _split_json(text, DEEPSEEK_CALL)[1:]:
        named = _split_json(part, DEEPSEEK_CALL_END)[0]
        name, _, arguments = named.partition(DEEPSEEK_SEPARATOR)
        if name.strip() == "function" and not arguments.lstrip().startswith("{"):
            name, _, arguments = arguments.partition("\n")
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
        calls.append(call_of(name.strip(), arguments))
    return _all_or_none(calls)


def _of_markup(text: str, schemas: Schemas, markup: Markup) -> list[ToolCall]:
    calls = []
    for part in _split(text, markup.call, _arguments_in(markup))[1:]:
        name, mark, parameters = (part.rpartition(markup.end)[0] or part).partition(markup.name_end)
        calls.append(_marked_up(name.strip(), parameters, schemas, markup) if mark else None)
    return _all_or_none(calls)


def _of_unmarked_name(text: str, schemas: Schemas, markup: Markup) -> list[ToolCall]:
    """One call."""
    name, mark, behind = text.partition(markup.key)
    is_name = _UNMARKED_NAME.fullmatch(name.strip()) is not None
    return _all_or_none([_marked_up(name.strip(), mark + behind, schemas, markup) if is_name else None])


def _marked_up(name: str, parameters: str, schemas: Schemas, markup: Markup) -> ToolCall | None:
    return call_of(name, msgspec.json.encode(values_of(markup, parameters, schemas.get(name))).decode())


def _of_gemma(text: str, schemas: Schemas, markup: Markup) -> list[ToolCall]:  # noqa: ARG001
    """Nearly JSON: names have no quotes, and texts stand between marks."""
    found = _GEMMA_CALL.fullmatch(text)
    if found is None:
        return []
    parts = found[2].split(markup.text_begin)
    for place, part in enumerate(parts):
        parts[place] = msgspec.json.encode(part).decode() if place % 2 else _GEMMA_NAME.sub(r'\1"\2":', part)
    return _all_or_none([call_of(found[1], "".join(parts))])


def _split(text: str, mark: str, arguments: Arguments) -> list[str]:
    """Split at the marks that are not within an argument."""
    parts, begin, num_read = [], 0, 0
    for found in re.finditer(re.escape(mark), text):
        if not arguments.end_inside(text[num_read : found.start()]):
            parts.append(text[begin : found.start()])
            begin = found.end()
        num_read = found.end()
    return [*parts, text[begin:]]


def _arguments_in(markup: Markup) -> Arguments:
    return Arguments(markup.text_begin or markup.value or markup.key, partial(is_in_value, markup))


def _split_json(text: str, mark: str) -> list[str]:
    """Split at the marks that are not within a text of JSON: in one pass, since a text may be long and have many."""
    parts, begin = [], 0
    for found in re.finditer(rf"{_JSON_TEXT.pattern}|{re.escape(mark)}", text, re.DOTALL):
        if found[1] == "":
            break
        if found[1] is None:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]


def _is_in_json_text(text: str) -> bool:
    return any(not found[1] for found in _JSON_TEXT.finditer(text))


def _all_or_none(calls: list[ToolCall | None]) -> list[ToolCall]:
    read = [call for call in calls if call is not None]
    return read if len(read) == len(calls) else []


def _in_markup(begin: str, end: str, markup: Markup, signs: tuple[str, ...]) -> CallForm:
    read = partial(_of_markup if markup.call else _of_unmarked_name, markup=markup)
    return CallForm(begin, end, read, signs, markup.end or markup.value_end, markup)


_MISTRAL_BEGIN = "[TOOL_CALLS]"
MISTRAL_CALL_ID, MISTRAL_ARGUMENTS = "[CALL_ID]", "[ARGS]"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_GEMMA_CALL = re.compile(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", re.DOTALL)
_GEMMA_NAME = re.compile(r"""([{,]\s*)([^\s"{}\[\],:]+)\s*:""")
_JSON_TEXT = re.compile(r'"(?:[^"\\]|\\.)*+("?)', re.DOTALL)
"""A text, whose last quote is missing if it is cut short."""
_UNMARKED_NAME = re.compile(r"[^\s<>{}]+")
_DEEPSEEK_BEGIN, _DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

DEEPSEEK = CallForm(_DEEPSEEK_BEGIN, _DEEPSEEK_END, _of_deepseek, (_DEEPSEEK_BEGIN,))
COHERE = CallForm("<|START_ACTION|>", "<|END_ACTION|>", _from_json, ("<|START_ACTION|>",))
FUNCTION_GEMMA = CallForm(
    "<start_function_call>",
    "<end_function_call>",
    partial(_of_gemma, markup=markup_values.FUNCTION_GEMMA),
    ("<start_function_call>",),
    markup=markup_values.FUNCTION_GEMMA,
)
GEMMA_4 = CallForm(
    "<|tool_call>",
    "<tool_call|>",
    partial(_of_gemma, markup=markup_values.GEMMA_4),
    ("<|tool_call>",),
    markup=markup_values.GEMMA_4,
)
MISTRAL = CallForm(_MISTRAL_BEGIN, "", _of_mistral, (_MISTRAL_BEGIN,))
PHI = CallForm("<|tool_call|>", "<|/tool_call|>", _from_json, ("<|/tool|>",))
GRANITE = CallForm("<|tool_call|>", "", _from_json, ("<|tool_call|>",))
QWEN_CODER = _in_markup("<tool_call>", "</tool_call>", markup_values.CODER, ("<tool_call>", "<function="))
SEED = _in_markup("<seed:tool_call>", "</seed:tool_call>", markup_values.SEED, ("<seed:tool_call>",))
MINIMAX = _in_markup("<minimax:tool_call>", "</minimax:tool_call>", markup_values.MINIMAX, ("<minimax:tool_call>",))
GLM = _in_markup("<tool_call>", "</tool_call>", markup_values.GLM, ("<tool_call>", "<arg_key>"))
HERMES = CallForm("<tool_call>", "</tool_call>", _from_json, ("<tool_call>",))
LLAMA = CallForm("", "", _from_json, ('{"name": function name, "parameters": ', "tools"))
_FORMS = (
    DEEPSEEK,
    COHERE,
    FUNCTION_GEMMA,
    GEMMA_4,
    MISTRAL,
    PHI,
    GRANITE,
    SEED,
    MINIMAX,
    GLM,
    QWEN_CODER,
    HERMES,
    LLAMA,
)

FORCED = CallForm("", "", _from_json, ())
"""Calls under a constraint, an array."""


def form_of(template: str) -> CallForm | None:
    """Return the form that a chat template teaches; None if none is known."""
    return next((form for form in _FORMS if all(sign in template for sign in form.signs)), None)


class ToolText:
    """One output's text, on its way to the client."""

    def __init__(self, form: CallForm, schemas: Schemas | None = None) -> None:
        """``schemas`` give values of markup their types."""
        self._begin, self._end = form.begin, form.end
        self._form = form
        self._schemas = schemas or {}
        self._held = ""
        self._is_in_call = not form.begin
        self._is_over = False
        self._begin_call()
        self.num_calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Return what is certain now: text, and whole calls."""
        self._held += text
        return list(self._take())

    def finish(self) -> list[str | ToolCall]:
        """Return the rest. Calls may lack their end."""
        # An argument that is not closed has swallowed what ends there are.
        self._is_over = True
        self._begin_call()
        found = list(self._take())
        held, self._held = self._held, ""
        is_whole = self._is_in_call and held.rstrip().endswith(self._form.last)
        return [*found, *(self._called(held, "") if is_whole else self._text(self._begin * self._is_in_call + held))]

    def _take(self) -> Iterator[str | ToolCall]:
        while True:
            if not self._is_in_call:
                if not self._begin or self._begin not in self._held:
                    break
                before, _, self._held = self._held.partition(self._begin)
                self._is_in_call = True
                self._begin_call()
                yield from self._text(before.rstrip())
            if not self._end:
                if self._form is not LLAMA or self._held.lstrip()[:1] in {"", "{"}:
                    return
                # Only an output that begins with a brace may be a call: none follows this text.
                self._is_in_call = False
                break
            end = self._find_end()
            if end < 0:
                return
            yield from self._end_call(end)
        certain = self._held[: len(self._held) - num_uncertain(self._held, (self._begin,))].rstrip()
        self._held = self._held[len(certain) :]
        yield from self._text(certain)

    def _begin_call(self) -> None:
        self._arguments = self._form.arguments()
        self._num_read = self._num_searched = 0

    def _find_end(self) -> int:
        while (end := self._held.find(self._end, self._num_searched)) >= 0:
            if self._is_over or not self._arguments.end_inside(self._held[self._num_read : end]):
                return end
            self._num_read, self._num_searched = end, end + 1
        self._num_searched = max(self._num_searched, len(self._held) - len(self._end) + 1)
        return end

    def _end_call(self, end: int) -> Iterator[str | ToolCall]:
        inside, self._held = self._held[:end], self._held[end + len(self._end) :]
        self._is_in_call = False
        yield from self._called(inside, self._end)

    def _called(self, inside: str, mark: str) -> Iterator[str | ToolCall]:
        calls = self._form.read(inside, self._schemas)
        self.num_calls += len(calls)
        yield from calls or self._text(self._begin + inside + mark)

    def _text(self, text: str) -> Iterator[str]:
        if text and not (self.num_calls and not text.strip()):
            yield text
