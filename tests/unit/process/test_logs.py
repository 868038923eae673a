"""What a process's log lines look like, in both formats."""

import json
import os

import pytest
import structlog

from headway_process.log_sink import LogSink
from headway_process.logs import configure, make_logger


@pytest.fixture
def written():
    """A sink, and a function that returns the lines written so far."""
    reader, writer = os.pipe()
    sink = LogSink(writer)

    def lines() -> list[str]:
        assert sink.drain(5)
        return os.read(reader, 1 << 16).decode().splitlines()

    yield sink, lines
    os.close(reader)


def test_a_line_of_json_has_process_level_time_and_what_is_told(written):
    sink, lines = written
    log = make_logger("scheduler", level="info", log_format="json", sink=sink)
    log.debug("not told")
    log.warning("request failed", request_id="r1", error='said "no"\nand more')
    (line,) = lines()
    told = json.loads(line)
    assert told.pop("timestamp").endswith("Z")
    assert told == {
        "event": "request failed",
        "level": "warning",
        "process": "scheduler",
        "request_id": "r1",
        "error": 'said "no"\nand more',
    }


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_an_exception_is_told_with_its_place(written, log_format):
    sink, lines = written
    log = make_logger("executor", level="info", log_format=log_format, sink=sink)
    try:
        raise RuntimeError("out of luck")
    except RuntimeError as error:
        log.exception("step failed", exc_info=error)
    text = "\n".join(lines())
    assert "RuntimeError: out of luck" in text
    assert "test_logs.py" in text


def test_what_a_call_has_bound_is_in_every_line_of_it(written):
    sink, lines = written
    before = structlog.get_config()
    configure("gateway", level="debug", log_format="json", sink=sink)
    try:
        log = structlog.get_logger("some module").bind()
        with structlog.contextvars.bound_contextvars(request_id="r1", trace_id="t1"):
            log.debug("generation accepted")
        log.debug("nobody's")
    finally:
        structlog.configure(**before)
    of_call, of_nobody = (json.loads(line) for line in lines())
    assert (of_call["request_id"], of_call["trace_id"], of_call["process"]) == ("r1", "t1", "gateway")
    assert "request_id" not in of_nobody
