"""``headway top`` in a pseudo-terminal, beside a server of canned answers: keys, orders, troubles, and what is left behind."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest

from headway_proto import admin_pb2 as api
from headway_proto import admin_pb2_grpc as api_grpc

ALTERNATE_SCREEN, ORDINARY_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
_CONTROL_SEQUENCE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
PATIENCE_S = 30.0


class CannedAdmin(api_grpc.AdminServicer):
    """Answers as a busy scheduler would, and remembers what was ordered. ``refusal`` is what every call gets instead."""

    def __init__(self) -> None:
        self.state = "serving"
        self.orders: list[str] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None

    def _check(self, context):
        if self.refusal is not None:
            context.abort(*self.refusal)

    def GetStatus(self, request, context):  # noqa: N802
        self._check(context)
        return api.GetStatusResponse(scheduler_state=self.state, executor_state="ready", num_running=2, max_num_seqs=8)

    def ListRequests(self, request, context):  # noqa: N802
        return api.ListRequestsResponse(
            requests=[
                api.RequestState(request_id="older", tenant="名", state="running", age_ms=900),
                api.RequestState(request_id="newer", state="waiting", age_ms=100),
            ]
        )

    def Explain(self, request, context):  # noqa: N802
        return api.ExplainResponse(explanation="It waits behind 3 others: admission is paused.")

    def Cancel(self, request, context):  # noqa: N802
        if request.request_id == "newer":
            context.abort(grpc.StatusCode.NOT_FOUND, "request_id: 'newer' is not known")
        self.orders.append(f"cancel {request.request_id}")
        return api.CancelResponse()

    def Pause(self, request, context):  # noqa: N802
        self.orders.append("pause")
        self.state = "paused"
        return api.PauseResponse()

    def Resume(self, request, context):  # noqa: N802
        self.orders.append("resume")
        self.state = "serving"
        return api.ResumeResponse()

    def Drain(self, request, context):  # noqa: N802
        self.orders.append("drain")
        self.state = "draining"
        return api.DrainResponse()

    def DrainExecutor(self, request, context):  # noqa: N802
        if request.executor > 1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "executor: 7 is not known; allowed: 0, 1")
        self.orders.append(f"drain executor {request.executor}")
        return api.DrainExecutorResponse()

    def UndrainExecutor(self, request, context):  # noqa: N802
        self.orders.append(f"use executor {request.executor}")
        return api.UndrainExecutorResponse()

    def SetExecutorRole(self, request, context):  # noqa: N802
        self.orders.append(f"executor {request.executor}: {request.role}")
        return api.SetExecutorRoleResponse()


class CannedServer:
    """Serves a ``CannedAdmin`` on a port of loopback that stays the same when it is started again."""

    def __init__(self) -> None:
        self.admin = CannedAdmin()
        self._port = 0
        self.start()

    def start(self) -> None:
        self._server = grpc.server(ThreadPoolExecutor(4))
        api_grpc.add_AdminServicer_to_server(self.admin, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"


@pytest.fixture
def server() -> Iterator[CannedServer]:
    running = CannedServer()
    yield running
    running.stop()


class Terminal:
    """A pseudo-terminal of 80 by 24 with ``headway top`` on it."""

    def __init__(self, address: str, *flags: str, with_keys: bool = True) -> None:
        self._master, self.descriptor = pty.openpty()
        self.resize(rows=24, columns=80)
        self.mode_before = termios.tcgetattr(self.descriptor)
        kept = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headway", "top", "--address", address, "--interval", "0.1", *flags],
            stdin=self.descriptor if with_keys else subprocess.DEVNULL,
            stdout=self.descriptor,
            stderr=self.descriptor,
            env={**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        self.output = b""

    def resize(self, *, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type; forget what was drawn before, so that what is waited for next is a consequence."""
        self._read()
        self.output = b""
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> str:
        """Wait until it is on the screen; return all that was drawn since the last key, without control sequences."""
        return self._wait(lambda: text in self._shown(), text)

    def wait_for_bytes(self, data: bytes) -> None:
        self._wait(lambda: data in self.output, repr(data))

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        self._wait(lambda: self.process.poll() is not None, "the end")
        self._read()
        return self.process.returncode

    def assert_is_as_before(self) -> None:
        assert self.output.rindex(ORDINARY_SCREEN) > self.output.rfind(ALTERNATE_SCREEN)
        assert self.output.rindex(b"\x1b[?25h") > self.output.rfind(b"\x1b[?25l"), "the cursor is shown"
        assert termios.tcgetattr(self.descriptor) == self.mode_before

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.descriptor)

    def _wait(self, condition, what: str) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}; there is: {self._shown()}"
            self._read()
        return self._shown()

    def _read(self) -> None:
        while select.select([self._master], [], [], 0.02)[0]:
            self.output += os.read(self._master, 65536)

    def _shown(self) -> str:
        return _CONTROL_SEQUENCE.sub(b"", self.output).decode("utf-8", "replace")


@contextlib.contextmanager
def top(address: str, *flags: str, with_keys: bool = True) -> Iterator[Terminal]:
    terminal = Terminal(address, *flags, with_keys=with_keys)
    try:
        yield terminal
    finally:
        terminal.close()


