"""Requests that kill executors, fail steps or lose devices, against real processes: each fails alone, and soon."""

import threading

import pytest

from e2e.running_server import command
from headway import Client

POISON = 3999
SIMULATED = ("--backend", "simulated", "--grpc-address", "127.0.0.1:0")


@pytest.mark.parametrize("how", ["kill_on_token", "fail_on_token", "lose_device_on_token"])
def test_one_bad_request_fails_alone(how: str) -> None:
    options = ("--backend-option", f"{how}={POISON}", "--backend-option", "step_base_us=2000")
    with command("serve", *SIMULATED, *options) as server:
        address = server.wait_for_ready()
        prompts = [[number + 1, 2, 3] for number in range(6)]
        with Client(address) as client:
            expected = [
                client.generate(p, max_tokens=200, temperature=0, ignore_eos=True).result().token_ids for p in prompts
            ]
        found: dict[int, list[int]] = {}

        def stream(number: int) -> None:
            with Client(address) as own:
                found[number] = list(
                    own.generate(prompts[number], max_tokens=200, temperature=0, ignore_eos=True).result().token_ids
                )

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(len(prompts))]
        for thread in threads:
            thread.start()
        with Client(address) as client:
            guilty = client.generate([5, POISON, 6], max_tokens=20, temperature=0, ignore_eos=True).result()
        for thread in threads:
            thread.join(60)
        assert guilty.completions[0].finish_reason == "error"
        assert "4 times in a row while it ran" in guilty.completions[0].error
        assert [found[number] for number in range(len(prompts))] == [list(tokens) for tokens in expected]
        num_restarts = sum("starting it again" in line for line in server.err)
        assert num_restarts == (0 if how == "fail_on_token" else 4), server.err
        assert server.stop() == 0
    if how == "lose_device_on_token":
        assert sum("executor ended (exit code 4)" in line for line in server.err) == 4
