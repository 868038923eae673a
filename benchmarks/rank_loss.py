"""The loss of one rank of an executor of several, under load: are all tokens right, and how long is the pause?

Owns: the load, which rank is lost, how and when, the table and the result file. Must not know: how ranks begin again.

``headway serve --tensor-parallel T --pipeline-parallel P`` runs the simulated backend, whose steps take ``--step-ms``.
First, ``--streams`` streams run undisturbed. Then the same streams run again and again: for each rank and each of SIGKILL
and SIGSTOP, ``--moments`` times, that rank's process is lost at a random moment. Each stream must have the same tokens as
the undisturbed one. The prefix cache is off: it would know the prompts.

The pause is the longest gap of any stream after the loss: noticing it, the end of all ranks, their start, and the tokens so
far computed again. SIGSTOP is noticed by silence: of a rank by rank 0, after five seconds; of rank 0 by its supervisor, after
``--hang-s``. At the end nothing may be left: no process, no file in shared memory, no socket.
"""

import argparse
import asyncio
import contextlib
import hashlib
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from executor_loss import Load, Round
from headway.client import AsyncClient
from headway_executor.block_store.pool_file import FILE_PREFIX, SHARED_MEMORY
from headway_executor.rank_processes.surroundings import RANK
from program import count, parser_of, provenance, write_result
from served import served

SIGNALS = {"both": (signal.SIGKILL, signal.SIGSTOP), "kill": (signal.SIGKILL,), "stop": (signal.SIGSTOP,)}
_JOIN_S = 120.0
_POLL_S = 0.02
_EARLIEST, _LATEST = 0.02, 0.95
"""Shares of a round, between which a rank is lost."""


class Loss(msgspec.Struct):
    """One loss. Times in seconds; ``equal`` streams of ``streams``."""

    rank: int
    signal: str
    at: float
    streams: int
    equal: int
    pause_s: float
    joined_s: float
    """Until all ranks were there again, and the streams had ended."""


def ranks() -> dict[int, psutil.Process]:
    """The executor's processes by rank."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[4:5] == ["executor"]:
                found[int(process.environ().get(RANK, "0"))] = process
    return found


def pools_of(directory: Path, size: int) -> list[Path]:
    """The ranks' files in shared memory, of the server with this directory for temporary files."""
    (of_server,) = directory.glob("headway-*")
    places = [f"ipc://{of_server}/step rank {rank}" for rank in range(size)]
    digests = [hashlib.sha256(f"{os.geteuid()} {place}".encode()).hexdigest()[:12] for place in places]
    return [path for digest in digests for path in SHARED_MEMORY.glob(f"{FILE_PREFIX}{digest}-*")]


def all_pools_of(directory: Path, size: int) -> list[Path]:
    """The same, once each rank has one: a rank that has just begun again may still make its own."""
    deadline = time.perf_counter() + _JOIN_S
    while len(pools := pools_of(directory, size)) != size:
        if time.perf_counter() > deadline:
            raise SystemExit(f"{len(pools)} pools of {size} ranks are there after {_JOIN_S:g} s")
        time.sleep(_POLL_S)
    return pools


async def run_losses(address: str, arguments: argparse.Namespace) -> list[Loss]:
    """Run all rounds."""
    size = arguments.tensor_parallel * arguments.pipeline_parallel
    draw = random.Random(arguments.seed)
    losses: list[Loss] = []
    async with AsyncClient(address, retry_s=_JOIN_S) as client:
        load = Load(client, arguments)
        await _joined(client, 1)
        await load.run(0, "warm-up")
        undisturbed = await load.run(0, "alone")
        cases = [(rank, number) for rank in range(size) for number in SIGNALS[arguments.signals]] * arguments.moments
        for rank, number in draw.sample(cases, len(cases)):
            share = draw.uniform(_EARLIEST, _LATEST)
            running = asyncio.create_task(load.run(0, f"loss-{len(losses)}"))
            await _admitted(client, load)
            await asyncio.sleep(share * undisturbed.wall_s)
            victim, lost_at = ranks()[rank], time.perf_counter()
            victim.send_signal(number)
            disturbed = await running
            await _joined(client, len(losses) + 2)
            joined_s = time.perf_counter() - lost_at
            if victim.is_running():
                raise SystemExit(f"rank {rank} is still there")
            losses.append(_loss(rank, number, share, undisturbed, disturbed, lost_at, joined_s))
    return losses


