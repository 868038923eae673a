"""``headway.LLM``: the answers of a server, in the order of the prompts, and no process that outlives the program."""

import asyncio
import copy
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from e2e.running_server import wait_until
from headway import LLM
from headway.client import Client, InvalidRequestError
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


def test_what_is_no_prompt_is_refused_before_anything_runs(llm: LLM) -> None:
    """A mapping and a text can be iterated over, and would be answered piece by piece."""
    for wrong in ({"input_ids": [1, 2]}, [{"input_ids": [1, 2]}], None, [None]):
        with pytest.raises((TypeError, KeyError)):
            llm.generate(wrong)
    for text in ("What?", ["What?"]):
        with pytest.raises(TypeError, match="a conversation is a list of"):
            llm.chat(text)
    (one,) = llm.generate(np.array([5, 6, 7]), max_tokens=2, temperature=0.0)
    assert llm.generate([[5, 6, 7]], max_tokens=2, temperature=0.0)[0].token_ids == one.token_ids


def test_an_interrupt_ends_what_runs_and_the_next_call_works(llm: LLM) -> None:
    # Whoever is started in the background of a shell ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["x"] * 20, max_tokens=900, ignore_eos=True)
    timer.join()
    signal.signal(signal.SIGINT, before)
    assert len(llm.generate(PROMPTS[0], max_tokens=2)) == 1
    with Client(llm.address) as client:
        wait_until(lambda: not client.status().num_running, 5, "the end of the requests")


def test_a_prompt_waits_for_a_gateway_that_is_replaced(llm: LLM) -> None:
    launcher = psutil.Process(llm._processes._launcher.pid)
    (gateway,) = [child for child in launcher.children() if "gateway" in child.cmdline()]
    gateway.kill()
    assert len(llm.generate(PROMPTS[0], max_tokens=2)) == 1


def test_closing_ends_what_other_threads_wait_for() -> None:
    problems: list[BaseException] = []

    def wait(llm: LLM) -> None:
        try:
            llm.generate(["x"] * 8, max_tokens=900, ignore_eos=True)
        except RuntimeError as error:
            problems.append(error)

    with LLM(num_threads=1, max_num_seqs=4, progress=False) as llm:
        threads = [threading.Thread(target=wait, args=(llm,), daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        with Client(llm.address) as client:
            wait_until(lambda: client.status().num_running, 5, "the requests")
    for thread in threads:
        thread.join(5)
    assert [str(problem) for problem in problems] == ["this LLM is closed"] * 2


def test_it_cannot_be_sent_to_another_process(llm: LLM) -> None:
    with pytest.raises(TypeError, match="an LLM cannot be sent to another process; make another there"):
        copy.copy(llm)  # as a pickle would be made


def test_a_fork_is_told_that_it_has_none(llm: LLM) -> None:
    """Its threads are not there, so it would wait for ever."""
    child = os.fork()
    if not child:
        try:
            llm.generate("x", max_tokens=1)
        except RuntimeError as error:
            llm.close()
            os._exit(0 if "was forked from" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(llm.generate("x", max_tokens=1)) == 1


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
    with pytest.raises(InvalidRequestError, match="the prompt is empty") as refused:
        llm.generate(["a", "b", ""], max_tokens=2)
    assert refused.value.__notes__ == ["number 3 of 3: ''"]
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


CLOSED = """
llm.close()
for call in (lambda: llm.generate("x"), lambda: llm.stream("x"), lambda: llm.embed("x"), lambda: llm.score("x", "y")):
    try:
        call()
    except RuntimeError as error:
        assert str(error) == "this LLM is closed"
    else:
        sys.exit(4)
sys.exit(3)
"""


@pytest.mark.parametrize(
    "end", ["time.sleep(60)", "sys.exit(3)", "raise RuntimeError", "llm.close(); llm.close(); sys.exit(3)", CLOSED]
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
