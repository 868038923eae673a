"""``headway serve`` for a benchmark, as a user would start it.

Owns: starting it on a free port, waiting until it serves, and ending it. Must not know: what is measured.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import headway
from headway.plan import without_settings

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
_READY = re.compile(r"headway is ready on (?P<address>\S+) ")
_STOP_S = 60.0


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """Serve with these flags; yield the gateway's address. SIGTERM ends the server with the benchmark."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    environment = without_settings(os.environ)
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
            match = _READY.match(server.stdout.readline())
            if match is None:
                log.seek(0)
                raise SystemExit(f"headway serve did not come up with {' '.join(flags)}:\n{log.read()}")
            yield match["address"]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(_STOP_S)


def write_random_model(directory: Path, seed: int, shape: Mapping[str, object]) -> None:
    """Write a checkpoint of random weights in this shape, with the demo model's tokenizer."""
    from torch_cpu import write_checkpoint  # torch is slow to import, and few benchmarks need it

    write_checkpoint(directory, seed, dict(shape))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)
