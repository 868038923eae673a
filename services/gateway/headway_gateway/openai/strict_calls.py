"""Calls that follow their tools' schemas, in the forms that templates teach, as rules of a grammar.

Owns: what a call of a form consists of. Must not know: what stands around a call, how calls are read.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from headway_gateway.openai import tool_calls
from headway_gateway.openai.bodies import Function
from headway_gateway.openai.gemma_grammar import GemmaRules
from headway_gateway.openai.grammar_marks import Marks
from headway_gateway.openai.harmony import CHANNEL, CONSTRAIN, MESSAGE
from headway_gateway.openai.markup_grammar import BREAK, Allowance, MarkupRules, UnsayableError
from headway_gateway.openai.tool_calls import CallForm
from headway_gateway.openai.tool_schemas import (
    FORCED_KEYS,
    CallKeys,
    schema_of_arguments,
    schema_of_call,
    schema_of_calls,
)
from headway_gateway.text.grammar_literals import pattern, text
from headway_proto.wording import shown

Tools: TypeAlias = Sequence[Function]

_SPACE = r"[ \n]{0,8}"
_AROUND_JSON = f"/{_SPACE}/"
_KEYS = CallKeys("name", "arguments", last_id="id")
_KEYS_OF_COHERE = CallKeys("tool_name", "parameters", first_id="tool_call_id")
_AS_TEMPLATES_WRITE = {"x-guidance": {"whitespace_pattern": _SPACE}}
"""Some write calls on several lines."""


def channelled_calls(tools: Tools, marks: Marks) -> list[str]:
    """Return rules of ``call`` in the channels of gpt-oss (see ``harmony``)."""
    channel, message, form = map(marks.said, (CHANNEL, MESSAGE, CONSTRAIN))
    rules = [f"call: {_any_of(tools)}", f'json: (/ ?/ {form} "json" | " json")? {message}']
    for place, tool in enumerate(tools):
        recipient = text(f" to=functions.{tool.name}")
        rules.append(
            f'call{place}: ({channel} "commentary" {recipient} | {recipient} {channel} "commentary") json arguments{place}'
        )
    return rules + _arguments(tools)


def has_rules(form: CallForm, marks: Marks) -> bool:
    """Return whether a form has rules. Its first mark must be a token: a text could not be kept from holding another."""
    return form in _RULES and (not form.begin or marks.token_id(form.begin) is not None)


def problem_of_tools(form: CallForm, tools: Tools, marks: Marks) -> str:
    """Return why a form has no rules for calls of these tools; empty if it has."""
    if form.markup is not None:
        allowance = Allowance()
        for tool in tools:
            try:
                _rules_of_arguments(form, tool, marks, "any", allowance)
            except UnsayableError as error:
                return f"{shown(tool.name)}: {error}, or the tool without strict"
    return ""


def rules_of_calls(form: CallForm, tools: Tools, marks: Marks, most: int | None = None) -> list[str]:
    """Return rules, of which ``call`` is one call or more with the marks around; ``most`` bounds how many.

    The form must have rules, for these tools too.
    """
    return _RULES[form](form, tools, marks, most)


def _marked_json(form: CallForm, tools: Tools, marks: Marks, most: int | None) -> list[str]:  # noqa: ARG001 (it is one)
    return [f"call: {marks.said(form.begin)} {_AROUND_JSON} {_json(schema_of_call(tools, _KEYS))} {_end(form, marks)}"]


def _marked_array(form: CallForm, tools: Tools, marks: Marks, most: int | None, keys: CallKeys = _KEYS) -> list[str]:
    return [f"call: {marks.said(form.begin)} {_array(tools, keys, most)} {_end(form, marks)}"]


def _of_mistral(form: CallForm, tools: Tools, marks: Marks, most: int | None) -> list[str]:
    """An array; or in newer models names, each behind a mark, perhaps with an id."""
    begin = marks.said(form.begin)
    to_arguments = (
        f"({marks.said(tool_calls.MISTRAL_CALL_ID)} /[a-zA-Z0-9]{{1,40}}/)? {marks.said(tool_calls.MISTRAL_ARGUMENTS)}"
    )
    named = [
        f"call{place}: {begin} {text(tool.name)} {to_arguments} arguments{place}" for place, tool in enumerate(tools)
    ]
    named_calls = f"({_any_of(tools)}){'' if most == 1 else '+'}"
    return [f"call: {begin} {_array(tools, _KEYS, most)} | {named_calls}", *named, *_arguments(tools)]


def _of_deepseek(form: CallForm, tools: Tools, marks: Marks, most: int | None) -> list[str]:
    """V3.1 has the name before the separator, V3 and R1 behind it."""
    begin, end = marks.said(tool_calls.DEEPSEEK_CALL), marks.said(tool_calls.DEEPSEEK_CALL_END)
    separator = marks.said(tool_calls.DEEPSEEK_SEPARATOR)
    named = [
        f"call{place}: {text(tool.name)} {separator} arguments{place}"
        f' | "function" {separator} {text(tool.name)} "\\n```json\\n" arguments{place} "\\n```"'
        for place, tool in enumerate(tools)
    ]
    calls = f"({begin} ({_any_of(tools)}) {end} {_AROUND_JSON}){'' if most == 1 else '+'}"
    return [f"call: {marks.said(form.begin)} {calls} {marks.said(form.end)}", *named, *_arguments(tools)]


def _in_markup(form: CallForm, tools: Tools, marks: Marks, most: int | None) -> list[str]:
    assert form.markup is not None
    name, name_end, end = map(marks.said, (form.markup.call, form.markup.name_end, form.markup.end))
    calls = f"({_any_of(tools)}){'+' if form.markup.is_list and most != 1 else ''}"
    rules = [f"call: {marks.said(form.begin)} {calls} {BREAK} {marks.said(form.end)}"]
    allowance = Allowance()
    for place, tool in enumerate(tools):
        rules.append(f"call{place}: {BREAK} {name} {text(tool.name)} {name_end} arguments{place} {BREAK} {end}")
        rules += _rules_of_arguments(form, tool, marks, f"arguments{place}", allowance)
    return rules


def _rules_of_arguments(form: CallForm, tool: Function, marks: Marks, name: str, allowance: Allowance) -> list[str]:
    assert form.markup is not None
    kind = GemmaRules if form.markup.text_begin else MarkupRules
    return kind(name, schema_of_arguments(tool), form, marks, allowance).rules()


def rules_beside_text(tools: Tools) -> list[str]:
    """Return rules of ``call`` and of the terminal ``TEXT``, where a call without marks is the whole output or none of it.

    No text begins as a call does, and a call is one terminal up to its arguments. JSON with a name is left out of texts,
    since it would be read as a call.
    """
    rules = [
        f"call: {_any_of(tools)}",
        "TEXT: /(?s:.*)/ & ~" + pattern(r'\s*\{(?s:.*)"(?:tool_)?name"(?s:.*)'),
    ]
    for place, tool in enumerate(tools):
        words = "".join(
            _SPACE + re.escape(word) for word in ("{", '"name"', ":", json.dumps(tool.name), ",", '"parameters"', ":")
        )
        rules += [
            f"BEGIN{place}: {pattern(words + _SPACE)}",
            f'call{place}: BEGIN{place} arguments{place} {_AROUND_JSON} "}}"',
        ]
    return rules + _arguments(tools)


def _of_llama(form: CallForm, tools: Tools, marks: Marks, most: int | None) -> list[str]:  # noqa: ARG001 (it is one)
    return [f"call: {_json(schema_of_call(tools, FORCED_KEYS))}"]


_RULES: Mapping[CallForm, Callable[[CallForm, Tools, Marks, int | None], list[str]]] = {
    tool_calls.HERMES: _marked_json,
    tool_calls.PHI: _marked_array,
    tool_calls.GRANITE: _marked_array,
    tool_calls.COHERE: partial(_marked_array, keys=_KEYS_OF_COHERE),
    tool_calls.MISTRAL: _of_mistral,
    tool_calls.DEEPSEEK: _of_deepseek,
    tool_calls.QWEN_CODER: _in_markup,
    tool_calls.SEED: _in_markup,
    tool_calls.MINIMAX: _in_markup,
    tool_calls.GLM: _in_markup,
    tool_calls.FUNCTION_GEMMA: _in_markup,
    tool_calls.GEMMA_4: _in_markup,
    tool_calls.LLAMA: _of_llama,
}


def _any_of(tools: Tools) -> str:
    return " | ".join(f"call{place}" for place in range(len(tools)))


def _arguments(tools: Tools) -> list[str]:
    return [f"arguments{place}: {_json(schema_of_arguments(tool))}" for place, tool in enumerate(tools)]


def _array(tools: Tools, keys: CallKeys, most: int | None) -> str:
    return f"{_AROUND_JSON} {_json(schema_of_calls(tools, most, keys))}"


def _end(form: CallForm, marks: Marks) -> str:
    return f"{_AROUND_JSON} {marks.said(form.end)}" if form.end else ""


def _json(schema: dict[str, object]) -> str:
    return f"%json {json.dumps(schema | _AS_TEMPLATES_WRITE, ensure_ascii=False)}"
