"""Logs: whatever happens to the file descriptor, whoever logs goes on at once."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headway_process.log_sink import LogSink, notice_of


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def test_lines_arrive_in_order(pipe: tuple[int, int]) -> None:
    sink = LogSink(pipe[1])
    for number in range(100):
        sink.write(f"{number}\n")
    assert sink.drain(5)
    assert os.read(pipe[0], 10_000).decode().split() == [str(number) for number in range(100)]
    assert sink.num_dropped == 0


def test_a_pipe_that_nobody_reads_delays_nobody_and_the_loss_is_told_later(pipe: tuple[int, int]) -> None:
    sink = LogSink(pipe[1], max_lines=100)
    started = time.monotonic()
    for _ in range(5000):
        sink.write("x" * 999 + "\n")
    assert time.monotonic() - started < 1
    assert sink.num_dropped > 4000
    assert not sink.drain(0.05)
    received, told, deadline = b"", 0, time.monotonic() + 20
    while told != sink.num_dropped:
        assert time.monotonic() < deadline, f"{told} lines told of, {sink.num_dropped} dropped"
        sink.write("more\n")
        received += os.read(pipe[0], 1 << 20)
        # In one notice, or in several.
        told = sum(int(line.split()[0]) for line in received.splitlines() if line.endswith(b"log lines were dropped"))


def test_a_closed_pipe_is_only_counted(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    sink = LogSink(pipe[1])
    sink.write("one\n")
    assert sink.drain(5)
    assert sink.num_dropped == 1


def test_a_full_disk_is_only_counted() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    sink = LogSink(fd)
    sink.write("one\n")
    assert sink.drain(5)
    sink.write("two\n")
    assert sink.drain(5)
    assert sink.num_dropped == 2


def test_a_process_ends_although_its_log_hangs() -> None:
    program = (
        "import sys; from headway_process.log_sink import LogSink\n"
        "sink = LogSink(2)\n"
        "for _ in range(300): sink.write('x' * 1000 + chr(10))\n"
        "sink.drain(0.1); sys.exit(7)"
    )
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", program], stderr=writer)
    try:
        assert process.wait(20) == 7
    finally:
        process.kill()
        os.close(reader)
        os.close(writer)


def test_the_notice_is_a_line_of_the_log() -> None:
    assert json.loads(notice_of("json").format(3)) == {"event": "log lines were dropped", "lines": 3}
    assert notice_of("console").format(3) == "3 log lines were dropped\n"
