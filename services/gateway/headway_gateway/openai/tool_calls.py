"""Tool calls in the text of an output, in the forms that published chat templates teach their models.

Owns: which form a template has, and where calls begin and end in a growing text. Must not know: requests, events.

- Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, between text, any number.
- Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, at the end; in newer models each call has a mark, as
  ``[TOOL_CALLS]NAME[ARGS]{...}``, with ``[CALL_ID]ID`` between in some. The marks are special tokens.
- Granite: ``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``, at the end. The mark is a special token.
- Llama 3: ``{"name": ..., "parameters": {...}}`` as the whole output.

What looks like a call and is none stays text.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

HERMES, MISTRAL, GRANITE, LLAMA = "hermes", "mistral", "granite", "llama"
SPECIAL_FORMS = (MISTRAL, GRANITE)
"""Those whose mark is a special token. What is behind it are calls, up to the end."""

_BEGIN = {HERMES: "<tool_call>", MISTRAL: "[TOOL_CALLS]", GRANITE: "<|tool_call|>"}
_HERMES_END = "</tool_call>"
_ARGUMENTS, _CALL_ID = "[ARGS]", "[CALL_ID]"
_LLAMA_CALL = '{"name": function name, "parameters": '
_NO_JSON = ("<function=", "<arg_key>")
"""Some templates have calls in a markup of their own between the same marks."""


class ToolCall(NamedTuple):
    """A call. ``arguments`` is a JSON object."""

    name: str
    arguments: str


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | None = None
    parameters: dict[str, Any] | None = None


def form_of(template: str) -> str:
    """Return the form that a chat template teaches; empty if none is known."""
    form = next((form for form, mark in _BEGIN.items() if mark in template), "")
    if form == HERMES and any(mark in template for mark in _NO_JSON):
        return ""
    return form or (LLAMA if _LLAMA_CALL in template and "tools" in template else "")


class ToolText:
    """One output's text, on its way to the client."""

    def __init__(self, form: str, special_texts: Iterable[str] = ()) -> None:
        """``special_texts`` are those of end tokens, which are part of the text where special tokens are kept."""
        self._begin = _BEGIN.get(form, "")
        self._form = form
        self._special_texts = tuple(text for text in special_texts if text)
        self._held = ""
        self._is_in_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Return what is certain now: text, and whole calls."""
        self._held += text
        return list(self._take())

    def finish(self) -> list[str | ToolCall]:
        """Return the rest."""
        held, self._held = self._held, ""
        if self._form != HERMES:
            for special in self._special_texts:
                held = held.removesuffix(special)
        if self._form == LLAMA or (self._form in SPECIAL_FORMS and self._is_in_call):
            calls = _calls(held.removeprefix(self._begin)) or _calls_by_name(held)
            if calls:
                self.num_calls += len(calls)
                return [*calls]
        return [*self._text(held)]

    def _take(self) -> Iterator[str | ToolCall]:
        if self._form == LLAMA:
            # Only an output that begins with a brace may be a call.
            if self._held.strip() and not self._held.lstrip().startswith("{"):
                text, self._held = self._held, ""
                yield text
            return
        while self._is_in_call or self._begin in self._held:
            if not self._is_in_call:
                before, _, behind = self._held.partition(self._begin)
                self._held, self._is_in_call = self._begin + behind, True
                yield from self._text(before.rstrip())
            if self._form in SPECIAL_FORMS or _HERMES_END not in self._held:
                return
            inside, mark, self._held = self._held.partition(_HERMES_END)
            self._is_in_call = False
            calls = _calls(inside.removeprefix(self._begin))
            self.num_calls += len(calls)
            yield from calls
            if not calls:
                yield inside + mark
        # White space before a call belongs to it.
        certain = self._held[: len(self._held) - self._num_uncertain()].rstrip()
        self._held = self._held[len(certain) :]
        yield from self._text(certain)

    def _text(self, text: str) -> Iterator[str]:
        if text and not (self.num_calls and not text.strip()):
            yield text

    def _num_uncertain(self) -> int:
        """The characters at the end that may begin a mark or an end token."""
        marks = (self._begin, *self._special_texts)
        longest = max(map(len, marks))
        for size in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-size:]
            if any(mark.startswith(tail) for mark in marks):
                return size
        return 0


def _calls(text: str) -> list[ToolCall]:
    """Return the calls in JSON: one, an array, or several behind semicolons; none if it is anything else."""
    try:
        found = msgspec.json.decode(text, type=_Call | list[_Call])
        return [_call(one) for one in (found if isinstance(found, list) else [found])]
    except (ValueError, RecursionError):
        pass
    parts = text.split(";")
    if len(parts) == 1:
        return []
    calls = [_calls(part) if ";" not in part else [] for part in parts]
    return [one for some in calls for one in some] if all(calls) else []


def _calls_by_name(text: str) -> list[ToolCall]:
    """Return Mistral's newer calls; none if one cannot be read."""
    calls = []
    for part in text.split(_BEGIN[MISTRAL])[1:]:
        named, _, arguments = part.partition(_ARGUMENTS)
        name = named.partition(_CALL_ID)[0].strip()
        call = call_of(name, arguments) if name else None
        if call is None:
            return []
        calls.append(call)
    return calls


def call_of(name: str, arguments: str) -> ToolCall | None:
    """Return a call with its arguments as the model wrote them; None if they are no JSON object."""
    try:
        read = msgspec.json.decode(arguments, type=dict[str, Any])
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, msgspec.json.encode(read).decode())


def _call(found: _Call) -> ToolCall:
    arguments = found.arguments if found.arguments is not None else found.parameters
    return ToolCall(found.name, msgspec.json.encode(arguments or {}).decode())
