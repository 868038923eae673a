"""What a driver and ``cpu_peers.py`` say to each other: one line of JSON each way, over pipes.

Owns: the lines and the clock. Must not know: any engine. It runs under the Python of every peer, so it imports nothing
else. What an engine prints itself goes to the error stream.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Protocol

_FIRST_PROMPT = list(range(10, 26))


class Engine(Protocol):
    """An engine that has loaded its model."""

    version: str

    def generate(self, prompts: list[list[int]], num_output: int) -> None:
        """Run all ``prompts``, given together, to exactly ``num_output`` greedy tokens each."""

    def nats(self, token_ids: list[int], window: int) -> tuple[float, int]:
        """Return the summed negative log-likelihood of the tokens that are predicted, and their number."""


def windows(token_ids: list[int], window: int) -> Iterator[list[int]]:
    """The parts that are scored alone: ``window`` tokens that see and one more that is only seen."""
    for start in range(0, len(token_ids) - 1, window):
        yield token_ids[start : start + window + 1]


def redirected_output() -> int:
    """Let everything that is printed go to the error stream; return the descriptor of the real output."""
    lines = os.dup(1)
    os.dup2(2, 1)
    return lines


def take_turns(engine: Engine, output: int) -> None:
    """Answer one token, say that the engine is ready, then do what each line of the input asks."""

    def say(answer: dict[str, object]) -> None:
        os.write(output, (json.dumps(answer) + "\n").encode())

    engine.generate([_FIRST_PROMPT], 1)
    say({"version": engine.version})
    for line in sys.stdin:
        ask = json.loads(line)
        if "window" in ask:
            total, count = engine.nats(ask["token_ids"], ask["window"])
            say({"nats_per_token": total / count, "tokens": count})
        else:
            started = time.perf_counter()
            engine.generate(ask["prompts"], ask["num_output"])
            say({"seconds": time.perf_counter() - started})
