"""Calls that follow their tools' schemas, in the forms that templates teach, as rules of a grammar.

Owns: what a call of a form consists of. Must not know: what stands around a call, how calls are read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from headway_gateway.openai import tool_calls
from headway_gateway.openai.bodies import Function
from headway_gateway.openai.grammar_marks import Marks, text
from headway_gateway.openai.tool_calls import CallForm
from headway_gateway.openai.tool_schemas import CallKeys, schema_of_arguments, schema_of_call, schema_of_calls

Tools: TypeAlias = Sequence[Function]

_AROUND_JSON = r"/[ \n]{0,8}/"
_KEYS = CallKeys("name", "arguments", last_id="id")
_KEYS_OF_COHERE = CallKeys("tool_name", "parameters", first_id="tool_call_id")
_AS_TEMPLATES_WRITE = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{0,8}"}}
"""Some write calls on several lines."""


def channelled_calls(tools: Tools, marks: Marks) -> list[str]:
    """Return rules of ``call`` in the channels of gpt-oss (see ``harmony``)."""
    channel, message, form = marks.said("<|channel|>"), marks.said("<|message|>"), marks.said("<|constrain|>")
    rules = [f"call: {_any_of(tools)}", f'json: (/ ?/ {form} "json" | " json")? {message}']
    for place, tool in enumerate(tools):
        recipient = text(f" to=functions.{tool.name}")
        rules.append(
            f'call{place}: ({channel} "commentary" {recipient} | {recipient} {channel} "commentary") json arguments{place}'
        )
    return rules + _arguments(tools)


def rules_of_calls(form: CallForm, tools: Tools, marks: Marks) -> list[str]:
    """Return rules, of which ``call`` is one call or more with the marks around; none for a form without rules.

    Nor are there any if the first mark is no token, since a text could not be kept from holding it.
    """
    make = _RULES.get(form)
    return [] if make is None or marks.token_id(form.begin) is None else make(form, tools, marks)


def _marked_json(form: CallForm, tools: Tools, marks: Marks) -> list[str]:
    return [f"call: {marks.said(form.begin)} {_AROUND_JSON} {_json(schema_of_call(tools, _KEYS))} {_end(form, marks)}"]


def _marked_array(form: CallForm, tools: Tools, marks: Marks) -> list[str]:
    return [f"call: {marks.said(form.begin)} {_array(tools, _KEYS)} {_end(form, marks)}"]


def _of_cohere(form: CallForm, tools: Tools, marks: Marks) -> list[str]:
    return [f"call: {marks.said(form.begin)} {_array(tools, _KEYS_OF_COHERE)} {_end(form, marks)}"]


def _of_mistral(form: CallForm, tools: Tools, marks: Marks) -> list[str]:
    """An array; or in newer models names, each behind a mark, perhaps with an id."""
    begin = marks.said(form.begin)
    to_arguments = f"({marks.said('[CALL_ID]')} /[a-zA-Z0-9]{{1,40}}/)? {marks.said('[ARGS]')}"
    named = [
        f"call{place}: {begin} {text(tool.name)} {to_arguments} arguments{place}" for place, tool in enumerate(tools)
    ]
    return [f"call: {begin} {_array(tools, _KEYS)} | ({_any_of(tools)})+", *named, *_arguments(tools)]


def _of_deepseek(form: CallForm, tools: Tools, marks: Marks) -> list[str]:
    """V3.1 has the name before the separator, V3 and R1 behind it."""
    begin, end = marks.said(tool_calls.DEEPSEEK_CALL), marks.said(tool_calls.DEEPSEEK_CALL_END)
    separator = marks.said(tool_calls.DEEPSEEK_SEPARATOR)
    named = [
        f"call{place}: {text(tool.name)} {separator} arguments{place}"
        f' | "function" {separator} {text(tool.name)} "\\n```json\\n" arguments{place} "\\n```"'
        for place, tool in enumerate(tools)
    ]
    call = f"call: {marks.said(form.begin)} ({begin} ({_any_of(tools)}) {end} {_AROUND_JSON})+ {marks.said(form.end)}"
    return [call, *named, *_arguments(tools)]


_RULES: Mapping[CallForm, Callable[[CallForm, Tools, Marks], list[str]]] = {
    tool_calls.HERMES: _marked_json,
    tool_calls.PHI: _marked_array,
    tool_calls.GRANITE: _marked_array,
    tool_calls.COHERE: _of_cohere,
    tool_calls.MISTRAL: _of_mistral,
    tool_calls.DEEPSEEK: _of_deepseek,
}


def _any_of(tools: Tools) -> str:
    return " | ".join(f"call{place}" for place in range(len(tools)))


def _arguments(tools: Tools) -> list[str]:
    return [f"arguments{place}: {_json(schema_of_arguments(tool))}" for place, tool in enumerate(tools)]


def _array(tools: Tools, keys: CallKeys) -> str:
    return f"{_AROUND_JSON} {_json(schema_of_calls(tools, None, keys))}"


def _end(form: CallForm, marks: Marks) -> str:
    return f"{_AROUND_JSON} {marks.said(form.end)}" if form.end else ""


def _json(schema: dict[str, object]) -> str:
    return f"%json {json.dumps(schema | _AS_TEMPLATES_WRITE, ensure_ascii=False)}"
