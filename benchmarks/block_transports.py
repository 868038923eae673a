"""What a pull through each block transport costs, between two processes of this host.

    python benchmarks/block_transports.py

Owns: sizes, timing. Must not know: how a transport works.

An owner process registers blocks and idles; this one pulls them at random, into new memory each time, as an executor
does. The time of a pull of one block is the latency; larger pulls show the rate. Checking CRC32s is not included: it is the
same for all. `nixl` is left out where its package is missing. `load_average` of the result tells what else ran.
"""

import contextlib
import functools
import importlib.util
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from headway.commands.keys import make_keys
from headway_conformance.block_transports import TransportUnderTest
from headway_conformance.block_transports.stage import POOL, Owner, TransportStage
from headway_executor.block_store.transport import BlockTransport
from headway_proto.columns import Int32Array
from program import count, counts, parser_of, provenance, write_result

SIZES = {"demo model, float32": 6 * 2 * 4 * 32 * 16 * 4, "135M model, float32": 30 * 2 * 3 * 64 * 16 * 4}
"""Bytes of a block of 16 tokens: layers, keys and values, heads, their size, tokens, bytes of a number."""

_MODULES = "headway_executor.block_store"
_TIMEOUT_S = 30.0
_WARM_PULLS = 3


def main() -> None:
    """Time the pulls and print them."""
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--blocks", type=counts, default=[1, 16, 64], help="blocks of a pull (default: 1,16,64)")
    parser.add_argument("--pulls", type=count, default=60, help="pulls of each kind (default: %(default)s)")
    parser.add_argument("--pool", type=count, default=128, help="blocks of the owner (default: %(default)s)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headway-keys-") as directory:
        make_keys(Path(directory) / "keys")
        under_test = _transports(Path(directory) / "keys" / "executor")
        for model, block_bytes in SIZES.items():
            rows += _rows(under_test, model, block_bytes, arguments)
    print(f"{'transport':12} {'block of':22} {'blocks':>6} {'P50 ms':>8} {'P99 ms':>8} {'GB/s':>6}")
    for row in rows:
        print(
            f"{row['transport']:12} {row['model']:22} {row['blocks']:6} {row['p50_ms']:8.2f} {row['p99_ms']:8.2f} "
            f"{row['gb_per_s']:6.2f}"
        )
    result = {"benchmark": "block_transports", "load_average": os.getloadavg(), "rows": rows}
    write_result(arguments.json, result | provenance(arguments.seed))


def _transports(keys: Path) -> dict[str, TransportUnderTest]:
    tcp = f"{_MODULES}.tcp_transport:TcpTransport"
    port, own = {"block_address": "tcp://127.0.0.1:*"}, {"curve_keys": str(keys)}
    found = {
        "shm": TransportUnderTest(f"{_MODULES}.shm_transport:ShmTransport"),
        "tcp": TransportUnderTest(tcp, serving=port),
        "tcp, keys": TransportUnderTest(tcp, serving=port | own, pulling=own),
    }
    if importlib.util.find_spec("nixl") is not None:
        found["nixl"] = TransportUnderTest(f"{_MODULES}.nixl_transport:NixlTransport")
    return found


def _rows(
    under_test: dict[str, TransportUnderTest], model: str, block_bytes: int, arguments: Any
) -> list[dict[str, Any]]:
    """By turns: pull after pull, each transport once."""
    chance = np.random.default_rng(arguments.seed)
    with contextlib.ExitStack() as stack:
        pulls: dict[str, Callable[[Int32Array], float]] = {}
        for name, one in under_test.items():
            owner = stack.enter_context(TransportStage(one)).owner(arguments.pool, block_bytes)
            transport = one.puller_side()
            stack.callback(transport.close)
            pulls[name] = functools.partial(_time_ms, transport, owner)
        rows = []
        for num_blocks in arguments.blocks:
            times_ms: dict[str, list[float]] = {name: [] for name in pulls}
            for _ in range(_WARM_PULLS + arguments.pulls):
                blocks = chance.integers(0, arguments.pool, num_blocks, dtype=np.int32)
                for name, pull in pulls.items():
                    times_ms[name].append(pull(blocks))
            rows += [
                {"transport": name, "model": model, "block_bytes": block_bytes, "blocks": num_blocks}
                | _figures(found[_WARM_PULLS:], num_blocks * block_bytes)
                for name, found in times_ms.items()
            ]
    return rows


def _time_ms(transport: BlockTransport, owner: Owner, blocks: Int32Array) -> float:
    began = time.perf_counter()
    transport.pull(POOL, owner.address, blocks, block_bytes=owner.block_bytes, timeout_s=_TIMEOUT_S)
    return 1e3 * (time.perf_counter() - began)


def _figures(times_ms: list[float], num_bytes: int) -> dict[str, float]:
    p50_ms = statistics.median(times_ms)
    return {
        "p50_ms": round(p50_ms, 3),
        "p99_ms": round(sorted(times_ms)[math.ceil(0.99 * len(times_ms)) - 1], 3),
        "gb_per_s": round(num_bytes / p50_ms / 1e6, 3),
    }


if __name__ == "__main__":
    main()
