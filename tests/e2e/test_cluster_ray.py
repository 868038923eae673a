"""A deployment on Ray on this machine, a head and two nodes: it grows and shrinks with its load, and a node is lost.

It takes over a minute, most of it Ray's own.
"""

import asyncio
import importlib.util
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from e2e.running_server import eventually, finished, free_port
from headway.client import AsyncClient
from headway.cluster.local_ray import LocalRay

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra ray)"),
    pytest.mark.timeout(400),
]

NAME = f"t{os.getpid()}"
NUM_STREAMS = 16
NUM_TOKENS = 400
NUM_BEFORE_THE_LOSS = 30
MOST_PAUSE_S = 10
"""The promise of docs/cluster.md."""
PROMPTS = [random.Random(number).choices(range(1, 1000), k=40) for number in range(NUM_STREAMS)]
DEPLOYMENT = """
[serve]
grpc_address = "127.0.0.1:{port}"
metrics_port = 9464
[scheduler]
max_num_seqs = 16
[executor]
backend = "simulated"
backend_options = {{step_base_us = "10000"}}
max_num_seqs = 16
[[executors]]
min = 1
max = 2
[cluster]
name = "{name}"
nodes_here = 2
ready_s = 120
scale_up_wait_s = 0.1
scale_up_after_s = 0.5
scale_down_after_s = 3
"""


def headway_cluster(*words: str, timeout_s: float = 180.0):
    done = finished("cluster", *words, timeout_s=timeout_s)
    assert done.process.returncode == 0, "".join((*done.out, *done.err))
    return done


class Cluster:
    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def state(self) -> dict:
        (line,) = headway_cluster("status", "--config", self.file, "--json").out
        return msgspec.json.decode(line)

    def executors(self) -> dict[str, dict]:
        return {each["process"]: each for each in self.state()["processes"] if each["process"].startswith("executor")}

    async def executors_become(self, condition, timeout_s: float = 90.0) -> dict[str, dict]:
        found: dict[str, dict] = {}
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition(found):
            assert asyncio.get_running_loop().time() < deadline, self.state()
            found = await asyncio.to_thread(self.executors)
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Cluster, str]]:
    """Ended whatever happens: by the command, or else with its processes and files."""
    file, port = tmp_path / "deployment.toml", free_port()
    file.write_text(DEPLOYMENT.format(port=port, name=NAME))
    try:
        up = headway_cluster("up", "--config", str(file))
        assert f"headway cluster {NAME} is ready on 127.0.0.1:{port} (1 executor," in up.out[0]
        yield Cluster(file), f"127.0.0.1:{port}"
    finally:
        LocalRay(NAME).stop()


class Streams:
    """As many streams as there are prompts. None may stand still for longer than a loss of a node may last."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self.longest_pause_s = 0.0

    async def run(self) -> list[list[int]]:
        await asyncio.gather(*(self._follow(number) for number in range(len(PROMPTS))))
        return self.tokens

    async def _follow(self, number: int) -> None:
        options = {"seed": number, "temperature": 1.0, "ignore_eos": True}
        clock, last = asyncio.get_running_loop().time, 0.0
        async for delta in self._client.generate(PROMPTS[number], max_tokens=NUM_TOKENS, **options):
            assert delta.first_token_index == len(self.tokens[number]), "a token is missing or repeated"
            self.tokens[number] += delta.token_ids
            self.longest_pause_s = max(self.longest_pause_s, clock() - (last or clock()))
            last = clock()


class Load:
    """Three times what one executor runs at once, until it is called off."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.is_wanted = True

    async def run(self) -> list[list[list[int]]]:
        return [tokens for tokens in await asyncio.gather(*(self._repeat() for _ in range(3))) if tokens]

    async def _repeat(self) -> list[list[int]]:
        tokens: list[list[int]] = []
        while self.is_wanted:
            tokens = await Streams(self._client).run()
        return tokens


def both_run(found: dict[str, dict]) -> bool:
    return len(found) == 2 and all(each["state"] == "running" for each in found.values())


def raylet_of(process_id: int) -> psutil.Process:
    """The process of Ray that is the node: it started the actor, and the actor the process."""
    (raylet,) = (each for each in psutil.Process(process_id).parents() if each.name() == "raylet")
    return raylet


async def test_it_grows_with_the_load_loses_a_node_and_no_token_and_shrinks_again(
    cluster: tuple[Cluster, str],
) -> None:
    running, address = cluster
    async with AsyncClient(address) as client:
        expected = await Streams(client).run()
        assert all(len(each) == NUM_TOKENS for each in expected)

        load = Load(client)
        loading = asyncio.create_task(load.run())
        before = await running.executors_become(both_run)
        assert before["executor-0"]["node"] != before["executor-1"]["node"]
        load.is_wanted = False
        assert await loading == [expected] * 3

        streams = Streams(client)
        disturbed = asyncio.create_task(streams.run())
        await eventually(lambda: min(map(len, streams.tokens)) > NUM_BEFORE_THE_LOSS, 60)
        lost = psutil.Process(before["executor-1"]["pid"])
        earlier = await client.status()
        assert [each.num_running > 0 for each in earlier.executors] == [True, True]
        for process in (raylet_of(lost.pid), lost):  # Nobody is left to say goodbye to the scheduler.
            process.kill()
        assert not disturbed.done(), "the node was not lost in the middle"
        assert await disturbed == expected
        print(f"longest pause of a stream: {streams.longest_pause_s:.2f} s")  # noqa: T201
        assert streams.longest_pause_s < MOST_PAUSE_S
        status = await client.status()
        assert status.num_executor_losses > earlier.num_executor_losses
        assert status.num_moved >= earlier.num_moved + earlier.executors[1].num_running

        # Nothing to do: the lost one came back elsewhere or never, one is drained, and one goes on.
        after = await running.executors_become(lambda found: len(found) == 1)
        assert [each["state"] for each in after.values()] == ["running"]
        assert await Streams(client).run() == expected

    leaves_nothing_behind(running, address)


def leaves_nothing_behind(running: Cluster, address: str) -> None:
    state = running.state()
    places = [line.split()[-1] for line in state["events"] if "executor-1 is on node" in line]
    assert len(places) == 2, state["events"]
    assert places[0] != places[1], "it came back on the node that is gone"
    mine = [psutil.Process(each["pid"]) for each in state["processes"]]
    logs = [Path(each["log"]) for each in state["processes"]]
    metrics = [each["metrics"] for each in state["processes"]]
    assert all(log.is_file() for log in logs)
    assert all(metrics)
    for listener in (each for process in mine for each in process.net_connections("tcp") if each.status == "LISTEN"):
        assert listener.laddr.ip in {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    files = [word.partition("=")[2] for word in mine[0].cmdline() if word.startswith("--curve-keys=")]
    assert [oct(path.stat().st_mode & 0o77) for path in Path(files[0]).rglob("*.key*")] == ["0o0"] * 4

    assert headway_cluster("down", "--config", running.file).out == [f"headway cluster {NAME} is down\n"]
    _, still_alive = psutil.wait_procs(mine, timeout=10)
    assert not still_alive
    assert not Path(files[0]).parent.exists()
    assert not LocalRay(NAME).is_there
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=2):
        pass
