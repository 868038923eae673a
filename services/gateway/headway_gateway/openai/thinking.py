"""What a model thinks before it answers, at the beginning of an output.

Owns: the marks that templates teach, and where thinking begins and ends in a growing text. Must not know: requests, events.
"""

from collections.abc import Iterator
from typing import NamedTuple

from headway_gateway.openai.marks import may_begin, num_uncertain


class Thought(NamedTuple):
    """A piece of what the model thinks."""

    text: str


class ThoughtForm(NamedTuple):
    """A thought stands between two marks. An answer has marks of its own in some forms, which are left out."""

    begin: str
    end: str
    answer_begin: str = ""
    answer_end: str = ""


COHERE = ThoughtForm("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>")
MAGISTRAL = ThoughtForm("[THINK]", "[/THINK]")
GRANITE = ThoughtForm("<think>", "</think>", "<response>", "</response>")
OLDER_GRANITE = ThoughtForm("Here is my thought process:", "Here is my response:")
SEED = ThoughtForm("<seed:think>", "</seed:think>")
GEMMA_4 = ThoughtForm("<|channel>thought\n", "<channel|>")
USUAL = ThoughtForm("<think>", "</think>")

_SIGNS = (
    (COHERE.answer_begin, COHERE),
    (MAGISTRAL.end, MAGISTRAL),
    ("<response></response>", GRANITE),
    (OLDER_GRANITE.end, OLDER_GRANITE),
    (SEED.end, SEED),
    (GEMMA_4.end, GEMMA_4),
    (USUAL.end, USUAL),
)


def thoughts_of(template: str) -> ThoughtForm | None:
    """Return the form of thoughts that a chat template knows of, if it knows of any."""
    return next((form for sign, form in _SIGNS if sign in template), None)


class ThinkingText:
    """One output's text, divided."""

    def __init__(self, form: ThoughtForm = USUAL, *, has_begun: bool) -> None:
        """``has_begun``: the prompt ends inside a thought."""
        self._form = form
        self._held = ""
        self._step = self._think if has_begun else self._begin
        self._has_thought = has_begun
        self._has_marks = False
        """Whether the answer began with its mark."""

    def push(self, text: str) -> list[str | Thought]:
        """Return what is certain now."""
        self._held += text
        return [piece for piece in self._take() if piece and piece != Thought("")]

    def finish(self) -> list[str | Thought]:
        """Return the rest. A thought that was cut off is one."""
        held, self._held = self._held, ""
        if self._has_marks and held.rstrip().endswith(self._form.answer_end):
            held = held.rstrip().removesuffix(self._form.answer_end)
        return [Thought(held) if self._step == self._think else held] if held else []

    def _take(self) -> Iterator[str | Thought]:
        step = None
        while step != self._step:
            step = self._step
            yield from step()

    def _begin(self) -> Iterator[str | Thought]:
        start = self._held.lstrip()
        if start.startswith(self._form.begin):
            self._held, self._step, self._has_thought = start.removeprefix(self._form.begin), self._think, True
        elif not may_begin(start, self._form.begin):
            self._step = self._begin_answer
        yield from ()

    def _think(self) -> Iterator[str | Thought]:
        thought, mark, answer = self._held.partition(self._form.end)
        if mark:
            self._held, self._step = answer, self._begin_answer
        else:
            certain = len(self._held) - num_uncertain(self._held, (self._form.end,))
            thought, self._held = self._held[:certain], self._held[certain:]
        yield Thought(thought)

    def _begin_answer(self) -> Iterator[str | Thought]:
        """Line breaks behind a thought are left out."""
        mark = self._form.answer_begin
        if self._has_thought:
            self._held = self._held.lstrip("\n")
        if mark and self._held.lstrip().startswith(mark):
            self._held, self._has_marks = self._held.lstrip().removeprefix(mark), True
        elif not self._held or may_begin(self._held.lstrip(), mark):
            return
        self._step = self._answer
        yield from ()

    def _answer(self) -> Iterator[str | Thought]:
        uncertain = 0
        if self._has_marks:
            answer = self._held.rstrip()
            found = num_uncertain(answer, (self._form.answer_end,))
            uncertain = found and found + len(self._held) - len(answer)
        certain = len(self._held) - uncertain
        text, self._held = self._held[:certain], self._held[certain:]
        yield text
