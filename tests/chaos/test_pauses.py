"""Processes that stand still and go on: a debugger, ``docker pause``, a machine that swaps.

Owns: the rows of the table about SIGSTOP of each process, alone and in pairs. Must not know: how the product recovers.

A stack is one served model. Several run at the same time, each with a victim of its own that sleeps for one length after
the other, because nearly all of the time is spent asleep.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from chaos.harness import Oracle, Traffic, deployed, until_quiet
from e2e.running_server import command, free_port
from headway.client import AsyncClient

SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=30000")
LENGTHS_S = (1.0, 5.0, 12.0, 30.0)
SERVING_WITHIN_S = 2.0
MOST_LAG_S = 0.3


@dataclass(frozen=True)
class Stack:
    """One served model: ``pids`` are its processes now, by name."""

    pids: Callable[[], dict[str, int]]
    client: AsyncClient


@contextlib.asynccontextmanager
async def served(directory: Path) -> AsyncIterator[Stack]:
    """``headway serve``, over Unix sockets; its launcher replaces who is silent for 15 s."""
    await asyncio.to_thread(directory.mkdir)
    with command("serve", *SIMULATED, "--grpc-address", "127.0.0.1:0", TMPDIR=str(directory)) as server:
        address = await asyncio.to_thread(server.wait_for_ready)

        def pids() -> dict[str, int]:
            return {"launcher": server.process.pid} | {name: child.pid for name, child in server.children().items()}

        async with AsyncClient(address) as client:
            yield Stack(pids, client)
            await until_quiet(client)
        assert await asyncio.to_thread(server.stop) == 0
        assert [line for line in server.err if "Traceback" in line] == []


@contextlib.asynccontextmanager
async def over_tcp(directory: Path) -> AsyncIterator[Stack]:
    """The same without a launcher, over TCP, where a silent peer is given up within a second."""
    del directory
    step, ingress = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    addresses = {
        "scheduler": ["--step-address", step, "--ingress-address", ingress],
        "executor": ["--step-address", step],
        "gateway": ["--ingress-address", ingress],
    }
    async with deployed(executor=SIMULATED, addresses=addresses) as (processes, client):
        yield Stack(lambda: {name: process.pid for name, process in processes.processes.items()}, client)


async def _slept(stack: Stack, names: Sequence[str], length_s: float, traffic: Traffic, rng: random.Random) -> str:
    """Stop them all and let them go on, one after the other; how long it took from then until every stream went on."""
    before = stack.pids()
    order = rng.sample(names, len(names))
    for name in order:
        psutil.Process(before[name]).suspend()
    await asyncio.sleep(length_s)
    for name in rng.sample(names, len(names)):
        await asyncio.sleep(rng.uniform(0, MOST_LAG_S) if name != order[0] else 0.0)
        with contextlib.suppress(psutil.NoSuchProcess):  # replaced meanwhile
            psutil.Process(before[name]).resume()
    delay_s = await traffic.recovered(time.monotonic())
    after = stack.pids()
    replaced = [name for name in names if after.get(name) != before[name]]
    assert delay_s <= SERVING_WITHIN_S, f"{names} slept {length_s:g} s: {delay_s:.2f} s until every stream went on"
    return f"{delay_s:.2f} s" + (f" ({' and '.join(replaced)} replaced)" if replaced else "")


async def _one_stack(kind, names, lengths_s: Sequence[float], directory: Path, seed: str, **sizes) -> str:
    rng = random.Random(seed)
    async with kind(directory) as stack:
        async with Traffic(stack.client, 4, rng, **sizes) as traffic:
            told = []
            for length_s in lengths_s:
                told.append(await _slept(stack, names, length_s, traffic, rng))
                await asyncio.sleep(rng.uniform(0.2, 1.0))
        return f"{' and '.join(names)}: {', '.join(told)} ({traffic.assert_exact(Oracle())})"


ALONE = [("scheduler",), ("executor",), ("gateway",), ("launcher",)]
PAIRS = [("scheduler", "executor"), ("scheduler", "gateway"), ("executor", "gateway"), ("launcher", "scheduler")]


@pytest.mark.chaos_full
@pytest.mark.parametrize(
    ("kind", "victims"),
    [
        pytest.param(served, ALONE, id="serve-alone"),
        pytest.param(served, PAIRS, id="serve-pairs"),
        pytest.param(over_tcp, ALONE[:3], id="tcp-alone"),
        pytest.param(over_tcp, PAIRS[:3], id="tcp-pairs"),
    ],
)
async def test_processes_that_sleep(kind, victims, row, rng, tmp_path):
    lengths = ", ".join(f"{length_s:g}" for length_s in LENGTHS_S)
    link = "headway serve" if kind is served else "processes over TCP"
    row.about(
        f"{link}: SIGSTOP of {'; '.join(' and '.join(names) for names in victims)} for {lengths} s, 4 streams each",
        f"serving again within {SERVING_WITHIN_S:g} s of going on, or replaced; nothing lost",
    )
    async with asyncio.TaskGroup() as group:
        stacks = [
            group.create_task(_one_stack(kind, names, LENGTHS_S, tmp_path / "-".join(names), str(rng.random())))
            for names in victims
        ]
    for stack in stacks:
        row.note(stack.result())


@pytest.mark.chaos_quick
async def test_a_scheduler_that_sleeps(row, rng, tmp_path):
    row.about("processes over TCP: SIGSTOP of the scheduler for 2 s, twice", "serving again within 2 s of going on")
    row.note(await _one_stack(over_tcp, ALONE[0], (2.0, 2.0), tmp_path / "stack", str(rng.random()), output=(20, 40)))
