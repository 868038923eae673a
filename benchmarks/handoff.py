"""A thousand hand-offs between two executors: the gap between a client's first and second token.

Owns: the requests, the figures of each hand-off, the table and the result file. Must not know: how blocks move.

``headway serve --executors 2 --roles prefill,decode --placement disaggregated``, on this machine: executor 0 runs the
prompt, whose last step brings the first token; executor 1 pulls the blocks and brings the second. One request follows
the other, so that nothing but the hand-off is between its two tokens. Each of ``--backends`` runs ``--requests`` of
them: *simulated*, whose steps take ``--step-ms``, and *torch* with the demo model.

The client is a plain socket that blocks: a library's threads would take the cores that the hand-off needs. The gap is the
client's. Beside it, from the flight log of the same run and by the same clock of this machine:

- *step*: the time of the step that brought the second token, on its device;
- *load*: the time to put the blocks on that device, as its executor reports it;
- *rest*: the gap without both;
- *ahead*: how long before that step began to run the client had its first token. Positive: it did not wait for the copy.

Before the load, the blocks are copied out of the first device and into private memory of the second executor, with a
checksum each time. ``copy_ms`` is the least that this can take: as many blocks times the time for one that the backend
measured when it opened, and so many bytes copied and checked twice in this process. A hand-off is *within* if its rest
is at most copy_ms + 2 ms. ``pull_ms`` is what the second executor waited for the blocks of a step, in the mean of its
metrics; the first one begins to copy when the first token is on its way.

With ``--scheduler-core 1`` on two cores, the scheduler shares a core with the executor that decodes, and need not wait for
the one that copies.

``beside`` has the gaps between later tokens, in the second executor alone: a step and what surrounds it. Of these gaps,
``beside_within`` is the share within the median step + 2 ms: a hand-off, which has all that these have and its copy
besides, cannot be expected to do better on this machine.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from headway.client import Client
from headway_executor.block_store.records import BlockRecords, checksums_fit
from headway_executor.block_store.transport import RECORD
from headway_lab.flight.cells import HandOff, StepCollector, StepRange, hand_offs_in
from headway_lab.flight.source import Flight
from headway_proto import generation_pb2 as api
from plain_call import Message, PlainCaller
from program import count, count_or_none, parser_of, provenance, write_result
from served import figures_at, row_of_free_ports, served

NUM_EXECUTORS = 2
MOST_REST_MS = 2.0
SIMULATED, TORCH = "simulated", "torch"
_VOCABULARY = range(3, 1000)
_JOIN_S = 60.0
_POLL_S = 0.05
_WARM_UP = 10
_COPIES = 50
_PORTS = 2 + NUM_EXECUTORS
"""Of the metrics: the scheduler's, one for each executor, the gateway's."""
_ALL_STEPS = StepRange(0, 1 << 62)


class Measured(NamedTuple):
    """One hand-off, in milliseconds."""

    gap: float
    step: float
    load: float
    ahead: float

    @property
    def rest(self) -> float:
        """What the hand-off costs beyond the step and bringing its blocks to the device."""
        return self.gap - self.step - self.load


def run_requests(address: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Send the requests one by one; return the times of each one's tokens, by ``time.perf_counter``."""
    with Client(address) as client:
        _wait_until_joined(client)
        draw = random.Random(arguments.seed)
        sampling = api.SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
        caller = PlainCaller(address)
        times: dict[str, list[float]] = {}
        for number in range(_WARM_UP + arguments.requests):
            prompt = api.TokenIds(ids=draw.choices(_VOCABULARY, k=arguments.prompt))
            request_id = f"{'warm-up' if number < _WARM_UP else 'request'}-{number}"
            request = api.GenerateRequest(request_id=request_id, token_ids=prompt, sampling=sampling)
            times[request_id] = token_times(caller.call(request.SerializeToString()))
        caller.close()
    return {request_id: each for request_id, each in times.items() if request_id.startswith("request")}


def token_times(messages: Sequence[Message]) -> list[float]:
    """Return when each token of an answer came."""
    times: list[float] = []
    for message in messages:
        times += [message.at] * len(api.GenerateResponse.FromString(message.data).delta.token_ids)
    return times


def _wait_until_joined(client: Client) -> None:
    deadline = time.perf_counter() + _JOIN_S
    while client.status().num_epochs < NUM_EXECUTORS:
        assert time.perf_counter() < deadline, "not all executors have joined"
        time.sleep(_POLL_S)


def keep_scheduler_on(core: int) -> None:
    """Let the scheduler of this process's server run on one core alone."""
    for process in psutil.Process().children(recursive=True):
        if "scheduler" in process.cmdline()[:5]:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})


def hand_offs_of(log: Path) -> tuple[dict[str, HandOff], float]:
    """Return the recorded hand-offs by request, and the microseconds to move a block, measured at opening."""
    flight, collector = Flight(str(log)), StepCollector(_ALL_STEPS)
    for event in flight.events("hand-offs"):
        collector.record(event, flight.replay)
    swap_us = flight.replay.cores[0].capacity.swap_us_per_block
    return {one.request_id: one for one in hand_offs_in(collector.steps)}, swap_us


def measured(arrivals: Sequence[float], found: HandOff) -> Measured:
    """Put a client's times beside the recorded ones; both count from this machine's start."""
    joined = found.joined
    first, second = arrivals[:2]
    return Measured(
        gap=(second - first) * 1e3,
        step=joined.device_s * 1e3,
        load=joined.move_s * 1e3,
        ahead=(joined.answered_s - joined.device_s - first) * 1e3,
    )


