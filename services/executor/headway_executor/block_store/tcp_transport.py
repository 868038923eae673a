"""The transport ``tcp``: blocks over ZeroMQ, from any host.

Owns: connections to other executors, pulling in parts, time-outs. Must not know: layout of messages, what blocks mean.

Several parts are under way at a time. After a failure the connection is dropped with all that may still come, and the
next pull makes a new one.
"""

import math
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zmq

from headway_executor.backend import BackendConfigError
from headway_executor.block_store.listener import FIELD, Listener
from headway_executor.block_store.questions import (
    ANSWER_BYTES,
    MAX_BLOCK_BYTES,
    PARTS_UNDER_WAY,
    Answer,
    Answerer,
    AnswerReader,
    BlockQuestion,
    blocks_per_question,
    question_writer,
)
from headway_executor.block_store.transport import RECORD, HostMemory, PulledBlocks, PullError
from headway_executor.config import EXECUTOR_SECRET_KEY
from headway_process.addresses import check_link_address
from headway_process.link_keys import load_own_keys
from headway_proto.columns import Int32Array
from headway_proto.framing import FramingError
from headway_proto.wording import shown

_ENDED = "the connection was refused or has ended"
_ENDS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class TcpTransport:
    """See ``transport.BlockTransport``. An address is HOST:PORT."""

    def __init__(self, block_address: str = "", curve_keys: str = "") -> None:
        """``block_address``: where ``register`` listens, tcp://HOST:PORT. ``curve_keys``: as in ``ExecutorConfig``."""
        self._block_address = block_address
        self._curve_keys = curve_keys
        self._context = zmq.Context()
        self._connections: dict[str, _Connection] = {}
        self._listener: Listener | None = None

    @property
    def num_malformed(self) -> int:
        """Messages that came to this port and were no questions."""
        return 0 if self._listener is None else self._listener.num_malformed

    def register(self, memory: HostMemory) -> str:
        """See ``BlockTransport``."""
        block_bytes = memory.blocks.shape[1]
        if block_bytes > MAX_BLOCK_BYTES:
            raise BackendConfigError(
                f"{FIELD}: {shown(self._block_address)} is not allowed; one block has {block_bytes} bytes, and over TCP "
                f"at most {MAX_BLOCK_BYTES} are allowed"
            )
        self._listener = Listener(self._block_address, self._curve_keys, Answerer(memory).answer)
        return self._listener.address

    def pull(
        self, pool: str, address: str, host_blocks: Int32Array, *, block_bytes: int, timeout_s: float
    ) -> PulledBlocks:
        """See ``BlockTransport``."""
        deadline = time.monotonic() + timeout_s
        if self._context.closed:
            raise PullError("the transport is closed")
        connection = self._connections.get(address)
        if connection is None or connection.has_ended():
            self.release(address)
            connection = self._connections[address] = _Connection(self._context, address, self._curve_keys)
        pulled = PulledBlocks(np.empty(len(host_blocks), RECORD), np.empty((len(host_blocks), block_bytes), np.uint8))
        try:
            connection.pull(pool, host_blocks, pulled, deadline)
        except PullError as error:
            self.release(address)
            raise PullError(f"pool {shown(pool)} at tcp:{address:.64}: {error}") from error.__cause__
        return pulled

    def release(self, address: str) -> None:
        """See ``BlockTransport``."""
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """See ``BlockTransport``."""
        for address in tuple(self._connections):
            self.release(address)
        if self._listener is not None:
            self._listener.close()
        self._context.term()


class _Connection:
    """A DEALER to one listener. It never reconnects: what is lost on the way is noticed as its end."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, curve_keys: str) -> None:
        endpoint = f"tcp://{address}"
        epoch = secrets.randbits(32)
        self._questions, self._answers = question_writer(epoch), AnswerReader(epoch)
        self._socket = context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(_ENDS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, -1),
            (zmq.MAXMSGSIZE, max(ANSWER_BYTES, MAX_BLOCK_BYTES) * 2),
            (zmq.IPV6, int("[" in address)),
        ):
            self._socket.setsockopt(option, value)
        try:
            check_link_address("address of a pool", endpoint, has_keys=bool(curve_keys))
            if curve_keys:
                public, secret = load_own_keys(Path(curve_keys), EXECUTOR_SECRET_KEY)
                self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
                self._socket.curve_serverkey = public
            self._socket.connect(endpoint)
        except (ValueError, zmq.ZMQError) as error:
            self.close()
            raise PullError(f"tcp:{shown(address)}: {error}") from error

    def has_ended(self) -> bool:
        """Whether the other side is gone, or refused."""
        return bool(self._monitor.poll(0))

    def pull(self, pool: str, host_blocks: Int32Array, pulled: PulledBlocks, deadline: float) -> None:
        """Fill ``pulled``; afterwards, unless it raises, no answer is outstanding."""
        block_bytes = pulled.blocks.shape[1]
        parts = _parts(len(host_blocks), blocks_per_question(block_bytes))
        asked: dict[int, slice] = {}
        received = 0
        while received < len(host_blocks):
            while len(asked) < PARTS_UNDER_WAY and (part := next(parts, None)) is not None:
                asked[self._questions.next_sequence] = part
                self._ask(BlockQuestion(pool, block_bytes, host_blocks[part].tolist()))
            answer = self._next_answer(deadline)
            if answer is None or answer.sequence not in asked:
                continue  # damaged, or it came twice
            part = asked.pop(answer.sequence)
            if answer.refusal:
                raise PullError(answer.refusal)
            if answer.content.blocks.shape != pulled.blocks[part].shape:
                raise PullError(f"it answered with blocks of the shape {answer.content.blocks.shape}")
            pulled.records[part] = answer.content.records
            pulled.blocks[part] = answer.content.blocks
            received = received + part.stop - part.start

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _ask(self, question: BlockQuestion) -> None:
        try:
            self._socket.send(self._questions.encode(question), zmq.NOBLOCK)
        except zmq.Again:
            raise PullError(_ENDED) from None

    def _next_answer(self, deadline: float) -> Answer | None:
        left_s = deadline - time.monotonic()
        ready = dict(self._poller.poll(max(0, math.ceil(left_s * 1000))))
        if self._socket in ready:
            message = self._socket.recv(zmq.NOBLOCK, copy=False)
            try:
                return self._answers.read(message.buffer)
            except FramingError:
                return None
        if self._monitor in ready:
            raise PullError(_ENDED)
        raise PullError("no answer in time")


def _parts(num_blocks: int, part_blocks: int) -> Iterator[slice]:
    for start in range(0, num_blocks, part_blocks):
        yield slice(start, min(start + part_blocks, num_blocks))
