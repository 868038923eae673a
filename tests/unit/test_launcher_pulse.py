"""Signs of life between a child and its launcher."""

import os

from headway.pulse_watch import LOOK_INTERVAL_S, PulseWatch
from headway_process.pulse import PULSE_INTERVAL_S, PULSE_VARIABLE, Pulse, pulse_of


def test_a_child_that_falls_silent_is_named_once_and_one_that_never_spoke_is_not() -> None:
    watch = PulseWatch(hang_s=4 * LOOK_INTERVAL_S)
    speaks, stays_silent = watch.open("speaks"), watch.open("loads a model")
    assert [watch.look() for _ in range(10)] == [[]] * 10
    Pulse(speaks).beat(0.0)
    assert [watch.look() for _ in range(8)] == [[], [], [], [], ["speaks"], [], [], []]
    Pulse(speaks).beat(0.0)
    assert [watch.look() for _ in range(5)][-1] == ["speaks"]
    os.close(speaks)
    os.close(stays_silent)
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
