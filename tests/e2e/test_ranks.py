"""``headway serve`` with executors of several ranks, as real processes: the streams of one rank, also when ranks die."""

import asyncio
import contextlib
import hashlib
import os
import random
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from chaos.harness import Oracle, Process, assert_equal_to_undisturbed, deployment, jobs, shared_memory
from e2e.running_server import Command, command, eventually, free_port, sockets_in
from headway.client import AsyncClient
from served import figures_at, row_of_free_ports

NUM_STREAMS = 16
SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=10000")
SUPERVISED = (
    *("--grpc-address", "127.0.0.1:0"),
    *("--hang-s", "4", "--max-restarts", "1000", "--restart-window-s", "0.1"),
)


def ranks_of(server: Command) -> dict[int, psutil.Process]:
    """The processes of the executor, by rank."""
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[4:5] == ["executor"]:
                found[int(process.environ().get("RANK", "0"))] = process
    return found


def num_joined(server: Command) -> int:
    return sum("reason='an executor joined'" in line for line in server.err)


def pools_of(server: Command) -> list[str]:
    """The files of its ranks in shared memory, where others of this machine have theirs too."""
    (address,) = {found for line in server.err for found in re.findall(r"scheduler ready.* step_address=(\S+)", line)}
    places = [address, *(f"{address} rank {rank}" for rank in range(8))]
    digests = [hashlib.sha256(f"{os.geteuid()} {place}".encode()).hexdigest()[:12] for place in places]
    return [name for name in shared_memory() if any(name.startswith(f"headway-{digest}") for digest in digests)]


@contextlib.contextmanager
def serving(directory: Path, *flags: str, fails_steps: bool = False, **environment: str):
    """A server of which nothing is left afterwards. With ``fails_steps``, a rank's loss is an error of a step elsewhere."""
    with command("serve", *SUPERVISED, *flags, TMPDIR=str(directory), **environment) as server:
        yield server
        started = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        assert [process for process in started if process.is_running()] == []
    assert sockets_in(directory) == []
    assert pools_of(server) == []
    assert fails_steps or [line for line in server.err if "Traceback" in line] == []


async def lose(server: Command, rank: int, number: signal.Signals, moment_s: float, seed: int) -> None:
    """Run streams, lose a rank meanwhile, and compare every token."""
    async with AsyncClient(server.wait_for_ready()) as client:
        streams = jobs(NUM_STREAMS, random.Random(seed), output=(60, 90))
        joined = num_joined(server)
        running = asyncio.gather(*(stream.follow(client) for stream in streams))
        await asyncio.sleep(moment_s)
        victim = ranks_of(server)[rank]
        victim.send_signal(number)
        await running
        assert_equal_to_undisturbed(streams, Oracle())
        await eventually(lambda: num_joined(server) > joined, 30.0)
        assert not victim.is_running()


LOSSES = [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)]
MORE_LOSSES = [(rank, number) for rank in range(4) for number in (signal.SIGKILL, signal.SIGSTOP)]


@pytest.mark.parametrize(
    ("degrees", "losses"),
    [
        pytest.param((2, 1), LOSSES[:3], id="two"),
        pytest.param((1, 2), LOSSES, id="two stages", marks=pytest.mark.deep),
        pytest.param((2, 2), MORE_LOSSES, id="four", marks=pytest.mark.deep),
    ],
)
async def test_streams_are_those_of_one_rank_also_when_ranks_die(
    degrees: tuple[int, int], losses: list[tuple[int, signal.Signals]], tmp_path: Path
) -> None:
    size = degrees[0] * degrees[1]
    flags = (*SIMULATED, "--tensor-parallel", str(degrees[0]), "--pipeline-parallel", str(degrees[1]))
    with serving(tmp_path, *flags) as server:
        assert server.wait_for_ready()
        assert sorted(ranks_of(server)) == list(range(size))
        assert len(pools_of(server)) == size
        draw = random.Random(size)
        for rank, number in losses:
            await eventually(lambda: len(ranks_of(server)) == size)
            await lose(server, rank, number, draw.uniform(0.05, 0.8), rank)
        said = "".join(server.err)
        assert "rank 1 ended (signal 9)" in said
        assert "rank 1 gives no sign of life" in said
        assert "executor ended (exit code 4)" in said


