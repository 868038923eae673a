"""The grammar of a chat's output whose answer a constraint binds: thoughts before the answer, or calls instead of it.

Owns: where a constrained answer begins in the forms that templates teach. Must not know: requests, how a grammar is compiled.

A constraint alone binds an output from its first token. A model that was taught to think first would have to answer
without a thought, and one that may call a tool could not. In Lark's dialect as llguidance has it: ``<[7]>`` is the token 7,
``<[^7,8]>`` any other than these, ``<[*]>`` any.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from headway_gateway.openai.thinking import ThoughtForm
from headway_gateway.openai.tool_calls import CallForm
from headway_proto import generation_pb2 as api

_LINE_BREAKS = r"WS: /\n{0,4}/"
"""As models put between a thought and an answer; never without end."""
_ENDS_A_PATTERN = re.compile(r"\\.|/|\n", re.DOTALL)
_SAID = {"/": r"\/", "\n": r"\n"}


class Marks(NamedTuple):
    """How the marks of a form are said to the grammar library."""

    token_id: Callable[[str], int | None]
    """The token that a mark is, if it is one."""
    end_ids: Collection[int]
    """Tokens that end an output."""

    def said(self, mark: str) -> str:
        """Return the mark as a grammar has it."""
        token_id = self.token_id(mark)
        return _text(mark) if token_id is None else f"<[{token_id}]>"

    def up_to(self, name: str, mark: str) -> str:
        """Return the rule ``name`` of anything up to a mark, and the mark."""
        token_id = self.token_id(mark)
        if token_id is None:
            return f"{name}[suffix={_text(mark)}]: /(?s:.*)/"
        others = ",".join(str(other) for other in sorted({token_id, *self.end_ids}))
        return f"{name}: <[^{others}]>* <[{token_id}]>"


class Room(NamedTuple):
    """What a constraint leaves room for."""

    thoughts: ThoughtForm | None = None
    begins_inside: bool = False
    """The prompt ends inside a thought."""
    calls: CallForm | None = None
    names: tuple[str, ...] = ()
    """The tools' names."""


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
        return " | ".join(_text(choice) for choice in dict.fromkeys(sampling.choice.choices))
    return None


def marked_grammar(bound: str, room: Room, marks: Marks) -> str:
    """Return the grammar of an output with these marks; ``bound`` is as from ``bound_by``."""
    rules = [f"bound: {bound}", _LINE_BREAKS]
    answer, begin = "bound", "answer"
    if (thoughts := room.thoughts) is not None:
        if thoughts.answer_begin:
            answer += f" | {marks.said(thoughts.answer_begin)} WS bound WS ({marks.said(thoughts.answer_end)})?"
        rules.append(marks.up_to("thought", thoughts.end))
        begin = "thought WS answer" if room.begins_inside else f"(WS {marks.said(thoughts.begin)} thought WS)? answer"
    if (calls := room.calls) is not None:
        answer += " | WS call"
        rules.append(f"call: {marks.said(calls.begin)} <[*]>*" if calls.begin else f"call: %json {_call(room.names)}")
    return "\n".join((f"start: {begin}", f"answer: {answer}", *rules))


def channelled_grammar(bound: str, marks: Marks, *, calls: bool) -> str:
    """Return the grammar of an output in the channels of gpt-oss (see ``harmony``)."""
    channel, message = marks.said("<|channel|>"), marks.said("<|message|>")
    rules = [
        "start: thought* (answer | call)" if calls else "start: thought* answer",
        f'thought: {channel} "analysis" {message} said {marks.said("<|start|>")} "assistant"',
        marks.up_to("said", "<|end|>"),
        f'answer: {channel} "final" (/ ?/ {marks.said("<|constrain|>")} /[a-z]+/)? {message} bound',
        f"bound: {bound}",
    ]
    if calls:
        rules.append(f'call: ({channel} "commentary")? " to=" <[*]>*')
    return "\n".join(rules)


def _call(names: Iterable[str]) -> str:
    """Return the schema of a call that is a whole output. Its arguments may be any, as those of other forms."""
    return json.dumps(
        {
            "type": "object",
            "properties": {"name": {"enum": list(names)}, "parameters": {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
    )


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(regex: str) -> str:
    """Return a regular expression as a literal: what would end one is written otherwise."""
    return f"/{_ENDS_A_PATTERN.sub(lambda found: _SAID.get(found[0], found[0]), regex)}/"
