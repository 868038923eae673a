"""An output's text as thoughts, text and tool calls, for the model that is served. Must not know: requests, events."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from headway_gateway.openai.answer_grammar import Room, bound_by, channelled_grammar, marked_grammar
from headway_gateway.openai.bodies import Function
from headway_gateway.openai.grammar_marks import Marks
from headway_gateway.openai.harmony import MARKS, HarmonyText, speaks_harmony
from headway_gateway.openai.marks import num_uncertain
from headway_gateway.openai.strict_calls import has_rules, problem_of_tools
from headway_gateway.openai.thinking import ThinkingText, Thought, ThoughtForm, thoughts_of
from headway_gateway.openai.tool_calls import FORCED, CallForm, ToolCall, ToolText, form_of
from headway_gateway.requests.prompt_encoding import conversation_of
from headway_gateway.requests.validation import most_prompt_tokens
from headway_gateway.statuses import invalid_argument
from headway_gateway.text.conversation import Conversation
from headway_gateway.text.tokenization import PromptError, PromptUnavailableError, TextModel
from headway_proto import generation_pb2 as api
from headway_proto.ingress import ModelInfo
from headway_proto.sampling import MAX_CONSTRAINT_BYTES
from headway_proto.wording import shown

Piece: TypeAlias = str | Thought | ToolCall

_MOST_KEPT = 64
_MOST_KEPT_CHARACTERS = 1024
"""Of variables whose mark is kept: what a client sends may be as large as a message."""


class MarkedText:
    """Divides one output's text by marks."""

    def __init__(self, thinking: ThinkingText | None, tools: ToolText | None, ends: Iterable[str] = ()) -> None:
        """None leaves that in the text. ``ends``: texts of end tokens, of which one may end the text."""
        self._thinking = thinking
        self._tools = tools
        self._ends = tuple(end for end in ends if end)
        self._held = ""

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._tools.num_calls if self._tools is not None else 0

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now."""
        self._held += text
        certain = len(self._held) - num_uncertain(self._held, self._ends)
        text, self._held = self._held[:certain], self._held[certain:]
        return self._divided(text)

    def finish(self) -> list[Piece]:
        """Return the rest."""
        held, self._held = self._held, ""
        pieces = self._divided(next((held.removesuffix(end) for end in self._ends if held.endswith(end)), held))
        if self._thinking is not None:
            pieces += self._with_calls(self._thinking.finish())
        return [*pieces, *(self._tools.finish() if self._tools is not None else ())]

    def _divided(self, text: str) -> list[Piece]:
        return self._with_calls([text] if self._thinking is None else self._thinking.push(text))

    def _with_calls(self, given: Iterable[str | Thought]) -> list[Piece]:
        if self._tools is None:
            return [piece for piece in given if piece]
        pieces: list[Piece] = []
        for piece in given:
            pieces += [piece] if isinstance(piece, Thought) else self._tools.push(piece)
        return pieces


Pieces: TypeAlias = MarkedText | HarmonyText
"""Divides one output's text."""


class Wanted(NamedTuple):
    """What is divided from an output's text."""

    thoughts: bool
    tools: Sequence[Function] = ()
    """Those that are offered."""
    forced: Sequence[Function] = ()
    """Those of which one must be called."""
    one_call: bool = False
    constraint: str | None = None
    """The kind of the constraint that binds the answer."""


