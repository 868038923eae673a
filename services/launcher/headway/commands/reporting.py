"""Answers and their timings on a terminal."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from headway.client import PromptTokens
from headway.commands.streaming import Answer, Job
from headway.terminal.progress import ProgressLine
from headway.terminal.tables import aligned

_COLUMNS = ("#", "prompt tokens", "output tokens", "TTFT ms", "mean ITL ms", "tokens/s", "ended", "request")


class Screen:
    """Shows finished answers and progress."""

    def __init__(self, jobs: Sequence[Job], *, out: TextIO | None = None, progress: ProgressLine | None = None) -> None:
        self._jobs = jobs
        self._out = sys.stdout if out is None else out
        self._progress = ProgressLine(sys.stderr) if progress is None else progress
        self._num_finished = 0
        self._num_tokens = 0

    def tokens_came(self, num_tokens: int) -> None:
        """Count tokens, and redraw the progress line."""
        self._num_tokens += num_tokens
        self._progress.show(self._num_finished, len(self._jobs), f"finished, {self._num_tokens} tokens")

    def job_ended(self, number: int, answer: Answer) -> None:
        """Print one answer under its prompt."""
        self._num_finished += 1
        self._progress.erase()
        self._out.write(block(number, self._jobs[number], answer))
        self._out.flush()


def block(number: int, job: Job, answer: Answer) -> str:
    """Return one prompt and its answer."""
    text = answer.prompt.text + answer.text
    body = f"(failed: {answer.error})" if answer.error else text.strip("\n")
    indented = "\n".join(f"    {line}".rstrip() for line in body.splitlines()) or "    (no text)"
    return f"[{number + 1}] {job.title}\n{indented}\n\n"


def prompt_table(prompt: PromptTokens, texts: Mapping[int, str]) -> str:
    """Return a line per token from the second on, then the sum and the perplexity."""
    lines = [("token", "text", "logprob", "alternatives")]
    for entry in prompt.logprobs:
        alternatives = "  ".join(f"{token_id} {texts[token_id]!r} {logprob:.3f}" for token_id, logprob in entry.top)
        lines.append((str(entry.token_id), repr(texts[entry.token_id]), f"{entry.logprob:.3f}", alternatives))
    total_logprob = sum(entry.logprob for entry in prompt.logprobs)
    perplexity = math.exp(-total_logprob / len(prompt.logprobs)) if prompt.logprobs else math.nan
    return "\n".join((*aligned(lines, left=(1, 3)), f"sum {total_logprob:.3f}, perplexity {perplexity:.2f}", ""))


def table(answers: Sequence[Answer], wall_s: float) -> str:
    """Return a line of timings per answer, and one for all."""
    rows = [_COLUMNS, *(_row(number, answer) for number, answer in enumerate(answers, start=1))]
    return "\n".join((*aligned(rows, left=()), "", total(answers, wall_s), ""))


def total(answers: Sequence[Answer], wall_s: float) -> str:
    """Return one line about all answers."""
    succeeded = [answer for answer in answers if not answer.error]
    tokens = sum(answer.output_tokens for answer in answers)
    counts = f"{len(answers)} request{'s' * (len(answers) != 1)}" + (
        "" if len(succeeded) == len(answers) else f", {len(succeeded)} succeeded"
    )
    speed = f"{tokens} output tokens in {wall_s:.2f} s, {tokens / wall_s if wall_s else 0.0:.0f} tokens/s"
    with_tokens = [answer for answer in succeeded if answer.output_tokens]
    if not with_tokens:
        return f"total: {counts}; {speed}"
    ttft_ms = 1000 * sum(answer.ttft_s for answer in with_tokens) / len(with_tokens)
    itl_ms = 1000 * sum(answer.mean_itl_s for answer in with_tokens) / len(with_tokens)
    return f"total: {counts}; {speed}; mean TTFT {ttft_ms:.0f} ms, mean ITL {itl_ms:.1f} ms"


def _row(number: int, answer: Answer) -> tuple[str, ...]:
    return (
        str(number),
        str(answer.prompt_tokens),
        str(answer.output_tokens),
        f"{1000 * answer.ttft_s:.1f}",
        f"{1000 * answer.mean_itl_s:.2f}",
        f"{answer.tokens_per_s:.1f}",
        "failed" if answer.error else answer.finish_reason,
        answer.request_id or "-",
    )
