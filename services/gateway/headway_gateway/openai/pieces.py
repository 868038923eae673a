"""An output's text as thoughts, text and tool calls, for the model that is served. Must not know: requests, events."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from headway_gateway.openai.harmony import MARKS, HarmonyText, speaks_harmony
from headway_gateway.openai.marks import num_uncertain
from headway_gateway.openai.thinking import ThinkingText, Thought, thoughts_of
from headway_gateway.openai.tool_calls import FORCED, Schemas, ToolCall, ToolText, form_of
from headway_gateway.requests.validation import most_prompt_tokens
from headway_gateway.statuses import invalid_argument
from headway_gateway.text.encoding_lanes import size_of_chat
from headway_gateway.text.tokenization import Message, PromptError, PromptUnavailableError, TextModel
from headway_proto import generation_pb2 as api
from headway_proto.ingress import ModelInfo

Piece: TypeAlias = str | Thought | ToolCall

_MOST_KEPT = 64


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
    tools: Schemas | None = None
    """Those that are offered."""
    is_forced: bool = False
    """A constraint makes the output calls."""


class PieceMaker:
    """What the chat template says of tools and thoughts."""

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        for_tools = text_model.tools_template_source
        self._has_channels = speaks_harmony(for_tools)
        self._call_form = form_of(for_tools)
        self._thought_form = thoughts_of(text_model.template_source) or thoughts_of(for_tools)
        self._begins_inside: dict[str, bool] = {}

    def _has_special_marks(self, wanted: Wanted) -> bool:
        """Whether a mark of what is wanted is a special token."""
        marks: set[str] = set()
        if self._has_channels and not wanted.is_forced and (wanted.thoughts or wanted.tools is not None):
            marks |= set(MARKS)
        if self._thought_form is not None and wanted.thoughts:
            marks |= set(self._thought_form)
        if self._call_form is not None and wanted.tools is not None and not wanted.is_forced:
            marks |= {self._call_form.begin, self._call_form.end}
        return not marks.isdisjoint(self._text_model.special_tokens)

    async def make(self, count: int, wanted: Wanted, request: api.GenerateRequest, model: ModelInfo) -> list[Pieces]:
        """Return one for each of ``count`` outputs of a chat; none if their text stays whole.

        The request then keeps special tokens if some of them are marks.

        Raises:
            CallRefusedError: tools are offered, and the template has no form of calls that is known.
        """
        if wanted.tools is not None and not (wanted.is_forced or self._has_channels or self._call_form is not None):
            raise invalid_argument(
                "tools",
                "this model's chat template has no form of calls that is known; allowed: unset, or a forced tool_choice",
            )
        thoughts = self._thought_form if wanted.thoughts else None
        if wanted.tools is None and thoughts is None and not (wanted.thoughts and self._has_channels):
            return []
        request.keep_special_tokens |= self._has_special_marks(wanted)
        end_ids = (*model.eos_token_ids, *request.sampling.stop_token_ids)
        ends = self._text_model.special_tokens.intersection(map(self._text_model.text_of_token, end_ids))
        if self._has_channels and not wanted.is_forced:
            calls = wanted.tools is not None
            return [HarmonyText(divides_thoughts=wanted.thoughts, calls=calls, ends=ends) for _ in range(count)]
        form = FORCED if wanted.is_forced else self._call_form
        begins_inside = thoughts is not None and await self._prompt_ends_with(thoughts.begin, request.chat, model)
        return [
            MarkedText(
                None if thoughts is None else ThinkingText(thoughts, has_begun=begins_inside),
                None if wanted.tools is None or form is None else ToolText(form, wanted.tools),
                ends,
            )
            for _ in range(count)
        ]

    async def _prompt_ends_with(self, mark: str, chat: api.Chat, model: ModelInfo) -> bool:
        """Some templates begin the thought themselves; others do so if a variable says so, or behind a user's message alone."""
        if chat.messages and chat.messages[-1].role != "user":
            messages = [(one.role, one.content, one.more) for one in chat.messages]
            text = await self._rendered(messages, chat.tools, chat.variables, model)
            return (text or "").rstrip().endswith(mark)
        if chat.variables not in self._begins_inside:
            text = await self._rendered([("user", "0")], "", chat.variables, model)
            if text is None:
                return False
            if len(self._begins_inside) >= _MOST_KEPT:
                self._begins_inside.clear()
            self._begins_inside[chat.variables] = text.rstrip().endswith(mark)
        return self._begins_inside[chat.variables]

    async def _rendered(self, messages: Sequence[Message], tools: str, variables: str, model: ModelInfo) -> str | None:
        """Return nothing if it is refused, as it will be again, and None if another time may be better."""
        try:
            size = size_of_chat(messages, tools, variables)
            self._text_model.require_plausible_length(size, most_prompt_tokens(model))
            return await asyncio.to_thread(self._text_model.render_chat, messages, tools, variables)
        except PromptUnavailableError:
            return None
        except PromptError:
            return ""
