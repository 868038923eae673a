"""Prompts in, answers and timings out: what ``headway generate`` reads, and how it shows what came."""

import argparse
import io
import itertools

import pytest

from headway.client import PromptTokens, TokenLogprob
from headway.commands.demo import demo_jobs
from headway.commands.generate import add_flags, jobs_of, run
from headway.commands.reporting import Screen, block, prompt_table, table
from headway.commands.streaming import Answer, Job, texts_of
from headway.flags.configuration import OneLineParser
from headway.flags.settings import ConfigurationError
from headway.terminal.progress import ProgressLine


def arguments(*words: str) -> argparse.Namespace:
    parser = OneLineParser(prog="headway generate", allow_abbrev=False)
    add_flags(parser)
    return parser.parse(words)


def test_flags_become_options_and_what_is_not_given_is_left_to_the_server():
    (job,) = jobs_of(arguments("--prompt", "hi", "--max-tokens", "5", "--top-p", "0.5", "--stop", "a", "--stop", "b"))
    assert job == Job(title="hi", prompt="hi", options={"max_tokens": 5, "top_p": 0.5, "stop": ["a", "b"]})


def test_zero_is_given():
    (job,) = jobs_of(arguments("--prompt", "hi", "--temperature", "0", "--seed", "0", "--ignore-eos"))
    assert job.options == {"temperature": 0.0, "seed": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--json"], {"json_object": True}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "a", "--choice", "b"], {"choice": ["a", "b"]}),
    ],
)
def test_what_the_output_must_be_is_given_by_a_flag(words, options):
    (job,) = jobs_of(arguments("--prompt", "hi", *words))
    assert job.options == options


def test_schema_and_grammar_come_from_files(tmp_path):
    file = tmp_path / "file"
    file.write_text('{"type": "integer"}')
    (job,) = jobs_of(arguments("--prompt", "hi", "--json-schema", str(file)))
    assert job.options == {"json_schema": '{"type": "integer"}'}
    (job,) = jobs_of(arguments("--prompt", "hi", "--grammar", str(file)))
    assert job.options == {"grammar": '{"type": "integer"}'}
    with pytest.raises(ConfigurationError, match="--json-schema: cannot read"):
        list(jobs_of(arguments("--prompt", "hi", "--json-schema", str(tmp_path / "none"))))


def test_one_constraint_at_a_time(capsys):
    with pytest.raises(SystemExit, match="2"):
        arguments("--prompt", "hi", "--json", "--regex", "a")
    assert capsys.readouterr().err == "headway generate: argument --regex: not allowed with argument --json\n"


@pytest.mark.parametrize("flag", ["--prompt", "--file"])
def test_no_prompt_is_left_out_in_silence(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        arguments(flag, "a", flag, "b")
    assert f"{flag} is not allowed twice; allowed: once, and --file for many prompts" in capsys.readouterr().err
    assert arguments("--prompt", "hi", "--top-p", "0.5", "--top-p", "0.9").top_p == 0.9


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    file = tmp_path / "prompts"
    file.write_text("one\ntwo\n", "utf-8-sig")
    assert [job.prompt for job in jobs_of(arguments("--file", str(file)))] == ["one", "two"]


def test_a_lines_constraint_is_instead_of_the_flags(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "json_schema": {"type": "null"}}\n{"prompt": "two"}\n')
    jobs = list(jobs_of(arguments("--file", str(file), "--regex", "a", "--seed", "4")))
    assert [job.options for job in jobs] == [{"seed": 4, "json_schema": {"type": "null"}}, {"seed": 4, "regex": "a"}]


def test_chat_makes_a_users_message():
    (job,) = jobs_of(arguments("--prompt", "hi", "--chat"))
    assert (job.title, job.prompt) == ("hi", [{"role": "user", "content": "hi"}])


def test_a_text_file_has_a_prompt_per_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text('one\n\n  \n{"prompt": 1}\nzwei Wörter\n')
    assert [job.prompt for job in jobs_of(arguments("--file", str(file)))] == ["one", '{"prompt": 1}', "zwei Wörter"]


def test_lines_of_a_jsonl_file_win_over_flags(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "max_tokens": 3, "stop": ["x"]}\n{"prompt": "two"}\n')
    jobs = list(jobs_of(arguments("--file", str(file), "--max-tokens", "9", "--seed", "4")))
    assert [job.options for job in jobs] == [{"max_tokens": 3, "seed": 4, "stop": ["x"]}, {"max_tokens": 9, "seed": 4}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "max_token": 3}', "line 2 of .*unknown field `max_token`"),
        ('{"max_tokens": 3}', "line 2 of .*missing required field `prompt`"),
        ('{"prompt": "a", "max_tokens": "3"}', r"line 2 of .*Expected `int`.* at `\$.max_tokens`"),
        ("not json", "line 2 of .*malformed"),
    ],
)
def test_a_bad_line_is_told_by_its_number(line, message, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigurationError, match=message):
        list(jobs_of(arguments("--file", str(file))))


def test_a_missing_or_empty_file_is_told(tmp_path):
    with pytest.raises(ConfigurationError, match="No such file"):
        list(jobs_of(arguments("--file", str(tmp_path / "absent"))))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigurationError, match="has no prompt in it"):
        list(jobs_of(arguments("--file", str(tmp_path / "empty"))))


