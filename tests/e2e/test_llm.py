"""``headway.LLM``: the answers of a server, in the order of the prompts, and no process that outlives the program."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from e2e.running_server import wait_until
from headway import LLM
from headway.client import InvalidRequestError
from headway.llm import ServingError

PROMPTS = ("Return a list of", "The logging module", "To open a file", "class Thread")
QUESTION = [{"role": "user", "content": "What does str.split do?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, max_num_seqs=4, progress=False) as running:
        yield running


def test_many_prompts_are_answered_in_their_order(llm: LLM) -> None:
    prompts = [prompt for prompt in PROMPTS for _ in range(5)]
    results = llm.generate(prompts, max_tokens=6, temperature=0.0)
    alone = [llm.stream(prompt, max_tokens=6, temperature=0.0).text() for prompt in PROMPTS]
    assert [result.text for result in results] == [text for text in alone for _ in range(5)]
    assert llm.generate([], max_tokens=3) == []


def test_one_prompt_is_a_text_or_a_list_of_token_ids(llm: LLM) -> None:
    (one,) = llm.generate(PROMPTS[0], max_tokens=4, temperature=0.0, echo=True)
    assert one.prompt.text == PROMPTS[0]
    (same,) = llm.generate(one.prompt.token_ids, max_tokens=4, temperature=0.0)
    assert same.token_ids == one.token_ids


def test_conversations(llm: LLM) -> None:
    (one,) = llm.chat(QUESTION, max_tokens=5, temperature=0.0)
    two = llm.chat([QUESTION, QUESTION], max_tokens=5, temperature=0.0)
    assert [result.text for result in two] == [one.text] * 2


def test_vectors_and_scores(llm: LLM) -> None:
    texts = [f"text {number}" for number in range(70)]
    vectors = llm.embed(texts, pooling="mean")
    assert len(vectors) == 70, "more than one call takes"
    assert llm.embed(texts[69], pooling="mean") == [pytest.approx(vectors[69], abs=1e-6)]
    likely, unlikely = llm.score("Return a list of", [" the", " zzz"])
    assert likely.logprob > unlikely.logprob


def test_a_refused_request_is_an_error_and_the_next_works(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        llm.generate(list(PROMPTS), max_tokens=4, top_p=7.0)
    assert len(llm.generate(list(PROMPTS), max_tokens=2)) == len(PROMPTS)


def test_where_an_event_loop_runs_already(llm: LLM) -> None:
    async def as_in_a_notebook() -> tuple[str, str]:
        (blocking,) = llm.generate(PROMPTS[0], max_tokens=4, temperature=0.0)
        async with llm.async_client() as client:
            return blocking.text, await client.generate(PROMPTS[0], max_tokens=4, temperature=0.0).text()

    blocking, awaited = asyncio.run(as_in_a_notebook())
    assert blocking == awaited


def test_what_cannot_be_served_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match=r"^max_seqs is no setting of headway serve; did you mean max_num_seqs\?$"):
        LLM(max_seqs=3)
    with pytest.raises(ServingError, match=r"^--model: '/no/such' is not allowed; allowed: a checkpoint directory"):
        LLM("/no/such")


PROGRAM = """
import sys, time
from headway import LLM
llm = LLM(num_threads=1, backend="simulated")
print("ready", flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end", ["time.sleep(60)", "sys.exit(3)", "raise RuntimeError", "llm.close(); llm.close(); sys.exit(3)"]
)
def test_nothing_outlives_the_program(end: str) -> None:
    """Killed, ended, failed or closed; the program's own exit code stays."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(end=end)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        below = psutil.Process(process.pid).children(recursive=True) if "sleep" in end else []
        if below:
            assert len(below) >= 4
            os.kill(process.pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == {"time.sleep(60)": -9, "raise RuntimeError": 1}.get(end, 3), errors
        wait_until(lambda: not any(child.is_running() for child in below), 20, "the end of the processes beneath")
    finally:
        process.kill()
        process.wait()