async def test_blocks_on_the_host_outlive_their_ranks(tmp_path: Path) -> None:
    """Each rank takes over its own pool; a block counts where all ranks have their part."""
    pool = ("--num-kv-blocks", "96", "--max-model-len", "256", "--preemption", "swap", "--no-enable-prefix-caching")
    port = row_of_free_ports(3)
    with serving(tmp_path, *SIMULATED, *pool, "--tensor-parallel", "2", "--metrics-port", str(port)) as server:
        async with AsyncClient(await asyncio.to_thread(server.wait_for_ready)) as client:
            streams = jobs(NUM_STREAMS, random.Random(5), prompt=(60, 100), output=(120, 150))
            running = asyncio.gather(*(stream.follow(client) for stream in streams))
            await eventually(lambda: figures_at(port)["headway_swapped_out_blocks_total"] >= 20)
            ranks_of(server)[1].kill()
            await running
            assert_equal_to_undisturbed(streams, Oracle())
            assert figures_at(port)["headway_pulled_tokens_total"] > 0
            first = figures_at(port + 1)
            assert first["headway_executor_ranks"] == 2
            assert first["headway_executor_rank_steps_total"] > 0
            assert first["headway_executor_relayed_bytes_total"] > 0


def test_a_rank_that_cannot_open_its_model_ends_all_with_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    words = ("--backend", "simulated", "--model", str(model), "--tensor-parallel", "2")
    with command("executor", *words, "--step-address", "tcp://127.0.0.1:1") as running:
        assert running.wait() == 3
    (line,) = (line for line in running.err if line.startswith("headway executor:"))
    assert "its config.json cannot be read" in line
    assert [line for line in running.err if "Traceback" in line] == []


def test_serve_starts_its_own_ranks_also_below_torchrun(tmp_path: Path) -> None:
    inherited = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}
    with command(
        "serve", *SUPERVISED, *SIMULATED, "--pipeline-parallel", "2", TMPDIR=str(tmp_path), **inherited
    ) as server:
        assert server.wait_for_ready()
        assert sorted(ranks_of(server)) == [0, 1]
        assert server.stop() == 0


def test_a_rank_0_that_is_killed_takes_a_stopped_rank_with_it(tmp_path: Path) -> None:
    words = ("--backend", "simulated", "--tensor-parallel", "2", "--step-address", "tcp://127.0.0.1:1")
    with command("executor", *words, "--host-pool", "private", TMPDIR=str(tmp_path)) as running:
        psutil_of = psutil.Process(running.process.pid)
        asyncio.run(eventually(lambda: any("executor ready" in line for line in running.err), 60.0))
        (child,) = psutil_of.children()
        child.suspend()
        running.process.kill()
        child.wait(10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
async def test_torchrun_starts_all_ranks_and_starts_them_again(tmp_path: Path) -> None:
    async with deployment(executor=(*SIMULATED, "--tensor-parallel", "2")) as processes:
        words = (
            *(
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(free_port()),
            ),
            *("--max-restarts", "5", "--no-python", sys.executable, "-m", "headway", "executor"),
        )
        of_ranks = [*processes.addresses["executor"], *processes.flags["executor"]]
        agent = Process([*words, *of_ranks], extra_environment={"TMPDIR": str(tmp_path)})
        try:
            async with await processes.serve(("scheduler", "gateway")) as client:
                streams = jobs(8, random.Random(9), output=(100, 120))
                running = asyncio.gather(*(stream.follow(client) for stream in streams))
                await eventually(lambda: all(stream.times for stream in streams), 60.0)
                first, second = psutil.Process(agent.pid).children()
                assert (first.environ()["RANK"], second.environ()["RANK"]) == ("0", "1")
                second.kill()
                await running
                assert_equal_to_undisturbed(streams, Oracle())
        finally:
            agent.signal(signal.SIGTERM)
            agent.wait(30)
        assert sum("executor ready" in line for _, line in agent.lines) == 2
