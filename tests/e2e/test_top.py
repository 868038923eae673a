"""``headway top`` beside ``headway serve``, as a user has them, and the same orders from the Python client."""

import pytest

from e2e.running_server import command, finished, wait_until
from headway.client import Client, NotFoundError, UnavailableError

SERVE = (
    "serve",
    *("--backend", "simulated", "--grpc-address", "127.0.0.1:0"),
    *("--backend-option", "step_base_us=2000", "--max-num-seqs", "2"),
)


def test_a_busy_server_on_one_screen_and_in_hand():
    with command(*SERVE) as server:
        address = server.wait_for_ready()
        with Client(address) as client:
            streams = [
                client.generate("one two three", max_tokens=900, ignore_eos=True, request_id=name, tenant="blue")
                for name in ("first", "second", "third")
            ]
            wait_until(lambda: client.status().num_output_tokens > 20, 30, "tokens")
            shown = finished("top", "--once", "--interval", "0.3", "--address", address, COLUMNS="80", LINES="24")
            assert shown.process.returncode == 0, shown.err
            _assert_tells_of_load(shown.out, address)
            _assert_the_client_can_do_what_keys_do(client)
            for stream in streams:
                stream.cancel()
        assert server.stop() == 0


def _assert_tells_of_load(lines: list[str], address: str) -> None:
    assert max(map(len, lines)) <= 80 + len("\n")
    assert len(lines) <= 24
    text = "".join(lines)
    assert lines[0].startswith(f"headway top   {address}   serving   1 gateway")
    assert "ready   demo on simulated" in text
    assert "2 of 2   1 waiting (0 preempted)" in text
    (tenant,) = [line.split() for line in lines if line.startswith("blue")]
    assert tenant[1:3] == ["2", "1"]
    assert tenant[-1] == "100.0%"
    assert float(tenant[-2].replace(",", "")) > 0
    states = {line.split()[0]: line.split()[1] for line in lines[-3:]}
    assert sorted(states) == ["first", "second", "third"]
    assert sorted(states.values()) == ["running", "running", "waiting"]


def _assert_the_client_can_do_what_keys_do(client: Client) -> None:
    client.pause()
    assert client.status().scheduler_state == "paused"
    (waiting,) = [request for request in client.requests() if request.state == "waiting"]
    assert "admission is paused" in client.explain(waiting.request_id).explanation
    client.resume()
    assert client.status().scheduler_state == "serving"
    with pytest.raises(NotFoundError):
        client.explain("nobody")
    client.drain()
    assert client.status().scheduler_state == "draining"
    with pytest.raises(UnavailableError):
        client.generate("refused", max_tokens=1).result()
