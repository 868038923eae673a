"""``headway generate``: prompts in, answers on the terminal, timings below."""

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import msgspec

from headway.client import (
    CONSTRAINT_OPTIONS,
    DEFAULT_RETRY_S,
    AsyncClient,
    ChatMessage,
    GenerateOptions,
    HeadwayError,
)
from headway.commands.connection import add_connection_flags, check_patience, client_of
from headway.commands.reporting import Screen, prompt_table, table
from headway.commands.streaming import Job, answer, answer_all, texts_of
from headway.flags.named_files import bytes_of_file, decoded, lines_of, lines_of_file
from headway.flags.settings import ConfigurationError
from headway_proto.wording import one_line, shown

INTERRUPTED_EXIT_CODE = 130
FAILED_EXIT_CODE = 1
DEFAULT_CONCURRENCY = 64


class SamplingOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The options of flags and JSONL lines."""

    max_tokens: int | msgspec.UnsetType = msgspec.UNSET
    min_tokens: int | msgspec.UnsetType = msgspec.UNSET
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET
    top_k: int | msgspec.UnsetType = msgspec.UNSET
    min_p: float | msgspec.UnsetType = msgspec.UNSET
    repetition_penalty: float | msgspec.UnsetType = msgspec.UNSET
    presence_penalty: float | msgspec.UnsetType = msgspec.UNSET
    frequency_penalty: float | msgspec.UnsetType = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    stop: list[str] | msgspec.UnsetType = msgspec.UNSET
    ignore_eos: bool | msgspec.UnsetType = msgspec.UNSET
    echo: bool | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: int | msgspec.UnsetType = msgspec.UNSET
    best_of: int | msgspec.UnsetType = msgspec.UNSET
    priority: Literal["realtime", "high", "normal", "low"] | msgspec.UnsetType = msgspec.UNSET
    timeout_s: float | msgspec.UnsetType = msgspec.UNSET
    json_schema: dict[str, Any] | bool | str | msgspec.UnsetType = msgspec.UNSET
    json_object: bool | msgspec.UnsetType = msgspec.UNSET
    regex: str | msgspec.UnsetType = msgspec.UNSET
    grammar: str | msgspec.UnsetType = msgspec.UNSET
    choice: list[str] | msgspec.UnsetType = msgspec.UNSET

    def as_options(self) -> dict[str, Any]:
        """Return the options that were given."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not msgspec.UNSET}


class JobLine(SamplingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a JSONL file."""

    prompt: str


class _Once(argparse.Action):
    """What is to be answered is no setting, of which the last one wins: nobody means the first to be left out."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            parser.error(f"{option_string} is not allowed twice; allowed: once, and --file for many prompts")
        setattr(namespace, self.dest, values)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "prompt", nargs="?", default=argparse.SUPPRESS, metavar="TEXT", help="the same as --prompt TEXT"
    )
    source.add_argument("--prompt", action=_Once, metavar="TEXT", help="one prompt; its answer is streamed")
    source.add_argument(
        "--file",
        action=_Once,
        metavar="FILE",
        help="many prompts, run at once: one per line, or, in a .jsonl file, objects such as "
        '{"prompt": "...", "max_tokens": 32}; - reads lines from stdin',
    )
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message of a chat")
    add_connection_flags(parser)
    parser.add_argument(
        "--concurrency",
        type=int,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help=f"requests at one time (default: {DEFAULT_CONCURRENCY})",
    )
    parser.add_argument(
        "--retry-s",
        type=float,
        default=DEFAULT_RETRY_S,
        metavar="S",
        help=f"seconds to go on trying when the gateway goes away; 0: not at all (default: {DEFAULT_RETRY_S:g})",
    )
    sampling = parser.add_argument_group("sampling (what is not given is the server's default)")
    for name, kind in _FLAG_TYPES.items():
        sampling.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    sampling.add_argument("--ignore-eos", action="store_const", const=True, help="continue after the end of the text")
    sampling.add_argument("--echo", action="store_const", const=True, help="show the prompt before its answer")
    sampling.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="K",
        help="show the probability of each token of the prompt, and the K likeliest tokens in its place",
    )
    sampling.add_argument("--best-of", type=int, metavar="N", help="generate N answers and show the most likely one")
    sampling.add_argument("--priority", choices=("realtime", "high", "normal", "low"))
    _add_constraint_flags(parser)


def _add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    titled = parser.add_argument_group("structured output (one of these; see docs/structured-output.md)")
    constraint = titled.add_mutually_exclusive_group()
    constraint.add_argument("--json-schema", metavar="FILE", help="JSON that follows the JSON schema in this file")
    constraint.add_argument("--json", dest="json_object", action="store_const", const=True, help="any JSON object")
    constraint.add_argument("--regex", metavar="REGEX", help="a text that this regular expression matches as a whole")
    constraint.add_argument("--grammar", metavar="FILE", help="a text of the grammar in this file, Lark or GBNF")
    constraint.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts; to be repeated")