class PieceMaker:
    """What the chat template says of tools and thoughts."""

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        for_tools = text_model.tools_template_source
        self._has_channels = speaks_harmony(for_tools)
        self._call_form = form_of(for_tools)
        self._thought_form = thoughts_of(text_model.template_source) or thoughts_of(for_tools)
        self._marks_at_end: dict[str, str] = {}

    def _has_special_marks(self, wanted: Wanted, form: CallForm | None) -> bool:
        """Whether a mark of what is wanted is a special token."""
        marks: set[str] = set()
        if self._has_channels and (wanted.thoughts or wanted.tools):
            marks |= set(MARKS)
        if self._thought_form is not None and wanted.thoughts:
            marks |= set(self._thought_form)
        if form is not None:
            marks |= {form.begin, form.end}
        return not marks.isdisjoint(self._text_model.special_tokens)

    def _form_of_calls(self, wanted: Wanted, marks: Marks) -> CallForm | None:
        """Return the form that calls will have; None if there are none, or if they are in channels.

        Raises:
            CallRefusedError: tools are offered, and the template has no form of calls that is known.
        """
        if not wanted.tools or self._has_channels:
            return None
        form = self._call_form
        if form is None and "tools" not in self._text_model.tools_template_source:
            raise invalid_argument(
                "tools", "this model's chat template does not show them; allowed: unset, or another chat_template.jinja"
            )
        if wanted.forced and (
            form is None or not has_rules(form, marks) or problem_of_tools(form, wanted.forced, marks)
        ):
            return FORCED
        if form is None:
            raise invalid_argument(
                "tools",
                "this model's chat template has no form of calls that is known; allowed: unset, or a forced tool_choice",
            )
        return form

    async def make(self, count: int, wanted: Wanted, request: api.GenerateRequest, model: ModelInfo) -> list[Pieces]:
        """Return one for each of ``count`` outputs of a chat; none if their text stays whole.

        The request then keeps special tokens if some of them are marks. Its constraint leaves room for thoughts and calls, and
        calls that are forced, or are of strict tools, follow their schemas.

        Raises:
            CallRefusedError: tools are offered, and the template has no form of calls that is known.
        """
        marks = Marks(self._text_model.token_named, model.eos_token_ids)
        form = self._form_of_calls(wanted, marks)
        thoughts = self._thought_form if wanted.thoughts else None
        if not wanted.tools and thoughts is None and not (wanted.thoughts and self._has_channels):
            return []
        request.keep_special_tokens |= self._has_special_marks(wanted, form)
        end_ids = (*model.eos_token_ids, *request.sampling.stop_token_ids)
        ends = self._text_model.special_tokens.intersection(map(self._text_model.text_of_token, end_ids))
        room = await self._room(wanted, thoughts, form, request.chat, model)
        # An array of forced calls, which every model can be bound to, is a constraint already.
        # Beside text that may be any, calls of the template's form could not be told apart.
        is_whole = room.calls is not None and request.sampling.HasField("grammar")
        bound = None if room.is_forced or is_whole else bound_by(request.sampling)
        if (
            bound is not None
            or room.is_forced
            or (wanted.constraint is None and _may_be_bound(request.sampling, model))
        ):
            _require_rules(room, marks)
            grammar = (
                channelled_grammar(bound, room, marks, thinks=wanted.thoughts)
                if self._has_channels
                else marked_grammar(bound, room, marks)
            )
            if grammar is not None:
                _require_size(grammar, room)
                request.sampling.grammar = grammar
        if self._has_channels:
            calls = bool(wanted.tools)
            return [HarmonyText(divides_thoughts=wanted.thoughts, calls=calls, ends=ends) for _ in range(count)]
        schemas = {tool.name: tool.parameters for tool in wanted.tools}
        return [
            MarkedText(
                None if thoughts is None else ThinkingText(thoughts, has_begun=room.begins_inside),
                None if form is None else ToolText(form, schemas),
                ends,
            )
            for _ in range(count)
        ]

    async def _room(
        self, wanted: Wanted, thoughts: ThoughtForm | None, form: CallForm | None, chat: api.Chat, model: ModelInfo
    ) -> Room:
        """Return what an output has room for beside its answer. All that is forced is strict."""
        at_end = "" if thoughts is None else await self._mark_at_end(thoughts, chat, model)
        begins_inside = thoughts is not None and at_end == thoughts.begin
        return Room(
            thoughts if begins_inside or not at_end else None,
            begins_inside,
            None if form is FORCED else form,
            [Function(tool.name, parameters=tool.parameters, strict=True) for tool in wanted.forced] or wanted.tools,
            is_forced=bool(wanted.forced) and form is not FORCED,
            most_calls=1 if wanted.one_call else None,
        )

    async def _mark_at_end(self, form: ThoughtForm, chat: api.Chat, model: ModelInfo) -> str:
        """Return the mark of thoughts that the prompt ends with, or "".

        Some templates begin the thought themselves; others do so, or leave it out, if a variable says so, or behind a
        user's message alone.
        """
        given = conversation_of(chat)
        if given.continues:
            last = given.messages[-1][1]
            return max((form.begin, form.end), key=last.rfind) if _has_mark(last, form) else ""
        if not given.asks:
            return ""
        if given.messages and given.messages[-1][0] != "user":
            return _mark_behind(await self._rendered(given, model) or "", form)
        if (known := self._marks_at_end.get(chat.variables)) is not None:
            return known
        text = await self._rendered(Conversation((("user", "0"),), variables=chat.variables), model)
        if text is None:
            return ""
        mark = _mark_behind(text, form)
        if len(chat.variables) <= _MOST_KEPT_CHARACTERS:
            if len(self._marks_at_end) >= _MOST_KEPT:
                self._marks_at_end.clear()
            self._marks_at_end[chat.variables] = mark
        return mark

    async def _rendered(self, chat: Conversation, model: ModelInfo) -> str | None:
        """Return nothing if it is refused, as it will be again, and None if another time may be better."""
        try:
            self._text_model.require_plausible_length(chat.size, most_prompt_tokens(model))
            return await asyncio.to_thread(self._text_model.render_chat, chat)
        except PromptUnavailableError:
            return None
        except PromptError:
            return ""


def _may_be_bound(sampling: api.SamplingParams, model: ModelInfo) -> bool:
    """Whether a grammar may bind an output without a constraint. It ends the output, which ``min_tokens`` and ``ignore_eos``
    may forbid.
    """
    return model.supports_constraints and not (sampling.min_tokens or sampling.ignore_eos)


def _require_rules(room: Room, marks: Marks) -> None:
    """Refuse strict tools whose calls have no rules in the form of the template, where others have."""
    if room.calls is None or not has_rules(room.calls, marks):
        return
    problem = problem_of_tools(room.calls, [tool for tool in room.tools if tool.strict], marks)
    if problem:
        raise invalid_argument("tools", problem)


def _require_size(grammar: str, room: Room) -> None:
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_CONSTRAINT_BYTES and room.tools:
        largest = max(room.tools, key=lambda tool: len(msgspec.json.encode(tool.parameters)))
        raise invalid_argument(
            "tools",
            f"their grammar has {num_bytes} bytes, the most of {shown(largest.name)}; allowed: at most {MAX_CONSTRAINT_BYTES}",
        )


def _has_mark(text: str, form: ThoughtForm) -> bool:
    return form.begin in text or form.end in text


def _mark_behind(text: str, form: ThoughtForm) -> str:
    return next((mark for mark in (form.begin, form.end) if text.rstrip().endswith(mark)), "")
