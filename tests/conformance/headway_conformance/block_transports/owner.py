"""An owner of host blocks as a process: ``python -m headway_conformance.block_transports.owner``.

Owns: its memory, writing it on command. Must not know: cases.

Reads a ``Start`` and then ``Order``s from stdin, one JSON line each, and answers each with a line on stdout: ``Announced``
as JSON, then empty ones. It ends with its stdin. Its memory is a pool file, as an executor's is.
"""

import sys
import threading

import msgspec

from headway_conformance.block_transports.contents import content_of, record_of
from headway_conformance.block_transports.under_test import TransportUnderTest
from headway_executor.block_store.pool_file import SHARED_MEMORY, PoolLayout, hold_pool_file
from headway_executor.block_store.transport import HostMemory


class Start(msgspec.Struct, frozen=True):
    """``version``: of all blocks at first; none is written if it is 0. ``again``: see ``TransportUnderTest``.

    Of the owners of one ``place`` that run, each has a file of its own; the next one takes over what a dead one left.
    """

    under_test: TransportUnderTest
    place: str
    pool: str
    num_blocks: int
    block_bytes: int
    version: int
    again: bool


class Announced(msgspec.Struct, frozen=True):
    """``path``: of the pool file."""

    address: str
    path: str


class Order(msgspec.Struct, frozen=True):
    """``write``: these blocks anew. ``tear``: the first half of their bytes only. ``churn``: write until the next order.

    ``close``: close the transport, and live on.
    """

    do: str
    version: int = 0
    blocks: list[int] = []


class _Memory:
    def __init__(self, start: Start) -> None:
        self._file = hold_pool_file(SHARED_MEMORY, start.place, 0, PoolLayout(start.num_blocks, start.block_bytes))
        self._file.write_header(name=start.pool, identity="conformance")
        self.host = HostMemory(start.pool, str(self._file.path), self._file.records, self._file.blocks)
        self._block_bytes = start.block_bytes

    def close(self) -> None:
        self._file.close(remove=True)

    def write(self, block: int, version: int) -> None:
        """The record last, as an executor does."""
        content = content_of(block, version, self._block_bytes)
        self.host.blocks[block] = content
        self.host.records[block : block + 1] = record_of(block, version, content)

    def tear(self, block: int, version: int) -> None:
        half = self._block_bytes // 2
        self.host.blocks[block, :half] = content_of(block, version, self._block_bytes)[:half]

    def churn(self, blocks: list[int], version: int, stop: threading.Event) -> None:
        while not stop.is_set():
            for block in blocks:
                self.write(block, version)
            version += 1


def main() -> None:
    """Serve until stdin ends."""
    start = msgspec.json.decode(sys.stdin.readline(), type=Start)
    memory = _Memory(start)
    for block in range(start.num_blocks if start.version else 0):
        memory.write(block, start.version)
    transport = start.under_test.owner_side(again=start.again)
    address = transport.register(memory.host)
    _answer(msgspec.json.encode(Announced(address, memory.host.path)).decode())
    stop, churning = threading.Event(), threading.Thread()
    for line in sys.stdin:
        order = msgspec.json.decode(line, type=Order)
        stop.set()
        if churning.ident is not None:
            churning.join()
        if order.do == "churn":
            stop = threading.Event()
            churning = threading.Thread(target=memory.churn, args=(order.blocks, order.version, stop), daemon=True)
            churning.start()
        elif order.do == "close":
            transport.close()
            memory.close()
        else:
            change = memory.write if order.do == "write" else memory.tear
            for block in order.blocks:
                change(block, order.version)
        _answer("")
    stop.set()
    transport.close()
    transport.close()
    memory.close()


def _answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
