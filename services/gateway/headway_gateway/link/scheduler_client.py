"""An ``IngressLink`` over a ZeroMQ DEALER socket inside an asyncio event loop.

The file descriptor is watched directly: ``zmq.asyncio`` makes a future and a task per message. It is edge-triggered, so
its event flags are read after every use.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable

import structlog
import zmq

from headway_gateway.link.ingress_link import IngressLink, LinkPhase
from headway_gateway.link.link_keys import LinkKeys
from headway_gateway.link.live_sequence import LiveSequence
from headway_process.addresses import check_ipc_directory
from headway_process.link_watch import LinkWatch
from headway_proto.framing import MAX_FRAME_BYTES, VERSION_INTERVAL_S
from headway_proto.ingress import HEARTBEAT_INTERVAL_S, STATE_WAITING_FOR_EXECUTOR, ModelInfo
from headway_proto.operations import AdminCall, AdminReply

_TICK_INTERVAL_S = HEARTBEAT_INTERVAL_S / 4
_MOST_FRAMES_PER_TURN = 32
_SOCKET_HIGH_WATER_MARK = 16384
_HEARTBEAT_INTERVAL_MS = 200
_HEARTBEAT_TIMEOUT_MS = 600
_CONNECT_TIMEOUT_MS = 1000
_RECONNECT_INTERVAL_MS = 20
_RECONNECT_INTERVAL_MAX_MS = 250

_log = structlog.get_logger("headway.gateway.ingress")


class SchedulerUnavailableError(Exception):
    """The scheduler did not answer."""


class SchedulerClient:
    """The connection to the scheduler, in one event loop."""

    def __init__(
        self, address: str, *, incarnation: int, silence_timeout_s: float = 1.0, keys: LinkKeys | None = None
    ) -> None:
        """``start`` connects.

        Raises:
            ValueError: others can enter the directory of a Unix socket.
        """
        check_ipc_directory("ingress_address", address)
        self._address = address
        self._keys = keys
        self._link = IngressLink(incarnation=incarnation, now=time.monotonic(), silence_timeout_s=silence_timeout_s)
        self._context = zmq.Context(io_threads=1)
        self._outgoing: deque[bytes] = deque()
        self._admin_waiters: dict[int, asyncio.Future[AdminReply]] = {}
        self._status_waiters: set[asyncio.Future[None]] = set()
        self._status_listeners: list[Callable[[], None]] = []
        self._seen_status_version = -1
        self._seen_silence_version = 0
        self._seen_frames_version = 0
        self._seen_phase = LinkPhase.HAILING
        self._tell_version_at = 0.0
        self._pump_scheduled = False
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._watch: LinkWatch | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def link(self) -> IngressLink:
        """The protocol state, to be read."""
        return self._link

    @property
    def model(self) -> ModelInfo | None:
        """The served model, with an open link."""
        return self._link.model if self._link.phase is LinkPhase.OPEN else None

    @property
    def serving(self) -> ModelInfo | None:
        """The served model, with an open link and an executor."""
        link = self._link
        is_serving = link.phase is LinkPhase.OPEN and link.scheduler_state != STATE_WAITING_FOR_EXECUTOR
        return link.model if is_serving else None

    def add_status_listener(self, listener: Callable[[], None]) -> None:
        """Call it after every change of status."""
        self._status_listeners.append(listener)

    def start(self) -> None:
        """Connect; the scheduler may come later."""
        self._loop = asyncio.get_running_loop()
        self._connect()
        self._on_timer()

    async def close(self) -> None:
        """Disconnect. Abort live sequences first."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiter in self._admin_waiters.values():
            waiter.cancel()
        self._disconnect(linger_ms=200)
        # Terminating the context waits for lingering messages, so it must not block the loop.
        await asyncio.to_thread(self._context.term)

    def next_handle(self) -> int:
        """Return a new sequence's handle."""
        return self._link.next_handle()

    def submit(self, sequences: Iterable[LiveSequence]) -> None:
        """Submit sequences, which have ``on_news``."""
        for sequence in sequences:
            self._link.submit(sequence)
        self._flush()

    def abort(self, sequences: Iterable[LiveSequence]) -> None:
        """Abort sequences now."""
        self._link.abort(sequences)
        self._flush()

    async def call_admin(self, call: AdminCall, *, timeout_s: float) -> AdminReply:
        """Send an operator's call.

        Raises:
            SchedulerUnavailableError: no answer came within ``timeout_s``.
        """
        call_id = self._link.call_admin(call)
        waiter: asyncio.Future[AdminReply] = asyncio.get_running_loop().create_future()
        self._admin_waiters[call_id] = waiter
        self._flush()
        try:
            async with asyncio.timeout(timeout_s):
                return await waiter
        except TimeoutError:
            raise SchedulerUnavailableError(f"the scheduler did not answer within {timeout_s:g} s") from None
        finally:
            self._link.forget_admin_call(call_id)
            self._admin_waiters.pop(call_id, None)

    async def wait_until_serving(self, timeout_s: float) -> ModelInfo:
        """Wait for a model and an executor; return the model.

        Raises:
            SchedulerUnavailableError: none came within ``timeout_s``.
        """
        if (model := self.serving) is not None:
            return model
        try:
            async with asyncio.timeout(timeout_s):
                while (model := self.serving) is None:
                    await self._status_change()
        except TimeoutError:
            raise SchedulerUnavailableError(self._what_is_missing()) from None
        return model

    def _what_is_missing(self) -> str:
        if self._link.other_version:
            return f"the scheduler is of another version of Headway: {self._link.other_version}"
        if self._link.phase is not LinkPhase.OPEN:
            return "no scheduler is connected"
        if self._link.model is None:
            return "the model is still loading"
        return "the scheduler is waiting for its executor"

    async def _status_change(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._status_waiters.add(waiter)
        try:
            await waiter
        finally:
            self._status_waiters.discard(waiter)

    def _connect(self) -> None:
        assert self._loop is not None
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),  # queue only for a connected scheduler: frames of an old link are useless
            (zmq.SNDHWM, _SOCKET_HIGH_WATER_MARK),
            (zmq.RCVHWM, _SOCKET_HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS),
            (zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS),
            (zmq.IPV6, int("[" in self._address)),
            (zmq.RECONNECT_IVL, _RECONNECT_INTERVAL_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_INTERVAL_MAX_MS),
        ):
            socket.setsockopt(option, value)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.scheduler_public
            socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        self._watch = LinkWatch(socket, self._address, time.monotonic())
        socket.connect(self._address)
        self._socket = socket
        self._loop.add_reader(socket.fileno(), self._pump)

    def _disconnect(self, *, linger_ms: int) -> None:
        if self._socket is None:
            return
        assert self._loop is not None
        self._loop.remove_reader(self._socket.fileno())
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._socket.close(linger=linger_ms)
        self._socket = None
        self._outgoing.clear()

    def _on_timer(self) -> None:
        if self._closed:
            return
        assert self._loop is not None
        self._pump()
        if not self._pump_scheduled:  # everything that has arrived was received, so this is real silence
            self._link.tick(time.monotonic())
            self._after_link()
        if self._watch is not None and (problem := self._watch.look(time.monotonic())):
            _log.warning("no link to the scheduler", ingress_address=self._address, reason=problem)
        if self._link.other_version and time.monotonic() >= self._tell_version_at:
            self._tell_version_at = time.monotonic() + VERSION_INTERVAL_S
            _log.error("the scheduler is of another version of Headway", reason=self._link.other_version)
        self._timer = self._loop.call_later(_TICK_INTERVAL_S, self._on_timer)

    def _pump(self) -> None:
        """Receive a bounded amount per turn."""
        self._pump_scheduled = False
        if self._closed or self._socket is None:
            return
        socket, link = self._socket, self._link
        now = time.monotonic()
        try:
            for _ in range(_MOST_FRAMES_PER_TURN):
                link.receive(socket.recv(zmq.DONTWAIT), now)
            self._pump_soon()
        except zmq.Again:
            pass  # this has read the event flags as well
        self._after_link()

    def _after_link(self) -> None:
        link = self._link
        if link.silence_version != self._seen_silence_version:
            self._seen_silence_version = link.silence_version
            self._disconnect(linger_ms=0)
            self._connect()
        for sequence in link.take_news():
            sequence.on_news()
        for reply in link.take_admin_replies():
            waiter = self._admin_waiters.get(reply.call_id)
            if waiter is not None and not waiter.done():
                waiter.set_result(reply)
        if link.status_version != self._seen_status_version:
            self._seen_status_version = link.status_version
            self._announce_status()
        self._flush()

    def _announce_status(self) -> None:
        link = self._link
        if link.phase is not self._seen_phase:
            self._seen_phase = link.phase
            _log.info(
                "scheduler link", phase=link.phase.value, state=link.scheduler_state, links=link.counters.links_opened
            )
        for waiter in self._status_waiters:
            if not waiter.done():
                waiter.set_result(None)
        for listener in self._status_listeners:
            listener()

    def _flush(self) -> None:
        if self._socket is None:
            return
        frames = self._link.take_frames()
        if self._link.frames_version != self._seen_frames_version:
            self._seen_frames_version = self._link.frames_version
            self._outgoing.clear()
        self._outgoing.extend(frames)
        if not self._outgoing:
            return
        with contextlib.suppress(zmq.Again):
            while self._outgoing:
                self._socket.send(self._outgoing[0], zmq.DONTWAIT)
                self._outgoing.popleft()
        flags = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(flags, int)
        if flags & (zmq.POLLIN | (zmq.POLLOUT if self._outgoing else 0)):
            self._pump_soon()

    def _pump_soon(self) -> None:
        if not self._pump_scheduled:
            assert self._loop is not None
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)
