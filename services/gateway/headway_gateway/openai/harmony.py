"""The channels of gpt-oss, in which one output holds thoughts, tool calls and the answer.

Owns: where a message of an output begins, and what it is. Must not know: requests, events.

An output is messages: a head, ``<|message|>``, a body and an end. ``<|channel|>`` in a head names the channel: ``analysis``
are thoughts, ``final`` is the answer, ``commentary`` is text for the user, or a call if the head says
``to=functions.NAME``. The marks are special tokens. See github.com/openai/harmony.
"""

import re
from collections.abc import Iterable, Iterator

from headway_gateway.openai.marks import may_begin, num_uncertain
from headway_gateway.openai.thinking import Thought
from headway_gateway.openai.tool_calls import ToolCall, call_of

CHANNEL, MESSAGE, START, END, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"
_ENDS = (END, "<|call|>", "<|return|>", START, CHANNEL)
"""What ends a body, beside the model's end tokens. The last two are not the usual ones."""

MARKS = (CHANNEL, MESSAGE, *_ENDS)

_FIRST = (CHANNEL, " to=")
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_IN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def speaks_harmony(template: str) -> bool:
    """Return whether a chat template has channels."""
    return CHANNEL in template and MESSAGE in template


class HarmonyText:
    """One output's text, divided. Special tokens are part of it."""

    def __init__(self, *, divides_thoughts: bool, calls: bool, ends: Iterable[str] = ()) -> None:
        """Thoughts that are not divided, and calls that are not offered, are text. ``ends``: texts of end tokens."""
        self._ends = (*_ENDS, *(end for end in ends if end))
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._divides_thoughts = divides_thoughts
        self._takes_calls = calls
        self._held = ""
        self._is_undecided = True
        """Whether the output may still have no head, and be plain text."""
        self._is_in_head = True
        self._channel = ""
        self._called = ""
        self.num_calls = 0

    def push(self, text: str) -> list[str | Thought | ToolCall]:
        """Return what is certain now."""
        self._held += text
        return list(self._take())

    def finish(self) -> list[str | Thought | ToolCall]:
        """Return the rest. A head without a body is nothing."""
        held, self._held = self._held, ""
        is_head = self._is_in_head and (not self._is_undecided or held.startswith(_FIRST))
        return [] if is_head else list(self._body(held, is_whole=True))

    def _take(self) -> Iterator[str | Thought | ToolCall]:
        if self._is_undecided:
            if any(may_begin(self._held, first) for first in _FIRST):
                return
            # A grammar of the caller's own leaves no room for channels.
            self._is_undecided, self._is_in_head = False, self._held.startswith(_FIRST)
        while True:
            if self._is_in_head:
                head, mark, behind = self._held.partition(MESSAGE)
                if not mark:
                    return
                self._read(head)
                self._held = behind
            end = self._end.search(self._held)
            if end is None:
                if not self._called:
                    certain = len(self._held) - num_uncertain(self._held, self._ends)
                    body, self._held = self._held[:certain], self._held[certain:]
                    yield from self._body(body)
                return
            body, self._is_in_head = self._held[: end.start()], True
            self._held = self._held[end.start() if end[0] == CHANNEL else end.end() :]
            yield from self._body(body, is_whole=True)

    def _read(self, head: str) -> None:
        channel, recipient = _IN_CHANNEL.search(head), _RECIPIENT.search(head)
        self._is_in_head = False
        self._channel = "" if channel is None else channel[1]
        self._called = recipient[1] if recipient is not None and self._takes_calls else ""

    def _body(self, text: str, *, is_whole: bool = False) -> Iterator[str | Thought | ToolCall]:
        call = call_of(self._called, text) if self._called and is_whole else None
        if call is not None:
            self.num_calls += 1
            yield call
        elif text:
            yield Thought(text) if self._channel == "analysis" and self._divides_thoughts else text
