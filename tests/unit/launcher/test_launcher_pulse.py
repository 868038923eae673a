"""Signs of life between a child and its launcher."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from headway.running import fleet_runner
from headway.running.fleet_runner import FleetOrders, FleetRunner
from headway.running.pulse_watch import LOOK_INTERVAL_S, PulseWatch
from headway.running.supervision import RestartPolicy
from headway_process.pulse import PULSE_INTERVAL_S, PULSE_VARIABLE, Pulse, pulse_of


def test_a_child_that_falls_silent_is_named_once_and_one_that_never_spoke_is_not() -> None:
    watch = PulseWatch(hang_s=4 * LOOK_INTERVAL_S)
    speaks, stays_silent = watch.open("speaks"), watch.open("loads a model")
    assert [watch.look() for _ in range(10)] == [[]] * 10
    assert watch.num_begun() == 0
    Pulse(speaks).beat(0.0)
    assert watch.num_begun() == 1
    assert [watch.look() for _ in range(8)] == [[], [], [], [], ["speaks"], [], [], []]
    Pulse(speaks).beat(0.0)
    assert [watch.look() for _ in range(5)][-1] == ["speaks"]
    assert watch.num_begun() == 1
    os.close(speaks)
    os.close(stays_silent)
    assert watch.num_begun() == 2
    watch.close("speaks")
    watch.close("loads a model")
    assert watch.look() == []


def test_nobody_is_named_where_that_is_not_wanted() -> None:
    watch = PulseWatch(hang_s=0)
    fd = watch.open("one")
    Pulse(fd).beat(0.0)
    assert [watch.look() for _ in range(100)] == [[]] * 100
    os.close(fd)
    watch.close("one")


def test_a_pulse_is_cheap_never_blocks_and_is_not_handed_down() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    environment = {PULSE_VARIABLE: str(writer), "HOME": "/"}
    pulse = pulse_of(environment)
    assert environment == {"HOME": "/"}
    for tick in range(100):
        pulse.beat(tick * PULSE_INTERVAL_S / 10)
    assert len(os.read(reader, 1000)) == 10
    for tick in range(1 << 17):
        pulse.beat(1e3 + tick)
    os.close(reader)
    pulse.beat(1e9)
    os.close(writer)
    pulse_of({}).beat(0.0)


async def test_with_one_core_a_process_starts_when_the_one_before_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_runner, "_HEAD_START_LOOKS", 3000)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    sign = f"os.write(int(os.environ[{PULSE_VARIABLE!r}]), b'.')"
    first = f"import os, time; open({str(gate)!r}).read(); {sign}; time.sleep(60)"
    orders = FleetOrders(
        commands={"first": [sys.executable, "-c", first], "second": ["sleep", "60"]},
        stop_stages=[{"first": 5.0, "second": 5.0}],
        restart_policy=RestartPolicy(),
        hang_s=0,
        directory=tmp_path,
        environment=os.environ,
        num_cores=1,
    )
    runner = FleetRunner(orders, lambda _: None)
    running = asyncio.create_task(runner.run())
    opened = await asyncio.to_thread(gate.open, "w")  # the first process runs, and is silent
    await asyncio.sleep(0.1)
    assert runner.process_id("second") is None
    opened.close()
    for _ in range(1000):
        await asyncio.sleep(0.01)
        if runner.process_id("second") is not None:
            break
    else:
        raise AssertionError("the second process has not started")
    runner.ask_to_stop(signal.SIGTERM)
    assert await running == 0
