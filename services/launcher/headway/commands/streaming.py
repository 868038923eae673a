"""Runs prompts against a server and measures the answers."""

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from headway.client import AsyncClient, ChatMessage, GenerateOptions, HeadwayError, PromptTokens

_TEXTS_AT_ONCE = 64


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its options, with a ``title`` for people."""

    title: str
    prompt: str | list[ChatMessage]
    options: GenerateOptions


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job. Times are in seconds from sending.

    ``mean_itl_s`` is the time from the first to the last token over the number of gaps, if any.
    """

    request_id: str = ""
    """The id for ``headway explain``; empty if the request was not accepted."""
    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float = 0.0
    mean_itl_s: float = 0.0
    duration_s: float = 0.0
    finish_reason: str = ""
    error: str = ""
    prompt: PromptTokens = msgspec.field(default_factory=PromptTokens)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0


async def answer(client: AsyncClient, job: Job, on_text: Callable[[str, int], None]) -> Answer:
    """Stream one job. ``on_text`` gets each text and its number of tokens.

    A failed request gives an answer with an error, so other jobs go on.
    """
    sent = time.perf_counter()
    first = last = 0.0
    output_tokens = 0
    request_id = ""
    try:
        async with client.generate(job.prompt, **job.options) as stream:
            async for delta in stream:
                request_id = stream.request_id
                if not first and stream.prompt.text:
                    on_text(stream.prompt.text, 0)
                last = time.perf_counter()
                first = first or last
                output_tokens += len(delta.token_ids)
                on_text(delta.text, len(delta.token_ids))
            result = await stream.result()
    except HeadwayError as error:
        return Answer(
            request_id=request_id, error=str(error), output_tokens=output_tokens, duration_s=time.perf_counter() - sent
        )
    completion = result.completions[0]
    return Answer(
        request_id=result.request_id,
        text=completion.text,
        prompt_tokens=result.prompt_tokens,
        output_tokens=output_tokens,
        ttft_s=first - sent if first else 0.0,
        mean_itl_s=(last - first) / (output_tokens - 1) if output_tokens > 1 else 0.0,
        duration_s=time.perf_counter() - sent,
        finish_reason=completion.finish_reason or "",
        error=completion.error,
        prompt=result.prompt,
    )


async def texts_of(client: AsyncClient, prompt: PromptTokens) -> dict[int, str]:
    """Return the text of each token."""
    token_ids = sorted(
        {one for entry in prompt.logprobs for one in (entry.token_id, *(other for other, _ in entry.top))}
    )
    texts: list[str] = []
    for first in range(0, len(token_ids), _TEXTS_AT_ONCE):
        some = token_ids[first : first + _TEXTS_AT_ONCE]
        texts += await asyncio.gather(*(client.detokenize([token_id]) for token_id in some))
    return dict(zip(token_ids, texts, strict=True))


async def answer_all(
    client: AsyncClient,
    jobs: Sequence[Job],
    *,
    concurrency: int,
    on_tokens: Callable[[int], None],
    on_answer: Callable[[int, Answer], None],
) -> list[Answer]:
    """Run at most ``concurrency`` jobs at a time; return the answers in order.

    ``on_tokens`` gets numbers of new tokens; ``on_answer`` gets each job's number and answer.
    """
    slots = asyncio.Semaphore(concurrency)

    async def run(number: int, job: Job) -> Answer:
        async with slots:
            finished = await answer(client, job, lambda _, num_tokens: on_tokens(num_tokens))
        on_answer(number, finished)
        return finished

    return await asyncio.gather(*(run(number, job) for number, job in enumerate(jobs)))
