"""The death of an executor whose host store is full: how much of it is computed again?

Owns: the load, the kill, the counters before and after it, and the result file. Must not know: how blocks survive.

``headway serve`` runs one executor of the simulated backend, with a device pool for ``--running`` requests and
``--preemption swap``. As many streams of a low class begin; once all have a token, as many of a high class do, and the low
ones are swapped out. At a random moment the executor is killed (SIGKILL) and started again by its supervisor. The new
process takes over the host pool in shared memory. The same is done with ``--host-pool private``, whose contents end with
their process.

*Kept*: of the tokens that the host held at the kill, the share that the new executor brought back instead of computing
them. A block counts as full, so the share is a lower bound. *Rest*: seconds from the kill to the end of all streams; it
includes the start of the new process.

    python benchmarks/recovery.py --json benchmarks/results/recovery.json
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import psutil

from headway.client import AsyncClient
from program import count, parser_of, provenance, write_result
from served import served

BLOCK_TOKENS = 16
POOLS = ("shm", "private")
_VOCABULARY = range(3, 1000)
_LATEST = 0.6
"""The latest moment of a kill, as a share of the least time that the high class decodes."""


class Stream(msgspec.Struct):
    """One stream as its client saw it."""

    tokens: list[int] = []


class Round(msgspec.Struct):
    """One round with a loss."""

    num_equal: int
    num_streams: int
    num_host_tokens: int
    """Tokens that the host held at the kill."""
    num_pulled_tokens: int
    num_computed_again: int
    rest_s: float
    """From the kill to the end of the last stream."""


class Load:
    """The streams of a round; the same in each. The first half is of a low class."""

    def __init__(self, client: AsyncClient, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        draw = random.Random(arguments.seed)
        self._prompts = [draw.choices(_VOCABULARY, k=arguments.prompt) for _ in range(2 * arguments.running)]

    async def begin(self, streams: list[Stream]) -> list[asyncio.Task[None]]:
        """Begin all streams; return when each has had a token."""
        tasks = []
        for first in (0, self._arguments.running):
            part = range(first, first + self._arguments.running)
            streams += [Stream() for _ in part]
            have_begun = [asyncio.Event() for _ in part]
            tasks += [
                asyncio.create_task(self._follow(number, streams[number], has_begun))
                for number, has_begun in zip(part, have_begun, strict=True)
            ]
            await asyncio.gather(*(has_begun.wait() for has_begun in have_begun))
        return tasks

    async def _follow(self, number: int, stream: Stream, has_begun: asyncio.Event) -> None:
        answer = self._client.generate(
            self._prompts[number],
            max_tokens=self._arguments.tokens,
            seed=number,
            temperature=1.0,
            ignore_eos=True,
            priority="low" if number < self._arguments.running else "high",
        )
        async for delta in answer:
            stream.tokens += delta.token_ids
            has_begun.set()


async def run_rounds(address: str, arguments: argparse.Namespace, draw: random.Random) -> list[Round]:
    """Kill the executor once in each round."""
    async with AsyncClient(address) as client:
        load = Load(client, arguments)
        undisturbed: list[Stream] = []
        await asyncio.gather(*await load.begin(undisturbed))
        decode_s = arguments.tokens * arguments.step_ms / 1e3
        rounds = []
        for _ in range(arguments.rounds):
            before = await client.status()
            streams: list[Stream] = []
            tasks = await load.begin(streams)
            await asyncio.sleep(draw.uniform(0.0, _LATEST) * decode_s)
            at_kill = await client.status()
            killed_at = time.perf_counter()
            _executor().kill()
            await asyncio.gather(*tasks)
            after = await client.status()
            rounds.append(
                Round(
                    sum(one.tokens == other.tokens for one, other in zip(streams, undisturbed, strict=True)),
                    len(streams),
                    (at_kill.num_host_blocks - at_kill.num_free_host_blocks) * BLOCK_TOKENS,
                    after.num_pulled_tokens - before.num_pulled_tokens,
                    _computed_again(after) - _computed_again(before),
                    time.perf_counter() - killed_at,
                )
            )
        return rounds


def _computed_again(status: Any) -> int:
    return sum(entry.count for entry in status.wasted_tokens if entry.reason == "new_epoch")


def _executor() -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "executor" in process.cmdline():
                return process
    raise SystemExit("no executor runs")


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """The sums and percentiles of rounds with the same kind of pool."""
    num_host_tokens = sum(each.num_host_tokens for each in rounds)
    return {
        "streams": sum(each.num_streams for each in rounds),
        "equal": sum(each.num_equal for each in rounds),
        "host_tokens_at_kill": num_host_tokens,
        "pulled_tokens": sum(each.num_pulled_tokens for each in rounds),
        "kept_share": round(sum(each.num_pulled_tokens for each in rounds) / max(1, num_host_tokens), 3),
        "computed_again_tokens": sum(each.num_computed_again for each in rounds),
        "rest_s": round(statistics.median(each.rest_s for each in rounds), 3),
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, seed=23)
    parser.add_argument("--rounds", type=count, default=6, help="losses with each kind of pool (default: 6)")
    parser.add_argument("--running", type=count, default=12, help="requests that the device pool holds (default: 12)")
    parser.add_argument("--prompt", type=count, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--tokens", type=count, default=96, help="tokens of an answer (default: 96)")
    parser.add_argument("--step-ms", type=float, default=4.0, help="time of a step without tokens (default: 4)")
    parser.add_argument("--token-us", type=float, default=100.0, help="time per token of a step (default: 100)")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    num_blocks = arguments.running * -(-(arguments.prompt + arguments.tokens) // BLOCK_TOKENS)
    options = (f"step_base_us={arguments.step_ms * 1e3}", f"per_token_us={arguments.token_us}", "swap_us_per_block=20")
    results = {}
    for pool in POOLS:
        flags = (
            *("--backend", "simulated", "--no-enable-prefix-caching", "--preemption", "swap", "--reserve", "none"),
            *("--num-kv-blocks", str(num_blocks), "--block-size", str(BLOCK_TOKENS), "--host-pool", pool),
            *("--max-model-len", "1024", "--order", "priority"),
            *("--max-restarts", "1000", "--restart-window-s", "0.1"),
            *(word for option in options for word in ("--backend-option", option)),
        )
        with served(*flags) as address:
            rounds = asyncio.run(run_rounds(address, arguments, random.Random(arguments.seed)))
        results[pool] = figures(rounds)
        print(f"{pool}: {results[pool]}")
    load = {name: value for name, value in vars(arguments).items() if name not in {"json", "seed"}}
    write_result(arguments.json, {**provenance(arguments.seed), "load": load, "pools": results})


if __name__ == "__main__":
    main()