_FLAG_TYPES: dict[str, type[int | float]] = {
    "max_tokens": int,
    "min_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "seed": int,
    "timeout_s": float,
}


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    jobs = list(jobs_of(arguments))
    check_patience(arguments)
    try:
        return asyncio.run(_generate(arguments, jobs))
    except HeadwayError as error:
        sys.stderr.write(f"headway generate: {one_line(error)}\n")
        return FAILED_EXIT_CODE
    except KeyboardInterrupt:
        sys.stderr.write("\nheadway generate: cancelled\n")
        return INTERRUPTED_EXIT_CODE


def jobs_of(arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield the prompts of the command line or file.

    Raises:
        ConfigurationError: the file is unreadable, empty or wrong.
    """
    given = SamplingOptions(
        **{
            name: value
            for name in SamplingOptions.__struct_fields__
            if (value := getattr(arguments, name, None)) is not None
        }
        | _constraint_files(arguments)
    ).as_options()
    if arguments.prompt is not None:
        yield _job(arguments.prompt, given, is_chat=arguments.chat)
        return
    lines = [(number, line) for number, line in _lines(arguments.file) if line.strip()]
    if not lines:
        raise ConfigurationError(f"--file: {shown(arguments.file)} has no prompt in it")
    for number, line in lines:
        if arguments.file.endswith(".jsonl"):
            job_line = _parsed(line, number, arguments.file)
            options = _joined(given, job_line.as_options())
            yield _job(options.pop("prompt"), options, is_chat=arguments.chat)
        else:
            yield _job(line, given, is_chat=arguments.chat)


def _constraint_files(arguments: argparse.Namespace) -> dict[str, str]:
    flags = {"json_schema": "--json-schema", "grammar": "--grammar"}
    return {
        name: decoded(bytes_of_file(file, flag) or b"", f"{flag}: {shown(file)}")
        for name, flag in flags.items()
        if (file := getattr(arguments, name, None)) is not None
    }


def _joined(given: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """A line's constraint replaces the flags'."""
    if any(name in line for name in CONSTRAINT_OPTIONS):
        given = {name: value for name, value in given.items() if name not in CONSTRAINT_OPTIONS}
    return {**given, **line}


def _job(prompt: str, options: dict[str, Any], *, is_chat: bool) -> Job:
    message: ChatMessage = {"role": "user", "content": prompt}
    return Job(title=prompt, prompt=[message] if is_chat else prompt, options=cast("GenerateOptions", options))


def _lines(file: str) -> Iterator[tuple[int, str]]:
    origin = "--file"
    found = lines_of(sys.stdin.buffer, file, origin) if file == "-" else lines_of_file(file, origin)
    for number, line in found:
        yield number, decoded(line, f"{origin}: line {number} of {shown(file)}")


def _parsed(line: str, number: int, file: str) -> JobLine:
    try:
        return msgspec.json.decode(line, type=JobLine)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigurationError(f"--file: line {number} of {shown(file)}: {one_line(error)}") from None


async def _generate(arguments: argparse.Namespace, jobs: Sequence[Job]) -> int:
    async with client_of(arguments, arguments.retry_s) as client:
        await client.model()  # Report a missing server once, not once per prompt.
        return await (
            _stream_one(client, jobs[0]) if len(jobs) == 1 else _run_many(client, jobs, arguments.concurrency)
        )


async def _stream_one(client: AsyncClient, job: Job) -> int:
    def write(text: str, num_tokens: int) -> None:
        del num_tokens
        sys.stdout.write(text)
        sys.stdout.flush()

    finished = await answer(client, job, write)
    if finished.output_tokens:
        sys.stdout.write("\n")
        sys.stdout.flush()
    if finished.error:
        sys.stderr.write(f"headway generate: {' '.join(finished.error.split())}\n")
        return FAILED_EXIT_CODE
    if finished.prompt.logprobs:
        sys.stderr.write("\n" + prompt_table(finished.prompt, await texts_of(client, finished.prompt)))
    sys.stderr.write("\n" + table([finished], finished.duration_s))
    return 0


async def _run_many(client: AsyncClient, jobs: Sequence[Job], concurrency: int) -> int:
    started = time.perf_counter()
    screen = Screen(jobs)
    answers = await answer_all(
        client, jobs, concurrency=concurrency, on_tokens=screen.tokens_came, on_answer=screen.job_ended
    )
    sys.stdout.write(table(answers, time.perf_counter() - started))
    return FAILED_EXIT_CODE if any(finished.error for finished in answers) else 0