def run_backend(backend: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Return the figures of one backend."""
    flags = {
        SIMULATED: ["--backend-option", f"step_base_us={arguments.step_ms * 1e3}"],
        TORCH: ["--device", "cpu"],
    }[backend]
    with tempfile.TemporaryDirectory(prefix="hw") as directory:
        flags += ["--executors", str(NUM_EXECUTORS), "--roles", "prefill,decode", "--placement", "disaggregated"]
        flags += ["--num-kv-blocks", str(arguments.num_kv_blocks), "--no-enable-prefix-caching"]
        flags += arguments.serve_flags.split(",") if arguments.serve_flags else []
        metrics_port = row_of_free_ports(_PORTS)
        flags += ["--metrics-port", str(metrics_port), "--flight-log", directory]
        with served("--backend", backend, *flags) as address:
            if arguments.scheduler_core is not None:
                keep_scheduler_on(arguments.scheduler_core)
            times = run_requests(address, arguments)
            pulled = figures_at(metrics_port + NUM_EXECUTORS)
        found, swap_us = hand_offs_of(Path(directory))
    rows = [measured(each, found[request_id]) for request_id, each in times.items() if request_id in found]
    num_pulls = max(pulled["headway_executor_pull_seconds_count"], 1.0)
    num_blocks = round(pulled["headway_executor_pulled_blocks_total"] / num_pulls)
    block_bytes = round(pulled["headway_executor_pulled_bytes_total"] / max(num_blocks * num_pulls, 1.0))
    copied = copy_ms(num_blocks, block_bytes) + num_blocks * swap_us / 1e3
    beside = [(after - before) * 1e3 for each in times.values() for before, after in pairwise(each[1:])]
    return {
        "backend": backend,
        "requests": len(times),
        "hand_offs": len(rows),
        **{
            f"{name}_ms": spread([getattr(row, name) for row in rows])
            for name in ("gap", "step", "load", "rest", "ahead")
        },
        "beside_ms": spread(beside),
        "beside_within": share_within(beside, [row.step for row in rows]),
        "blocks": num_blocks,
        "block_bytes": block_bytes,
        "stale_blocks": pulled["headway_executor_stale_blocks_total"],
        "pull_ms": round(pulled["headway_executor_pull_seconds_sum"] / num_pulls * 1e3, 3),
        "copy_ms": round(copied, 3),
        "within": sum(row.rest <= copied + MOST_REST_MS for row in rows),
        "first_token_before_the_copy_ended": sum(row.ahead > 0 for row in rows),
    }


def copy_ms(num_blocks: int, block_bytes: int) -> float:
    """Return the median time to check blocks, copy them, and check them again, as the executors do."""
    host = np.ones((max(num_blocks, 1), max(block_bytes, 1)), dtype=np.uint8)
    table = np.zeros(len(host), dtype=RECORD)
    records, blocks = BlockRecords(table, host), np.arange(len(host), dtype=np.int32)
    times = []
    for step in range(_COPIES):
        began = time.perf_counter()
        write = records.begin(blocks)
        records.end(write, blocks, epoch=1, step=step)
        private = host[blocks]
        assert checksums_fit(table[blocks], private, blocks).all()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def share_within(gaps: Sequence[float], steps: Sequence[float]) -> float:
    """Return the share of gaps that take at most ``MOST_REST_MS`` beyond the median step; 0 without any."""
    most = statistics.median(steps or [0.0]) + MOST_REST_MS
    return round(sum(gap <= most for gap in gaps) / max(len(gaps), 1), 3)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the least, the median, the 99th percentile and the largest; zeros without values."""
    figures = np.percentile(values, (0, 50, 99, 100)).tolist() if len(values) else [0.0] * 4
    return {name: round(value, 3) for name, value in zip(("min", "p50", "p99", "max"), figures, strict=True)}


def table(rows: Sequence[dict[str, object]]) -> str:
    """Return the figures as text."""
    lines = []
    for row in rows:
        lines.append(
            f"{row['backend']}: {row['hand_offs']} hand-offs of {row['requests']} requests, each of {row['blocks']} blocks of "
            f"{row['block_bytes']} bytes; {row['within']} within copy ({row['copy_ms']} ms) + step + {MOST_REST_MS:g} ms; "
            f"pulled in {row['pull_ms']} ms; {row['stale_blocks']:g} blocks stale; the first token was there before the copy ended in "
            f"{row['first_token_before_the_copy_ended']}; of later gaps, {row['beside_within']:.1%} within step + {MOST_REST_MS:g} ms"
        )
        lines += [f"  {name:<12}{value}" for name, value in row.items() if isinstance(value, dict)]
    return "\n".join(lines)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--backends", default=f"{SIMULATED},{TORCH}", help="(default: %(default)s)")
    parser.add_argument("--requests", type=count, default=1000, help="hand-offs of each backend (default: 1000)")
    parser.add_argument("--prompt", type=count, default=512, help="tokens of a prompt (default: 512)")
    parser.add_argument("--tokens", type=count, default=4, help="of each answer, 3 or more (default: 4)")
    parser.add_argument("--step-ms", type=float, default=10.0, help="time of a simulated step (default: 10)")
    parser.add_argument("--num-kv-blocks", type=count, default=512, help="of 16 tokens of each (default: 512)")
    parser.add_argument("--scheduler-core", type=count_or_none, help="keep the scheduler on this core (default: any)")
    parser.add_argument("--serve-flags", default="", help="more of headway serve, with commas between them")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    rows = [run_backend(backend, arguments) for backend in arguments.backends.split(",")]
    print(table(rows))
    settings = {name: value for name, value in vars(arguments).items() if name not in {"json", "seed"}}
    result = {**provenance(arguments.seed), "settings": settings, "load_average": os.getloadavg()[0], "rows": rows}
    write_result(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