def _loss(
    rank: int, number: signal.Signals, share: float, alone: Round, with_loss: Round, lost_at: float, joined_s: float
) -> Loss:
    pairs = list(zip(alone.streams, with_loss.streams, strict=True))
    pauses = [
        after - before
        for stream in with_loss.streams
        for before, after in zip([lost_at, *stream.times], stream.times, strict=False)
        if after > lost_at
    ]
    equal = sum(bool(one.tokens) and one.tokens == other.tokens for one, other in pairs)
    pause_s = round(max(pauses, default=0.0), 3)
    return Loss(rank, number.name, round(share, 3), len(pairs), equal, pause_s, round(joined_s, 3))


async def _admitted(client: AsyncClient, load: Load) -> None:
    """Wait until all requests are in the scheduler: one that comes while it has no executor is refused, and loses nothing."""
    deadline = time.perf_counter() + _JOIN_S
    await asyncio.sleep(0)  # The round begins.
    known: set[str] = set()
    while not all(stream.times or stream.request_id in known for stream in load.streams):
        if time.perf_counter() > deadline:
            raise SystemExit(f"the requests were not admitted within {_JOIN_S:g} s")
        known = {state.request_id for state in await client.requests()}


async def _joined(client: AsyncClient, num_epochs: int) -> None:
    """Wait until the executor has joined so often; each time an epoch begins."""
    deadline = time.perf_counter() + _JOIN_S
    while (await client.status()).num_epochs < num_epochs:
        if time.perf_counter() > deadline:
            raise SystemExit(f"the executor did not join within {_JOIN_S:g} s")
        await asyncio.sleep(_POLL_S)


def figures(losses: Sequence[Loss]) -> dict[str, Any]:
    """Sum up, and by rank and signal."""
    rows = []
    for rank, name in sorted({(loss.rank, loss.signal) for loss in losses}):
        own = [loss for loss in losses if (loss.rank, loss.signal) == (rank, name)]
        rows.append(
            {
                "rank": rank,
                "signal": name,
                "losses": len(own),
                "streams": sum(loss.streams for loss in own),
                "equal": sum(loss.equal for loss in own),
                "pause_s": {
                    "p50": round(statistics.median(loss.pause_s for loss in own), 2),
                    "max": round(max(loss.pause_s for loss in own), 2),
                },
            }
        )
    return {
        "num_losses": len(losses),
        "num_streams": sum(loss.streams for loss in losses),
        "num_equal": sum(loss.equal for loss in losses),
        "rows": rows,
        "losses": [msgspec.structs.asdict(loss) for loss in losses],
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, seed=23)
    parser.add_argument("--tensor-parallel", type=count, default=2, help="ranks of each stage (default: 2)")
    parser.add_argument("--pipeline-parallel", type=count, default=1, help="stages (default: 1)")
    parser.add_argument("--moments", type=count, default=20, help="losses of each rank and signal (default: 20)")
    parser.add_argument("--signals", choices=SIGNALS, default="both", help="how ranks are lost (default: both)")
    parser.add_argument("--streams", type=count, default=16, help="streams of a round (default: 16)")
    parser.add_argument("--prompt", type=count, default=64, help="tokens of a prompt (default: 64)")
    parser.add_argument("--tokens", type=count, default=100, help="tokens of an answer (default: 100)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a step (default: 10)")
    parser.add_argument("--hang-s", type=float, default=4.0, help="seconds of silence of rank 0 (default: 4)")
    parser.set_defaults(spread=0.0)
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    arguments = parse()
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as directory:
        flags = (
            *("--tensor-parallel", str(arguments.tensor_parallel)),
            *("--pipeline-parallel", str(arguments.pipeline_parallel)),
            *("--backend", "simulated", "--backend-option", f"step_base_us={arguments.step_ms * 1e3}"),
            *("--no-enable-prefix-caching", "--hang-s", str(arguments.hang_s)),
            *("--max-restarts", "1000", "--restart-window-s", "0.1"),
        )
        os.environ["TMPDIR"] = directory
        with served(*flags) as address:
            losses = asyncio.run(run_losses(address, arguments))
            processes = psutil.Process().children(recursive=True)
            pools = all_pools_of(Path(directory), arguments.tensor_parallel * arguments.pipeline_parallel)
        left = [str(process.pid) for process in processes if process.is_running()]
        left += [path.name for path in (*pools, *Path(directory).iterdir()) if path.exists()]
    result = {**figures(losses), "left": left}
    print(
        f"{result['num_equal']} of {result['num_streams']} streams equal after {result['num_losses']} losses; left: {left}"
    )
    for row in result["rows"]:
        print(
            f"  rank {row['rank']}, {row['signal']}: {row['equal']} of {row['streams']} equal, pause {row['pause_s']} s"
        )
    load = {name: value for name, value in vars(arguments).items() if name not in {"json", "seed"}}
    write_result(arguments.json, {**provenance(arguments.seed), "load": load, **result})


if __name__ == "__main__":
    main()
