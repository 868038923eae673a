"""The real smg in front of a gateway, for tests: on loopback, and gone when the test is."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.planning import openai_front

_START_S = 30.0


@contextlib.contextmanager
def smg_before(gateway_address: str, *, log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Run smg; yield the URL of its OpenAI API once it has the gateway's model."""
    port, metrics_port = free_ports(2)
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


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
