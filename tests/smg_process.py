"""The real smg in front of a gateway, for tests: on loopback, and gone when the test is."""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.planning import openai_front
from headway_process.free_ports import free_ports

_START_S = 30.0


@contextlib.contextmanager
def smg_before(gateway_address: str, *, log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Run smg; yield the URL of its OpenAI API once it has the gateway's model."""
    port, metrics_port = free_ports("127.0.0.1", 2)
    address = f"127.0.0.1:{port}"
    command = openai_front.command(
        openai_address=address, gateway_addresses=[gateway_address], metrics_port=metrics_port, grace_s=1.0, flags=flags
    )
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _START_S
            while not openai_front.is_serving(address):
                assert time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
                assert process.poll() is None, log.read_text(errors="replace")[-4000:]
                time.sleep(0.05)
            yield f"http://{address}/v1"
        finally:
            process.kill()  # It keeps nothing, and would wait for idle connections if it were asked.
            process.wait()
