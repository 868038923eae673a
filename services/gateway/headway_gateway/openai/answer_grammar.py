"""The grammar of a chat's output: thoughts first, then an answer that a constraint binds, or calls that follow their schemas.

Owns: where thoughts, answer and calls stand in the forms that templates teach. Must not know: requests, how a grammar is
compiled.

A constraint alone binds an output from its first token. A model that was taught to think first would have to answer
without a thought, and one that may call a tool could not.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from headway_gateway.openai.bodies import Function
from headway_gateway.openai.grammar_marks import Marks
from headway_gateway.openai.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START
from headway_gateway.openai.strict_calls import channelled_calls, has_rules, rules_beside_text, rules_of_calls
from headway_gateway.openai.thinking import ThoughtForm
from headway_gateway.openai.tool_calls import CallForm
from headway_gateway.requests.structural_tags import TAGGED
from headway_gateway.text.grammar_literals import pattern, text
from headway_proto import generation_pb2 as api

_LINE_BREAKS = r"WS: /\n{0,4}/"
"""As models put between a thought and an answer; never without end."""
_THOUGHT, _ANY_BEFORE = '"analysis"', '("analysis" | "commentary")'


class Room(NamedTuple):
    """What an output has room for beside its answer."""

    thoughts: ThoughtForm | None = None
    begins_inside: bool = False
    """The prompt ends inside a thought."""
    calls: CallForm | None = None
    tools: Sequence[Function] = ()
    """What may be called; arguments follow the schemas of those that are strict."""
    is_forced: bool = False
    """Calls come in place of an answer; ``calls`` has rules then."""
    most_calls: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is room for an answer alone."""
        return self.thoughts is None and self.calls is None


def bound_by(sampling: api.SamplingParams) -> str | None:
    """Return what the constraint allows as the right side of a rule.

    None if there is no constraint, or it cannot stand within another grammar: a grammar of the caller's own, but of tags,
    binds the whole output, and JSON that is none is for others to refuse.
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
        return pattern(sampling.regex)
    if kind == "grammar" and sampling.grammar.startswith(TAGGED):
        return sampling.grammar.removeprefix("start: ")
    if kind == "choice" and sampling.choice.choices:
        return " | ".join(text(choice) for choice in dict.fromkeys(sampling.choice.choices))
    return None


def marked_grammar(bound: str | None, room: Room, marks: Marks) -> str | None:
    """Return the grammar of an output with these marks, or None if it may be any text.

    ``bound`` is as from ``bound_by``; if it is None, calls alone are bound.
    """
    is_strict = room.calls is not None and any(tool.strict for tool in room.tools) and has_rules(room.calls, marks)
    if (bound is None and not is_strict) or room.is_empty:
        return None
    rules, answer = [_LINE_BREAKS], "bound"
    if bound is not None:
        rules.append(f"bound: {bound}")
    if room.calls is not None:
        answer, more = _calls(room, room.calls, marks, is_bound=bound is not None, is_strict=is_strict)
        rules += more
    begin = "answer"
    if (thoughts := room.thoughts) is not None:
        if thoughts.answer_begin and bound is not None:
            answer += f" | {marks.said(thoughts.answer_begin)} WS bound WS ({marks.said(thoughts.answer_end)})?"
        rules.append(marks.up_to("thought", thoughts.end))
        begin = "thought WS answer" if room.begins_inside else f"(WS {marks.said(thoughts.begin)} thought WS)? answer"
    return "\n".join((f"start: {begin}", f"answer: {answer}", *rules))


def _calls(room: Room, form: CallForm, marks: Marks, *, is_bound: bool, is_strict: bool) -> tuple[str, list[str]]:
    """Return the right side of ``answer``, and the rules that it needs beside ``bound``."""
    tools = _with_their_schemas(room.tools)
    is_free = not is_bound and not room.is_forced
    if is_free and not form.begin:
        return "TEXT | call", rules_beside_text(tools)
    may_repeat = is_strict and bool(form.end) and room.most_calls != 1
    rules = rules_of_calls(form, tools, marks, room.most_calls) if is_strict else [_any_calls(form, tools, marks)]
    if is_free:
        return "said (call said)*" if may_repeat else "said call?", [marks.without("said", form.begin), *rules]
    calls = "WS call (WS call)*" if may_repeat else "WS call"
    return calls if room.is_forced else f"bound | {calls}", rules


def channelled_grammar(bound: str | None, room: Room, marks: Marks, *, thinks: bool) -> str | None:
    """Return the grammar of an output in the channels of gpt-oss (see ``harmony``), or None if it may be any text.

    An output is one call at most. Without ``thinks`` there is room for an answer or a call alone.
    """
    tools, is_strict = room.tools, any(tool.strict for tool in room.tools)
    if bound is None and not is_strict:
        return None
    channel, message = marks.said(CHANNEL), marks.said(MESSAGE)
    is_free = bound is None and not room.is_forced
    before = "before*" if thinks or is_free else ""
    rules = [
        f"start: {before} {'call' if room.is_forced else '(answer | call)' if tools else 'answer'}",
        f'before: {channel} {_ANY_BEFORE if is_free else _THOUGHT} {message} up_to_end {marks.said(START)} "assistant"',
        marks.up_to("up_to_end", END),
        f'answer: {channel} "final" (/ ?/ {marks.said(CONSTRAIN)} /[a-z]+/)? {message} bound',
        marks.without("bound", CHANNEL, START) if bound is None else f"bound: {bound}",
    ]
    if is_strict:
        rules += channelled_calls(_with_their_schemas(tools), marks)
    elif tools:
        rules.append(f'call: ({channel} "commentary")? " to=" <[*]>*')
    return "\n".join(rules)


def _with_their_schemas(tools: Sequence[Function]) -> list[Function]:
    """Arguments of a tool that is not strict may be any."""
    return [tool if tool.strict else Function(tool.name) for tool in tools]


def _any_calls(form: CallForm, tools: Sequence[Function], marks: Marks) -> str:
    if form.begin:
        return f"call: {marks.said(form.begin)} <[*]>*"
    # The whole output is a call.
    schema = {
        "type": "object",
        "properties": {"name": {"enum": [tool.name for tool in tools]}, "parameters": {"type": "object"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return f"call: %json {json.dumps(schema)}"
