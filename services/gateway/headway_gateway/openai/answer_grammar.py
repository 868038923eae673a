"""The grammar of a chat's output: thoughts first, then an answer that a constraint binds, or calls that follow their schemas.

Owns: where thoughts, answer and calls stand in the forms that templates teach. Must not know: requests, how a grammar is
compiled.

A constraint alone binds an output from its first token. A model that was taught to think first would have to answer
without a thought, and one that may call a tool could not.
"""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from headway_gateway.openai.bodies import Function
from headway_gateway.openai.grammar_marks import Marks, text
from headway_gateway.openai.strict_calls import channelled_calls, rules_of_calls
from headway_gateway.openai.thinking import ThoughtForm
from headway_gateway.openai.tool_calls import CallForm
from headway_proto import generation_pb2 as api

_LINE_BREAKS = r"WS: /\n{0,4}/"
"""As models put between a thought and an answer; never without end."""
_ENDS_A_PATTERN = re.compile(r"\\.|/|\n", re.DOTALL)
_SAID = {"/": r"\/", "\n": r"\n"}
_CHANNEL, _MESSAGE, _START = "<|channel|>", "<|message|>", "<|start|>"


class Room(NamedTuple):
    """What a constraint leaves room for."""

    thoughts: ThoughtForm | None = None
    begins_inside: bool = False
    """The prompt ends inside a thought."""
    calls: CallForm | None = None
    tools: Sequence[Function] = ()
    """What may be called; arguments follow the schemas of those that are strict."""

    @property
    def is_empty(self) -> bool:
        """Whether a constraint may bind the whole output."""
        return self.thoughts is None and self.calls is None


def bound_by(sampling: api.SamplingParams) -> str | None:
    """Return what the constraint allows as the right side of a rule.

    None if there is no constraint, or it cannot stand within another grammar: a grammar of the caller's own binds the
    whole output, and JSON that is none is for others to refuse.
    """
    kind = sampling.WhichOneof("constraint")
    if kind == "json_schema":
        try:
            json.loads(sampling.json_schema)
        except (ValueError, RecursionError):
            return None
        return f"%json {sampling.json_schema}"
    if kind == "json_object" and sampling.json_object:
        return '%json {"type": "object"}'
    if kind == "regex" and sampling.regex:
        return _pattern(sampling.regex)
    if kind == "choice" and sampling.choice.choices:
        return " | ".join(text(choice) for choice in dict.fromkeys(sampling.choice.choices))
    return None


def marked_grammar(bound: str | None, room: Room, marks: Marks) -> str | None:
    """Return the grammar of an output with these marks, or None if it may be any text.

    ``bound`` is as from ``bound_by``; if it is None, calls alone are bound.
    """
    calls = _strict_calls(room, marks)
    several = "+" if calls and room.calls is not None and room.calls.end else ""
    rules = [_LINE_BREAKS]
    if bound is not None:
        answer = "bound"
        rules.append(f"bound: {bound}")
        if room.calls is not None:
            answer += f" | (WS call){several}"
            calls = calls or [_any_calls(room, marks)]
    elif calls and room.calls is not None:
        answer = "said (call said)*" if several else "said call?"
        rules.append(marks.without("said", room.calls.begin))
    else:
        return None
    begin = "answer"
    if (thoughts := room.thoughts) is not None:
        if thoughts.answer_begin and bound is not None:
            answer += f" | {marks.said(thoughts.answer_begin)} WS bound WS ({marks.said(thoughts.answer_end)})?"
        rules.append(marks.up_to("thought", thoughts.end))
        begin = "thought WS answer" if room.begins_inside else f"(WS {marks.said(thoughts.begin)} thought WS)? answer"
    return "\n".join((f"start: {begin}", f"answer: {answer}", *rules, *calls))


def channelled_grammar(bound: str | None, tools: Sequence[Function], marks: Marks) -> str | None:
    """Return the grammar of an output in the channels of gpt-oss (see ``harmony``), or None if it may be any text."""
    is_strict = any(tool.strict for tool in tools)
    if bound is None and not is_strict:
        return None
    channel, message = marks.said(_CHANNEL), marks.said(_MESSAGE)
    before = '"analysis"' if bound is not None else '("analysis" | "commentary")'
    rules = [
        "start: before* (answer | call)" if tools else "start: before* answer",
        f'before: {channel} {before} {message} up_to_end {marks.said(_START)} "assistant"',
        marks.up_to("up_to_end", "<|end|>"),
        f'answer: {channel} "final" (/ ?/ {marks.said("<|constrain|>")} /[a-z]+/)? {message} bound',
        marks.without("bound", _CHANNEL, _START) if bound is None else f"bound: {bound}",
    ]
    if is_strict:
        rules += channelled_calls(_with_their_schemas(tools), marks)
    elif tools:
        rules.append(f'call: ({channel} "commentary")? " to=" <[*]>*')
    return "\n".join(rules)


def _strict_calls(room: Room, marks: Marks) -> list[str]:
    if room.calls is None or not any(tool.strict for tool in room.tools):
        return []
    return rules_of_calls(room.calls, _with_their_schemas(room.tools), marks)


def _with_their_schemas(tools: Sequence[Function]) -> list[Function]:
    """Arguments of a tool that is not strict may be any."""
    return [tool if tool.strict else Function(tool.name) for tool in tools]


def _any_calls(room: Room, marks: Marks) -> str:
    if room.calls is not None and room.calls.begin:
        return f"call: {marks.said(room.calls.begin)} <[*]>*"
    # The whole output is a call.
    schema = {
        "type": "object",
        "properties": {"name": {"enum": [tool.name for tool in room.tools]}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return f"call: %json {json.dumps(schema)}"


def _pattern(regex: str) -> str:
    """Return a regular expression as a literal: what would end one is written otherwise."""
    return f"/{_ENDS_A_PATTERN.sub(lambda found: _SAID.get(found[0], found[0]), regex)}/"
