"""The loss of one executor of two under load: are all tokens right, and do the other one's streams wait?

Owns: the load, which executor is killed and when, the table and the result file. Must not know: how requests move.

``headway serve --executors 2`` runs the simulated backend, whose steps take ``--step-ms`` and ``--token-us`` per token.
``--streams`` streams begin together. In each of ``--moments`` pairs of rounds, one round is left alone. In the other, one
executor is killed (SIGKILL) at a random moment; the streams that it ran go on at the other one. Both rounds have the
same prompts and seeds, so each stream must have the same tokens. They take turns in who begins. The prefix cache is off:
it would know the prompts of the second round.

The flight log says which streams moved. The others are the survivors'. Their gaps between tokens are compared with those
of the rounds without a loss: P99 over all rounds, and for each pair. A moved prompt and its output are computed again,
which makes steps of the survivor longer; ``--serve-flags`` may bound that (--budget=slo,--default-itl-slo-ms=...).
``steps_after_loss_ms`` has the device's time of the survivor's steps in the second after each loss: what of the gaps the
scheduler decides. The rest is this machine, on which the killed process also starts again.

With ``--roles prefill,decode`` every stream is handed off behind its prompt, and ``--kill`` says whose process dies:
*first*, *second*, *both*, or one of the two by chance. Streams then begin over ``--spread`` seconds, so that some are in
the middle of their hand-off at any moment. Tokens are what counts there: an executor with another role has no survivors
to compare.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psutil

from headway.client import AsyncClient
from headway_lab.percentiles import percentiles
from headway_process.fleet_numbers import EXECUTOR_VARIABLE
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.flight.log import FlightLog
from headway_scheduler.flight.records import Adopted, Answered, Arrived, ExecutorGone, InCell
from program import count, parser_of, provenance, write_result
from served import served

NUM_EXECUTORS = 2
VICTIMS: dict[str, tuple[int, ...]] = {"any": (), "first": (0,), "second": (1,), "both": (0, 1)}
_VOCABULARY = range(3, 1000)
_JOIN_S = 60.0
_POLL_S = 0.02
_EARLIEST, _LATEST = 0.05, 0.9
"""Shares of a round, between which an executor is killed."""


class Stream(msgspec.Struct):
    """One stream as its client saw it. Times are those of ``time.perf_counter``."""

    request_id: str
    tokens: list[int] = []
    times: list[float] = []

    @property
    def gaps_ms(self) -> list[float]:
        """The gaps between tokens."""
        return [(after - before) * 1e3 for before, after in pairwise(self.times)]


class Round(msgspec.Struct):
    """All streams of a round; ``killed_at`` is a share of the round, 0 if it was left alone."""

    streams: list[Stream]
    wall_s: float
    killed_at: float = 0.0


class Pair(msgspec.Struct):
    """A round that was left alone, and one with a loss."""

    alone: Round
    with_loss: Round

    @property
    def num_equal(self) -> int:
        """Streams with the same tokens in both."""
        pairs = zip(self.alone.streams, self.with_loss.streams, strict=True)
        return sum(bool(one.tokens) and one.tokens == other.tokens for one, other in pairs)


class Load:
    """The streams of a round. ``number`` of a pair of rounds decides their prompts."""

    def __init__(self, client: AsyncClient, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self.streams: list[Stream] = []
        """Those of the last round that has begun."""

    async def run(self, number: int, name: str) -> Round:
        """Begin all streams at once and read them to the end."""
        draw = random.Random(f"{self._arguments.seed}, {number}")
        prompts = [draw.choices(_VOCABULARY, k=self._arguments.prompt) for _ in range(self._arguments.streams)]
        began = time.perf_counter()
        self.streams = streams = [Stream(f"{name}-{number}-{index}") for index in range(len(prompts))]
        starts = [draw.uniform(0.0, self._arguments.spread) for _ in prompts]
        await asyncio.gather(
            *(self._follow(*each, seed) for seed, each in enumerate(zip(streams, prompts, starts, strict=True)))
        )
        return Round(streams, time.perf_counter() - began)

    async def _follow(self, stream: Stream, prompt: list[int], start_s: float, seed: int) -> None:
        await asyncio.sleep(start_s)
        answer = self._client.generate(
            prompt,
            request_id=stream.request_id,
            max_tokens=self._arguments.tokens,
            seed=seed,
            temperature=1.0,
            ignore_eos=True,
        )
        async for delta in answer:
            stream.times.append(time.perf_counter())
            stream.tokens += delta.token_ids


async def run_pairs(address: str, arguments: argparse.Namespace) -> list[Pair]:
    """Run all rounds."""
    draw = random.Random(arguments.seed)
    async with AsyncClient(address) as client:
        load = Load(client, arguments)
        await _joined(client, NUM_EXECUTORS)
        wall_s = (await load.run(-1, "warm-up")).wall_s
        pairs = []
        num_killed = 0
        for number in range(arguments.moments):
            share, any_one = draw.uniform(_EARLIEST, _LATEST), draw.randrange(NUM_EXECUTORS)
            victims = VICTIMS[arguments.kill] or (any_one,)
            if arguments.roles:
                share *= arguments.spread / wall_s
            alone = await load.run(number, "alone") if number % 2 == 0 else None
            running = asyncio.create_task(load.run(number, "loss"))
            await asyncio.sleep(share * wall_s)
            for process in [_executor(victim) for victim in victims]:
                process.kill()
            num_killed += len(victims)
            with_loss = await running
            with_loss.killed_at = share
            if alone is None or number + 1 < arguments.moments:
                await _joined(client, NUM_EXECUTORS + num_killed)
            alone = alone or await load.run(number, "alone")
            wall_s = alone.wall_s
            pairs.append(Pair(alone, with_loss))
        return pairs


def _executor(number: int) -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get(EXECUTOR_VARIABLE) == str(number):
                return process
    raise SystemExit(f"executor-{number} does not run")


async def _joined(client: AsyncClient, num_epochs: int) -> None:
    """Wait until executors have joined so often; each begins an epoch."""
    deadline = time.perf_counter() + _JOIN_S
    while (await client.status()).num_epochs < num_epochs:
        if time.perf_counter() > deadline:
            raise SystemExit(f"an executor did not join within {_JOIN_S:g} s")
        await asyncio.sleep(_POLL_S)


def moved_requests(flight_log: Path) -> set[str]:
    """Return the requests that went to an executor more than once."""
    names: dict[Origin, str] = {}
    adoptions: Counter[Origin] = Counter()
    for record in FlightLog(flight_log).records():
        if isinstance(record, Arrived):
            names[record.origin] = record.request_id
        elif isinstance(record, Adopted):
            adoptions[record.origin] += 1
    return {names[origin] for origin, times in adoptions.items() if times > 1}


def steps_after_losses(flight_log: Path) -> list[float]:
    """Return the device's milliseconds of each step that another executor answered in the second after a loss.

    The next round ends this second: its prompts are not what the loss has brought.
    """
    cell, victim, lost_at = 0, -1, float("-inf")
    found: list[float] = []
    for record in FlightLog(flight_log).records():
        if isinstance(record, InCell):
            cell = record.number
        elif isinstance(record, ExecutorGone):
            victim, lost_at = cell, record.now
        elif isinstance(record, Arrived):
            lost_at = float("-inf")
        elif isinstance(record, Answered) and cell != victim and record.now - lost_at < 1.0:
            found.append(record.output.device_time_us / 1e3)
    return found


def figures(pairs: Sequence[Pair], moved: set[str]) -> dict[str, Any]:
    """Compare the rounds. A ratio is None if no stream survived in place."""
    rows = [_row(pair, moved) for pair in pairs]
    alone = _p99([stream for pair in pairs for stream in pair.alone.streams])
    stayed = _p99([stream for pair in pairs for stream in pair.with_loss.streams if stream.request_id not in moved])
    pauses = [max(stream.gaps_ms) for pair in pairs for stream in pair.with_loss.streams if stream.request_id in moved]
    ratios = [row["p99_ratio"] for row in rows if row["p99_ratio"] is not None]
    return {
        "num_streams": sum(row["streams"] for row in rows),
        "num_equal": sum(row["equal"] for row in rows),
        "num_moved": sum(row["moved"] for row in rows),
        "alone_gap_p99_ms": alone,
        "survivors_gap_p99_ms": stayed,
        "p99_ratio": _ratio(stayed, alone),
        "p99_ratio_median": round(statistics.median(ratios), 3) if ratios else None,
        "p99_ratio_worst": max(ratios, default=None),
        "moved_pause_ms": {"p50": round(statistics.median(pauses), 1), "max": round(max(pauses), 1)} if pauses else {},
        "rows": rows,
    }


def _row(pair: Pair, moved: set[str]) -> dict[str, Any]:
    stayed = [stream for stream in pair.with_loss.streams if stream.request_id not in moved]
    alone, survivors = _p99(pair.alone.streams), _p99(stayed)
    return {
        "killed_at": round(pair.with_loss.killed_at, 3),
        "streams": len(pair.alone.streams),
        "equal": pair.num_equal,
        "moved": len(pair.alone.streams) - len(stayed),
        "alone_gap_p99_ms": alone,
        "survivors_gap_p99_ms": survivors,
        "p99_ratio": _ratio(survivors, alone),
    }


def _p99(streams: Sequence[Stream]) -> float | None:
    p99 = percentiles([gap for stream in streams for gap in stream.gaps_ms]).p99
    return None if p99 is None else round(p99, 2)


def _ratio(value: float | None, reference: float | None) -> float | None:
    return round(value / reference, 3) if value and reference else None


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, seed=17)
    parser.add_argument(
        "--moments", type=count, default=30, help="executors to kill, one after the other (default: 30)"
    )
    parser.add_argument("--streams", type=count, default=64, help="streams of a round (default: 64)")
    parser.add_argument("--prompt", type=count, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--tokens", type=count, default=120, help="tokens of an answer (default: 120)")
    parser.add_argument("--step-ms", type=float, default=30.0, help="time of a step without tokens (default: 30)")
    parser.add_argument("--token-us", type=float, default=5.0, help="time per token of a step (default: 5)")
    parser.add_argument("--roles", default="", help="roles of the two executors, as prefill,decode (default: none)")
    parser.add_argument("--kill", choices=VICTIMS, default="any", help="whose process dies (default: any)")
    parser.add_argument("--spread", type=float, default=0.0, help="seconds over which streams begin (default: 0)")
    parser.add_argument("--serve-flags", default="", help="more flags of headway serve, with commas between")
    arguments = parser.parse_args()
    if arguments.roles and not arguments.spread:
        parser.error("--spread: 0 is not allowed with --roles; allowed: seconds above 0")
    return arguments


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    options = (f"step_base_us={arguments.step_ms * 1e3}", f"per_token_us={arguments.token_us}", "verify_kv=false")
    with tempfile.TemporaryDirectory(prefix="headway-loss-") as directory:
        flags = (
            *("--executors", str(NUM_EXECUTORS), "--backend", "simulated", "--no-enable-prefix-caching"),
            *("--flight-log", directory, "--max-restarts", "1000", "--restart-window-s", "0.1"),
            *(word for option in options for word in ("--backend-option", option)),
            *(("--roles", arguments.roles) if arguments.roles else ()),
            *arguments.serve_flags.split(",")[: None if arguments.serve_flags else 0],
        )
        with served(*flags) as address:
            pairs = asyncio.run(run_pairs(address, arguments))
        result = figures(pairs, moved_requests(Path(directory)))
        after = percentiles(steps_after_losses(Path(directory)))
        result["steps_after_loss_ms"] = {"p50": after.p50, "p99": after.p99}
    print(
        f"{result['num_equal']} of {result['num_streams']} streams equal, {result['num_moved']} moved; "
        f"P99 gap {result['alone_gap_p99_ms']} ms alone, {result['survivors_gap_p99_ms']} ms of the survivors' streams, "
        f"ratio {result['p99_ratio']}; pause of moved streams {result['moved_pause_ms']}; steps after a loss "
        f"{result['steps_after_loss_ms']} ms"
    )
    load = {name: value for name, value in vars(arguments).items() if name not in {"json", "seed"}}
    write_result(arguments.json, {**provenance(arguments.seed), "load": load, **result})


if __name__ == "__main__":
    main()