@pytest.mark.parametrize("retry_s", ["-1", "nan"])
def test_a_time_to_try_that_is_none_is_told(retry_s):
    assert arguments("--prompt", "a").retry_s == 30.0
    with pytest.raises(ConfigurationError, match=r"^--retry-s: (-1.0|nan) is not allowed; allowed: 0 or more seconds$"):
        run(arguments("--prompt", "a", "--retry-s", retry_s))


@pytest.mark.parametrize("words", [(), ("--prompt", "a", "--file", "b"), ("--prompt", "a", "--max-tokens", "x")])
def test_a_wrong_command_line_is_one_line(words, capsys):
    with pytest.raises(SystemExit) as exit_request:
        arguments(*words)
    assert exit_request.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


ANSWERS = [
    Answer(
        request_id="a-request",
        text="\n\nfirst\n\n  second",
        prompt_tokens=3,
        output_tokens=11,
        ttft_s=0.02,
        mean_itl_s=0.004,
        duration_s=0.1,
    ),
    Answer(error="UNAVAILABLE: gone"),
]


def test_an_answer_stands_whole_and_indented_under_its_prompt():
    job = Job(title="A prompt", prompt="A prompt", options={})
    assert block(0, job, ANSWERS[0]) == "[1] A prompt\n    first\n\n      second\n\n"
    assert block(1, job, ANSWERS[1]) == "[2] A prompt\n    (failed: UNAVAILABLE: gone)\n\n"
    assert block(2, job, Answer()) == "[3] A prompt\n    (no text)\n\n"


def test_the_table_has_a_line_per_answer_and_a_total():
    lines = table(ANSWERS, wall_s=0.5).splitlines()
    assert lines[1].split() == ["1", "3", "11", "20.0", "4.00", "110.0", "a-request"]
    assert lines[2].split()[-2:] == ["failed", "-"]
    assert lines[-1] == (
        "total: 2 requests, 1 succeeded; 11 output tokens in 0.50 s, 22 tokens/s; mean TTFT 20 ms, mean ITL 4.0 ms"
    )


def test_progress_shows_only_on_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    job = Job(title="p", prompt="p", options={})
    for progress, expected in ((io.StringIO(), ""), (Terminal(), "0 of 1 finished, 2 tokens")):
        out = io.StringIO()
        screen = Screen([job], out=out, progress=ProgressLine(progress, clock=itertools.count().__next__))
        screen.tokens_came(2)
        screen.job_ended(0, ANSWERS[0])
        assert expected in progress.getvalue()
        assert bool(progress.getvalue()) == bool(expected)
        assert out.getvalue() == block(0, job, ANSWERS[0])


def test_the_demonstration_has_at_least_eight_prompts():
    jobs = demo_jobs(max_tokens=16)
    assert len({job.title for job in jobs}) >= 8
    assert all(job.options == {"max_tokens": 16, "temperature": 0.0} for job in jobs)


def test_flags_about_the_prompt_and_the_choice():
    (job,) = jobs_of(arguments("--prompt", "hi", "--echo", "--prompt-logprobs", "0", "--best-of", "3"))
    assert job.options == {"echo": True, "prompt_logprobs": 0, "best_of": 3}


def test_a_prompt_is_shown_token_by_token_and_before_its_answer():
    entries = [TokenLogprob(965, -7.5, ((20, -2.25), (3, -2.5))), TokenLogprob(6, -0.5, ())]
    texts = {965: " dictionary", 20: "\n", 3: "'", 6: ""}
    shown = prompt_table(PromptTokens("", [1, 965, 6], entries), texts)
    assert shown == (
        "token  text           logprob  alternatives\n"
        "  965  ' dictionary'   -7.500  20 '\\n' -2.250  3 \"'\" -2.500\n"
        "    6  ''              -0.500\n"
        "sum -8.000, perplexity 54.60\n"
    )
    told = Answer(text=" there", prompt=PromptTokens(text="hi"))
    assert block(0, Job(title="hi", prompt="hi", options={}), told) == "[1] hi\n    hi there\n\n"


async def test_each_token_that_is_named_is_asked_for_once():
    class Detokenizer:
        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        async def detokenize(self, token_ids: list[int]) -> str:
            self.asked.append(token_ids)
            return f"<{token_ids[0]}>"

    client = Detokenizer()
    entries = [TokenLogprob(100 + n, -1.0, ((7, -2.0), (100 + n, -1.0))) for n in range(70)]
    texts = await texts_of(client, PromptTokens("", [1], entries))
    assert client.asked == [[token_id] for token_id in (7, *range(100, 170))]
    assert texts == {token_id: f"<{token_id}>" for token_id in (7, *range(100, 170))}


def test_a_file_that_is_not_utf_8_is_refused_with_its_byte(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"one\ntw\xff\n")
    with pytest.raises(
        ConfigurationError, match=r"--file: line 2 of '.*' *: byte 3 is not UTF-8; allowed: text in UTF-8$"
    ):
        list(jobs_of(arguments("--file", str(file))))
    for flag in ("--json-schema", "--grammar"):
        with pytest.raises(ConfigurationError, match=rf"{flag}: '.*': byte 7 is not UTF-8"):
            list(jobs_of(arguments("--prompt", "hi", flag, str(file))))
