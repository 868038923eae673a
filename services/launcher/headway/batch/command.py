"""The command ``headway batch``.

Owns: its flags, its own server if none is named, the summary. Must not know: the form of lines, what is tried again.
"""

import argparse
import asyncio
import contextlib
import ssl
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headway.batch.answers_file import AnswersFile, AnswersLostError
from headway.batch.lines import check, read_lines
from headway.batch.runner import OK, Server, ServerGoneError, ServerRefusedError
from headway.child_server import ChildServer, ServingError
from headway.commands.connection import check_patience
from headway.flags.named_files import token_of_file
from headway.flags.settings import ConfigurationError
from headway.planning.model_source import ALLOWED, DEMO_MODEL
from headway.terminal.progress import ProgressLine
from headway_process.addresses import HTTP_URL_FORM, is_http_url
from headway_process.tls import tls_context
from headway_proto.wording import shown

DEFAULT_CONCURRENCY = 256
DEFAULT_RETRY_S = 120.0
FAILED_EXIT_CODE = 1
INTERRUPTED_EXIT_CODE = 130


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the two files, and where to ask."""
    parser.add_argument(
        "input", metavar="FILE", help="requests, one JSON object in each line: OpenAI's batch format, or bodies"
    )
    parser.add_argument("output", metavar="OUTPUT", help="a new file for the answers, in the order of the requests")
    server = parser.add_argument_group("server (without --url, one of its own)")
    server.add_argument("--model", metavar="MODEL", help=f"{ALLOWED}, the default")
    server.add_argument("--config", metavar="FILE", help="settings of the own server, as of headway serve")
    server.add_argument("--url", metavar="URL", help="a running gateway's http_address, such as http://127.0.0.1:8000")
    server.add_argument("--token-file", metavar="FILE", help="file with the bearer token for --url")
    server.add_argument("--root-certificates", metavar="FILE", help="trust these certificates of --url (PEM)")
    parser.add_argument(
        *("--concurrency",),
        type=int, default=DEFAULT_CONCURRENCY, metavar="N", help=f"requests at one time (default: {DEFAULT_CONCURRENCY})",
    )  # fmt: skip
    parser.add_argument(
        *("--retry-s",),
        type=float, default=DEFAULT_RETRY_S, metavar="S",
        help=f"seconds to go on trying when the server answers nothing (default: {DEFAULT_RETRY_S:g})",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Answer every line that has no answer yet; see ``Command``."""
    check_patience(arguments)
    if arguments.url and (arguments.model or arguments.config):
        raise ConfigurationError(
            "--url is not allowed beside --model or --config; allowed: a server of its own, or --url"
        )
    if arguments.url and not is_http_url(arguments.url):
        raise ConfigurationError(f"--url: {shown(arguments.url)} is not allowed; allowed: {HTTP_URL_FORM}")
    source = Path(arguments.input)
    num_lines = check(source)
    with AnswersFile(Path(arguments.output)) as answers:
        tally = Tally(answers.resume(read_lines(source)))
        try:
            _work(arguments, answers, tally, num_lines)
            answers.finish()
        except (ServingError, ServerGoneError, ServerRefusedError, AnswersLostError) as error:
            _say(f"{error}; the same command goes on where this one has ended")
            return FAILED_EXIT_CODE
        except KeyboardInterrupt:
            _say("interrupted; the same command goes on where this one has ended")
            return INTERRUPTED_EXIT_CODE
    _say(tally.summary(num_lines))
    return FAILED_EXIT_CODE if tally.num_failed else 0


class Tally:
    """What this run has answered, and the statuses of what earlier ones have."""

    def __init__(self, before: Counter[int]) -> None:
        self.num_before = before.total()
        self._statuses = Counter(before)
        self._tokens: Counter[str] = Counter()
        self._began = time.monotonic()

    @property
    def num_failed(self) -> int:
        """Requests that were refused."""
        return self._statuses.total() - self._statuses[OK]

    def count(self, answer: dict[str, Any]) -> None:
        """Count one answer."""
        response = answer["response"]
        self._statuses[response["status_code"]] += 1
        usage = response["body"].get("usage") if isinstance(response["body"], dict) else None
        if usage:
            self._tokens["prompt"] += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
            self._tokens["output"] += usage.get("completion_tokens") or usage.get("output_tokens") or 0

    def note(self) -> str:
        """The end of a progress line."""
        return f"answered, {self._per_second():.0f} tokens/s"

    def summary(self, num_lines: int) -> str:
        """One line about all."""
        before = f" ({self.num_before} of them before)" if self.num_before else ""
        failed = ", ".join(
            f"{count} with status {status}" for status, count in sorted(self._statuses.items()) if status != OK
        )
        return (
            f"{num_lines} requests answered{before}"
            + (f", {failed}" if failed else "")
            + f"; {self._tokens['prompt']} "
            f"prompt and {self._tokens['output']} output tokens in {time.monotonic() - self._began:.1f} s, "
            f"{self._per_second():.0f} output tokens/s"
        )

    def _per_second(self) -> float:
        return self._tokens["output"] / max(1e-9, time.monotonic() - self._began)


def _work(arguments: argparse.Namespace, answers: AnswersFile, tally: Tally, num_lines: int) -> None:
    if tally.num_before < num_lines:
        with _url(arguments) as url:
            asyncio.run(_answer_all(arguments, url, answers, tally, num_lines))


async def _answer_all(
    arguments: argparse.Namespace, url: str, answers: AnswersFile, tally: Tally, num_lines: int
) -> None:
    progress, num_answered = ProgressLine(sys.stderr), tally.num_before
    server = Server(
        url,
        token=token_of_file(arguments.token_file, "--token-file"),
        tls=_tls(arguments.root_certificates),
        concurrency=arguments.concurrency,
        retry_s=arguments.retry_s,
    )
    try:
        left = islice(read_lines(Path(arguments.input)), num_answered, None)
        async with contextlib.aclosing(server.answers(left)) as coming:
            async for answer in coming:
                answers.append(answer)
                tally.count(answer)
                num_answered += 1
                progress.show(num_answered, num_lines, tally.note())
    finally:
        progress.erase()
        await server.close()


@contextlib.contextmanager
def _url(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.url:
        # Other clients' base URLs end with /v1, and here every line names its path.
        yield arguments.url.rstrip("/").removesuffix("/v1")
        return
    words = [f"--model={arguments.model or DEMO_MODEL}"] if arguments.model or not arguments.config else []
    words += [f"--config={arguments.config}"] if arguments.config else []
    words += ["--grpc-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--log-level=warning"]
    own = ChildServer(words)
    try:
        yield own.http_url
    finally:
        own.close()


def _tls(root_certificates: str | None) -> ssl.SSLContext | None:
    if root_certificates is None:
        return None
    try:
        return tls_context(cafile=root_certificates)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"--root-certificates: {shown(root_certificates)} is unusable: {error}") from None


def _say(text: str) -> None:
    sys.stderr.write(f"headway batch: {text}\n")