def test_keys_steer_the_server(server):
    with top(server.address) as terminal:
        terminal.wait_for("older")
        terminal.press("p")
        terminal.wait_for("paused: waiting requests are not admitted")
        terminal.press("r")
        terminal.wait_for("resumed")
        assert server.admin.orders == ["pause", "resume"]

        terminal.press("d")
        terminal.wait_for("drain? New requests will be refused")
        terminal.press("n")
        terminal.wait_for("drain: not done")
        assert server.admin.orders == ["pause", "resume"]
        terminal.press("dy")
        terminal.wait_for("draining: new requests are refused")
        assert server.admin.orders == ["pause", "resume", "drain"]

        terminal.press("j")
        terminal.wait_for("> older")
        terminal.press("e")
        terminal.wait_for("older: It waits behind 3 others: admission is paused.")
        terminal.press("\x1b")
        terminal.wait_for("> older")
        terminal.press("c")
        terminal.wait_for("cancel older? y/n")
        terminal.press("y")
        terminal.wait_for("cancelled older")
        assert server.admin.orders[3:] == ["cancel older"]

        terminal.press("\x1b[B")
        terminal.wait_for("> newer")
        terminal.press("cy")
        terminal.wait_for("cancel: NOT_FOUND: request_id: 'newer' is not known")
        terminal.press("q")
        assert terminal.end() == 0
        terminal.assert_is_as_before()


def test_keys_drain_one_executor_and_give_it_a_role(server):
    with top(server.address) as terminal:
        terminal.wait_for("older")
        terminal.press("x1")
        terminal.wait_for("drain executor, by its number and Enter: 1_")
        terminal.press("\r")
        terminal.wait_for("executor 1 is draining")
        terminal.press("u1\r")
        terminal.wait_for("executor 1 takes requests again")
        assert server.admin.orders == ["drain executor 1", "use executor 1"]
        terminal.press("o1d")
        terminal.wait_for("executor 1 has the role decode")
        assert server.admin.orders[2:] == ["executor 1: decode"]
        terminal.press("x7\r")
        terminal.wait_for("drain executor: FAILED_PRECONDITION: executor: 7 is not known; allowed: 0, 1")
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_it_and_leaves_the_terminal_as_it_was(server, number):
    with top(server.address) as terminal:
        terminal.wait_for("older")
        terminal.wait_for_bytes(ALTERNATE_SCREEN)
        assert termios.tcgetattr(terminal.descriptor) != terminal.mode_before
        terminal.process.send_signal(number)
        assert terminal.end() == 128 + number
        terminal.assert_is_as_before()


def test_a_suspended_view_gives_the_terminal_back_and_takes_it_again(server):
    with top(server.address) as terminal:
        terminal.wait_for("older")
        terminal.process.send_signal(signal.SIGTSTP)
        deadline = time.monotonic() + PATIENCE_S
        while psutil.Process(terminal.process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        terminal.wait_for_bytes(ORDINARY_SCREEN)
        terminal.assert_is_as_before()
        terminal.output = b""
        terminal.process.send_signal(signal.SIGCONT)
        terminal.wait_for_bytes(ALTERNATE_SCREEN)
        terminal.wait_for("older")
        terminal.press("q")
        assert terminal.end() == 0
        terminal.assert_is_as_before()


def test_a_server_that_goes_away_is_told_and_comes_back_by_itself(server):
    with top(server.address) as terminal:
        terminal.wait_for("older")
        server.stop()
        terminal.wait_for("no answer for")
        terminal.wait_for("UNAVAILABLE")
        terminal.press("p")
        terminal.wait_for("pause: UNAVAILABLE")
        server.start()
        terminal.press("?")
        terminal.wait_for("serving")
        terminal.press("q")
        assert terminal.end() == 0


def test_a_terminal_that_grows_is_used(server):
    with top(server.address) as terminal:
        terminal.wait_for("older")
        assert "policies" not in terminal.wait_for("newer")
        terminal.resize(rows=45, columns=130)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.wait_for("policies")
        terminal.wait_for("computed")
        terminal.press("q")
        assert terminal.end() == 0


def test_without_a_terminal_on_stdin_it_shows_and_takes_no_keys(server):
    with top(server.address, "--no-color", with_keys=False) as terminal:
        terminal.wait_for("keys are off")
        terminal.wait_for("older")
        assert not re.search(rb"\x1b\[[0-9;]*3[0-7]m", terminal.output), "no colours"
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "the token needs the role admin (PERMISSION_DENIED: not yours)"),
        (
            grpc.StatusCode.UNAUTHENTICATED,
            "the server wants a token with the role admin; name its file with --token-file (UNAUTHENTICATED: not yours)",
        ),
        (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE: not yours"),
    ],
)
def test_a_server_that_refuses_is_one_line_and_no_screen(server, code, message):
    server.admin.refusal = code, "not yours"
    with top(server.address) as terminal:
        assert terminal.end() == 1
        assert terminal.output.decode() == f"headway top: {server.address}: {message}\r\n"


def test_where_nothing_can_be_drawn_once_is_named(server):
    finished = subprocess.run(
        [sys.executable, "-m", "headway", "top", "--address", server.address],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 2
    assert finished.stderr == (
        "headway top: stdout is no terminal that can be drawn on; give --once for one screen as text\n"
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_once_is_plain_text_in_whatever_the_output_takes(server, encoding):
    finished = subprocess.run(
        [sys.executable, "-m", "headway", "top", "--once", "--interval", "0.1", "--address", server.address],
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "80", "LINES": "24", "FORCE_COLOR": "1"},
    )
    lines = finished.stdout.decode(encoding).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert b"\x1b" not in finished.stdout
    assert any(line.startswith("  older") for line in lines)
    assert "█" in finished.stdout.decode() or encoding == "ascii"


def test_a_list_is_not_asked_for_while_more_are_live_than_allowed(server):
    with top(server.address, "--max-listed", "1") as terminal:
        assert "older" not in terminal.wait_for("too many are live to list them")
        terminal.press("q")
        assert terminal.end() == 0
