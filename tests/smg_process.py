"""The real smg in front of gateways, for tests: on loopback, and gone when the test is."""

import contextlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

_START_S = 30.0


@contextlib.contextmanager
def smg_before(*addresses: str, log: Path, flags: tuple[str, ...] = ()) -> Iterator[str]:
    """Run smg in front of the gateways at ``addresses``; yield the URL of its OpenAI API once it has their model."""
    port, metrics_port = _free_ports(2)
    command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--history-backend", "none"]
    command += ["--worker-urls", *(f"grpc://{address}" for address in addresses), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _wait_for_model(f"{url}/models", process, log)
            yield url
        finally:
            process.kill()  # It keeps nothing, and would wait for idle connections if it were asked.
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _wait_for_model(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(url, timeout=1.0) as answer,
        ):
            if b'"id"' in answer.read():
                return
        time.sleep(0.05)
    raise AssertionError(f"smg has no model within {_START_S:g} s:\n{log.read_text(errors='replace')[-4000:]}")
