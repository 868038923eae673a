"""``headway demo``: serve, stream several prompts at once, show the timings, stop."""

import argparse
import asyncio
import os
import sys
import time
from typing import cast

from headway.client import AsyncClient, ChatMessage, GenerateOptions
from headway.commands.reporting import Screen, table
from headway.commands.serve import serve
from headway.commands.streaming import Answer, Job, answer_all
from headway.flags.configuration import OneLineParser
from headway.planning import preflight
from headway.planning.plan import make_plan, without_settings
from headway.planning.services import add_serve_flags
from headway.running.socket_directory import socket_directory

# Beginnings that the small model continues readably; the card in demo_model/ shows its answers.
OPENINGS = (
    "Return a list of",
    "The subprocess.run function",
    "To open a file",
    "The str.split method",
    "The os.path.join function",
    "The logging module",
    "The asyncio.run function",
    "The pathlib.Path class",
    "class Thread",
)
QUESTIONS = (
    "What does str.split do?",
    "What does os.path.join do?",
    "What is collections.Counter?",
)
DEFAULT_MAX_TOKENS = 64


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"longest answer (default: {DEFAULT_MAX_TOKENS})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Return 0 if every prompt was answered."""
    parser = OneLineParser(prog="headway demo")
    add_serve_flags(parser)
    serving = parser.parse(["--model", "demo", "--grpc-address", "127.0.0.1:0", "--log-level", "warning"])
    jobs = demo_jobs(arguments.max_tokens)
    answers: list[Answer] = []

    async def stream_all(readiness_line: str, address: str) -> bool:
        sys.stdout.write(f"{readiness_line}\nstreaming {len(jobs)} prompts at once\n\n")
        sys.stdout.flush()
        screen, started = Screen(jobs), time.perf_counter()
        async with AsyncClient(address) as client:
            answers.extend(
                await answer_all(
                    client,
                    jobs,
                    concurrency=len(jobs),
                    on_tokens=screen.tokens_came,
                    on_answer=screen.job_ended,
                )
            )
        sys.stdout.write(table(answers, time.perf_counter() - started))
        sys.stdout.flush()
        return False

    with socket_directory() as directory:
        environment = without_settings(os.environ)
        plan = make_plan(serving, environment, directory)
        preflight.check(plan)
        exit_code = asyncio.run(serve(plan, environment, stream_all))
    if exit_code:
        return exit_code
    return 0 if len(answers) == len(jobs) and not any(answer.error for answer in answers) else 1


def demo_jobs(max_tokens: int) -> list[Job]:
    """Return prompts with greedy sampling, for the same text every time."""
    options = cast("GenerateOptions", {"max_tokens": max_tokens, "temperature": 0.0})
    openings = [Job(title=opening, prompt=opening, options=options) for opening in OPENINGS]
    questions = [
        Job(title=question, prompt=[ChatMessage(role="user", content=question)], options=options)
        for question in QUESTIONS
    ]
    return openings + questions
