"""``headway serve`` for a benchmark, as a user would start it.

Owns: starting it on a free port, waiting until it serves, ending it, and its metrics. Must not know: what is measured.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import headway
from headway.planning.plan import without_settings
from headway_process.free_ports import free_ports

if TYPE_CHECKING:
    import torch

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
READY = re.compile(r"headway is ready on (?P<address>\S+) ")
_STOP_S = 60.0
_TRIES = 100


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """Serve with these flags; yield the gateway's address. SIGTERM ends the server with the benchmark.

    Python keeps the compiled form of its sources, as where a wheel is installed, whatever this shell says.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    environment = without_settings(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [
        *(sys.executable, "-m", "headway", "serve", "--grpc-address", "127.0.0.1:0", "--log-level", "warning"),
        *flags,
    ]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as server,
    ):
        try:
            assert server.stdout is not None
            match = READY.match(server.stdout.readline())
            if match is None:
                log.seek(0)
                raise SystemExit(f"headway serve did not come up with {' '.join(flags)}:\n{log.read()}")
            yield match["address"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_STOP_S)


def write_random_model(
    directory: Path, seed: int, shape: Mapping[str, object], dtype: "torch.dtype | None" = None
) -> None:
    """Write a checkpoint of random weights in this shape, in float32 or ``dtype``, with the demo model's tokenizer."""
    from torch_cpu import write_checkpoint  # torch is slow to import, and few benchmarks need it

    write_checkpoint(directory, seed, dict(shape), **({} if dtype is None else {"dtype": dtype}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)


def row_of_free_ports(count: int) -> int:
    """Return the first of ``count`` free ports in a row."""
    for first in free_ports("127.0.0.1", _TRIES):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise SystemExit(f"no {count} free ports in a row")


def figures(text: str) -> dict[str, float]:
    """Return a page's metrics by name, summed over labels."""
    result: Counter[str] = Counter()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            with contextlib.suppress(ValueError):
                result[name.partition("{")[0]] += float(value)
    return dict(result)


def figures_at(port: int) -> dict[str, float]:
    """Return the metrics that a process of this machine serves on this port, as ``figures``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as answer:
        return figures(answer.read().decode())
