"""An output's text as thoughts, text and tool calls, for the model that is served. Must not know: requests, events."""

import asyncio
from collections.abc import Iterable
from typing import TypeAlias

from headway_gateway.openai.harmony import HarmonyText, speaks_harmony
from headway_gateway.openai.thinking import BEGIN, ThinkingText, Thought, teaches_thinking
from headway_gateway.openai.tool_calls import SPECIAL_FORMS, ToolCall, ToolText, form_of
from headway_gateway.text.tokenization import PromptError, PromptUnavailableError, TextModel

Piece: TypeAlias = str | Thought | ToolCall

_MOST_KEPT = 64


class MarkedText:
    """Divides one output's text by marks."""

    def __init__(self, thinking: ThinkingText | None, tools: ToolText | None) -> None:
        """None leaves that in the text."""
        self._thinking = thinking
        self._tools = tools

    @property
    def num_calls(self) -> int:
        """Tool calls so far."""
        return self._tools.num_calls if self._tools is not None else 0

    def push(self, text: str) -> list[Piece]:
        """Return what is certain now."""
        thought_or_text = [text] if self._thinking is None else self._thinking.push(text)
        return self._with_calls(thought_or_text)

    def finish(self) -> list[Piece]:
        """Return the rest."""
        pieces = self._with_calls([] if self._thinking is None else self._thinking.finish())
        return [*pieces, *(self._tools.finish() if self._tools is not None else ())]

    def _with_calls(self, given: Iterable[str | Thought]) -> list[Piece]:
        if self._tools is None:
            return [piece for piece in given if piece]
        pieces: list[Piece] = []
        for piece in given:
            pieces += [piece] if isinstance(piece, Thought) else self._tools.push(piece)
        return pieces


Pieces: TypeAlias = MarkedText | HarmonyText
"""Divides one output's text."""


class PieceMaker:
    """What the chat template says of tools and thoughts."""

    def __init__(self, text_model: TextModel) -> None:
        self._text_model = text_model
        self._has_channels = speaks_harmony(text_model.tools_template_source)
        self._tool_form = form_of(text_model.tools_template_source)
        self._has_thoughts = self._has_channels or teaches_thinking(text_model.template_source)
        self._begins_inside: dict[str, bool] = {}

    @property
    def knows_calls(self) -> bool:
        """Whether the template has a form of calls that is known."""
        return self._has_channels or bool(self._tool_form)

    def needs_special_tokens(self, *, divides_thoughts: bool, calls: bool) -> bool:
        """Whether what is asked for begins with a special token; see ``make``."""
        return (self._has_channels and (divides_thoughts or calls)) or (calls and self._tool_form in SPECIAL_FORMS)

    async def make(
        self, count: int, *, divides_thoughts: bool, calls: bool, ends: Iterable[str], variables: str
    ) -> list[Pieces]:
        """Return one for each of ``count`` outputs; none if their text stays whole.

        ``ends``: see ``ToolText``; ``variables``: see ``Messages``.
        """
        divides_thoughts = divides_thoughts and self._has_thoughts
        if not (divides_thoughts or calls):
            return []
        ends = tuple(ends)
        if self._has_channels:
            return [HarmonyText(divides_thoughts=divides_thoughts, calls=calls, ends=ends) for _ in range(count)]
        begins_inside = divides_thoughts and await self._prompt_ends_inside_a_thought(variables)
        return [
            MarkedText(
                ThinkingText(has_begun=begins_inside) if divides_thoughts else None,
                ToolText(self._tool_form, ends) if calls else None,
            )
            for _ in range(count)
        ]

    async def _prompt_ends_inside_a_thought(self, variables: str) -> bool:
        """Some templates begin the thought themselves, or do so if a variable says so."""
        if variables not in self._begins_inside:
            try:
                text = await asyncio.to_thread(self._text_model.render_chat, [("user", "0")], variables=variables)
            except PromptUnavailableError:
                return False  # it is asked again
            except PromptError:
                text = ""
            if len(self._begins_inside) >= _MOST_KEPT:
                self._begins_inside.clear()
            self._begins_inside[variables] = text.rstrip().endswith(BEGIN)
        return self._begins_inside[variables]
