"""Owners and pullers for a case, and their end.

Owns: the owners' processes, a thread for each puller, the clock of every pull. Must not know: what a case proves.
"""

import contextlib
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from headway_conformance.block_transports.owner import Announced, Order, Start
from headway_conformance.block_transports.under_test import TransportUnderTest
from headway_conformance.failures import ConformanceFailure, require
from headway_executor.block_store.transport import BlockTransport, PulledBlocks, PullError

POOL = "conformance-pool"
TIMEOUT_S = 5.0
"""For pulls that must succeed, on a machine that does other things too."""
SHORT_TIMEOUT_S = 0.5
GRACE_S = 1.0
"""A pull may take so much longer than its time-out."""
_START_S = 60.0
_END_S = 10.0


class Owner:
    """A process that has registered ``num_blocks`` of ``block_bytes``. ``address``: what it announced."""

    def __init__(self, start: Start) -> None:
        self.num_blocks, self.block_bytes = start.num_blocks, start.block_bytes
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway_conformance.block_transports.owner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        announced = msgspec.json.decode(self._tell(start), type=Announced)
        self.address, self._path = announced.address, Path(announced.path)

    def write(self, blocks: Sequence[int], version: int) -> None:
        """Give these blocks new contents."""
        self._tell(Order("write", version, list(blocks)))

    def tear(self, blocks: Sequence[int], version: int) -> None:
        """Leave each block half written: its record is the one before."""
        self._tell(Order("tear", version, list(blocks)))

    def churn(self, blocks: Sequence[int], version: int) -> None:
        """Write these blocks again and again, until ``rest``."""
        self._tell(Order("churn", version, list(blocks)))

    def rest(self) -> None:
        """End ``churn``."""
        self._tell(Order("rest"))

    def close_transport(self) -> None:
        """The process lives on."""
        self._tell(Order("close"))

    def pause(self) -> None:
        """Stop every thread of it."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End ``pause``."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """It gets no chance to clean up."""
        self._process.kill()
        self._process.wait(_END_S)

    def end(self) -> None:
        """Let it close everything; by force if it does not."""
        self.go_on()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already
            self._process.stdin.close()
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ConformanceFailure("the owner's close() did not return") from None
        finally:
            self._close_pipes()
            self._path.unlink(missing_ok=True)
        require(code in {0, -signal.SIGKILL}, f"the owner ended with code {code}")

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def _tell(self, order: Start | Order) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()
        timer = threading.Timer(_START_S, self._process.kill)
        timer.start()
        answer = self._process.stdout.readline()
        timer.cancel()
        if not answer:
            assert self._process.stderr is not None
            self.kill()
            raise ConformanceFailure(f"the owner ended: {' '.join(self._process.stderr.read().split())[-400:]}")
        return answer.rstrip("\n")


class Puller:
    """A transport in a thread of its own, as the protocol wants it."""

    def __init__(self, create: Callable[[], BlockTransport]) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        self._transport: BlockTransport = self._call(create, _START_S)

    def pull(
        self,
        owner: Owner,
        blocks: Sequence[int],
        *,
        pool: str = POOL,
        address: str | None = None,
        block_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> PulledBlocks:
        """Pull from an owner, or as the arguments say instead.

        Raises:
            PullError: see ``BlockTransport``.
            ConformanceFailure: it took too long, or raised something else.
        """
        pulled: PulledBlocks = self._wait(self.begin(owner, blocks, pool, address, block_bytes, timeout_s), timeout_s)
        return pulled

    def begin(
        self,
        owner: Owner,
        blocks: Sequence[int],
        pool: str = POOL,
        address: str | None = None,
        block_bytes: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> "Future[PulledBlocks]":
        """Begin a ``pull``."""
        return self._later(
            lambda: self._transport.pull(
                pool,
                owner.address if address is None else address,
                np.array(blocks, dtype=np.int32),
                block_bytes=owner.block_bytes if block_bytes is None else block_bytes,
                timeout_s=timeout_s,
            )
        )

    def refuses(self, owner: Owner, blocks: Sequence[int], what: str, **asked: Any) -> None:
        """The pull must end with ``PullError``, a line, in time."""
        try:
            self.pull(owner, blocks, timeout_s=SHORT_TIMEOUT_S, **asked)
        except PullError as error:
            require(bool(str(error)) and "\n" not in str(error), f"{what}: the PullError is no line: {error!r}")
            return
        raise ConformanceFailure(f"{what}: the pull gave blocks; expected: PullError")

    def release(self, address: str) -> None:
        """See ``BlockTransport``."""
        self._call(lambda: self._transport.release(address), GRACE_S)

    def close(self) -> None:
        """See ``BlockTransport``."""
        self._call(self._transport.close, _END_S)

    def end(self) -> None:
        """Close the transport and end the thread."""
        self.close()
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 (whoever waits gets it)
                future.set_exception(error)

    def _later(self, function: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._calls.put((future, function))
        return future

    def _call(self, function: Callable[[], Any], timeout_s: float) -> Any:
        return self._wait(self._later(function), timeout_s)

    @staticmethod
    def _wait(future: "Future[Any]", timeout_s: float) -> Any:
        began = time.monotonic()
        try:
            return future.result(timeout_s + GRACE_S)
        except TimeoutError:
            if future.done():
                raise
            took = time.monotonic() - began
            raise ConformanceFailure(f"a call has not returned after {took:.1f} s; allowed: {timeout_s:g} s") from None


class TransportStage:
    """Makes what a case needs; for ``with``."""

    def __init__(self, under_test: TransportUnderTest) -> None:
        self.under_test = under_test
        self._place = secrets.token_hex(8)
        self._owners: list[Owner] = []
        self._pullers: list[Puller] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure: Exception | None = None
        for end in [*(puller.end for puller in self._pullers), *(owner.end for owner in self._owners)]:
            try:
                end()
            except Exception as found:  # noqa: BLE001 (the others end too)
                failure = failure or found
        if failure is not None and error is None:
            raise failure

    def owner(self, num_blocks: int = 16, block_bytes: int = 4096, *, version: int = 1, again: bool = False) -> Owner:
        """Start one; all its blocks have this version. ``again``: see ``TransportUnderTest``."""
        owner = Owner(Start(self.under_test, self._place, POOL, num_blocks, block_bytes, version, again))
        self._owners.append(owner)
        return owner

    def puller(self) -> Puller:
        """Make one."""
        puller = Puller(self.under_test.puller_side)
        self._pullers.append(puller)
        return puller
