"""Brings blocks of host pools into private copies, and believes only those that are right.

Owns: which transport reads a pool, waiting for blocks that are still being written, the check. Must not know: rows,
devices.

A thread of its own pulls, because transports are called from one thread and the executor must show life meanwhile. A few
blocks that are there already, in a pool of this host, are brought at once: to wake that thread and to be woken by it takes
as long as copying them.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.records import checksums_fit
from headway_executor.block_store.transport import BlockTransport, Bytes, HostMemory, PulledBlocks, PullError
from headway_proto.columns import Int32Array
from headway_proto.wording import shown

PATIENCE_S = 0.5
"""How long a step waits for its blocks in all."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_PAUSE_SHARE = 0.1
"""Of the time waited so far, which is therefore the most that a block waits in vain."""

_LEAST_TIMEOUT_S = 0.01

_MOST_BYTES_AT_ONCE = 4 << 20
"""What is copied and checked within about a millisecond."""


class FetchedBlocks(NamedTuple):
    """What a step's pulls brought.

    ``contents``: uint8, ``[n, block_bytes]``, for the device ``blocks``, int32, ``[n]``. ``missing``: the other device
    blocks, int32, with the ``problems`` of pools that could not be read, one line each. ``seconds`` that it took.
    """

    contents: Bytes
    blocks: Int32Array
    missing: Int32Array
    problems: tuple[str, ...]
    seconds: float


class _Part(NamedTuple):
    """Blocks of one pool; ``places`` int64, ``[n]``, among all of the step."""

    pull: Pull
    places: NDArray[np.int64]


class BlockPuller:
    """``own``: this executor's memory, read directly. ``identity``: how its blocks are laid out, see ``store``."""

    def __init__(
        self,
        transports: Mapping[str, BlockTransport],
        *,
        own: HostMemory | None,
        identity: str,
        block_bytes: int,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._transports = transports
        self._own = own
        self._identity = identity
        self._block_bytes = block_bytes
        self._patience_s = patience_s
        self._never_wait = {name: one for name, one in transports.items() if getattr(one, "never_waits", False)}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="block-puller", daemon=True)
        self._thread.start()

    def fetch(self, pulls: tuple[Pull, ...]) -> Future[FetchedBlocks]:
        """Begin to bring the blocks of one step. The future has no errors: blocks are there, or missing."""
        future: Future[FetchedBlocks] = Future()
        if sum(pull.blocks.shape[1] for pull in pulls) * self._block_bytes <= _MOST_BYTES_AT_ONCE:
            found = self._try_to_fetch(pulls, self._never_wait, patience_s=0.0)
            if not len(found.missing):
                future.set_result(found)
                return future
        self._work.put(
            lambda: future.set_result(self._try_to_fetch(pulls, self._transports, patience_s=self._patience_s))
        )
        return future

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread, and then the transports; a transport that hangs is left alone."""
        for transport in self._transports.values():
            self._work.put(transport.close)
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # while this waits, it would keep the blocks of the last step

    def _try_to_fetch(
        self, pulls: tuple[Pull, ...], transports: Mapping[str, BlockTransport], *, patience_s: float
    ) -> FetchedBlocks:
        try:
            return self._fetch(pulls, transports, patience_s)
        except Exception as error:  # noqa: BLE001 (a transport's mistake costs its blocks only)
            return nothing_of(pulls, f"{type(error).__name__}: {error}")

    def _fetch(
        self, pulls: tuple[Pull, ...], transports: Mapping[str, BlockTransport], patience_s: float
    ) -> FetchedBlocks:
        started = time.monotonic()
        deadline = started + patience_s
        targets = np.concatenate([pull.blocks[2] for pull in pulls])
        contents = np.empty((len(targets), self._block_bytes), dtype=np.uint8)
        is_right = np.zeros(len(targets), dtype=bool)
        ends = np.cumsum([pull.blocks.shape[1] for pull in pulls])
        parts = [
            _Part(pull, np.arange(end - pull.blocks.shape[1], end))
            for pull, end in zip(pulls, ends.tolist(), strict=True)
        ]
        problems: list[str] = []
        while parts:
            late: list[_Part] = []
            for pull, places in parts:
                try:
                    pulled = self._pull(pull, transports, deadline)
                except PullError as error:
                    problems.append(str(error))
                    continue
                right, is_older = _check(pulled, pull)
                is_right[places[right]] = True
                if right.all() and len(places) == len(targets):
                    contents = pulled.blocks
                    continue
                contents[places[right]] = pulled.blocks[right]
                if is_older.any():
                    late.append(_Part(pull._replace(blocks=pull.blocks[:, is_older]), places[is_older]))
            parts = late
            if parts:
                now = time.monotonic()
                pause = min(max(_FIRST_PAUSE_S, _PAUSE_SHARE * (now - started)), _LONGEST_PAUSE_S)
                if now + pause >= deadline:
                    break
                time.sleep(pause)
        contents = contents if is_right.all() else contents[is_right]
        seconds = time.monotonic() - started
        return FetchedBlocks(contents, targets[is_right], targets[~is_right], tuple(problems), seconds)

    def _pull(self, pull: Pull, transports: Mapping[str, BlockTransport], deadline: float) -> PulledBlocks:
        """Try the addresses in their order: the best may be of another host."""
        host_blocks = np.ascontiguousarray(pull.blocks[0])
        if pull.pool.rpartition("-")[2] != self._identity:
            raise PullError(f"pool {shown(pull.pool)}: its blocks are of another model, backend or layout")
        if self._own is not None and pull.pool == self._own.name:
            return _read_own(self._own, host_blocks)
        problems = []
        for address in pull.addresses:
            name, _, rest = address.partition(":")
            transport = transports.get(name)
            if transport is None:
                continue
            timeout_s = max(_LEAST_TIMEOUT_S, deadline - time.monotonic())
            try:
                return transport.pull(pull.pool, rest, host_blocks, block_bytes=self._block_bytes, timeout_s=timeout_s)
            except PullError as error:
                problems.append(str(error))
        raise PullError("; ".join(problems) or f"pool {shown(pull.pool)}: no transport that is enabled here reaches it")


def nothing_of(pulls: tuple[Pull, ...], problem: str) -> FetchedBlocks:
    """The result of pulls that brought nothing."""
    targets = np.concatenate([pull.blocks[2] for pull in pulls])
    return FetchedBlocks(np.empty((0, 0), dtype=np.uint8), targets[:0], targets, (problem,), 0.0)


def _read_own(own: HostMemory, host_blocks: Int32Array) -> PulledBlocks:
    if len(host_blocks) and int(host_blocks.max()) >= len(own.records):
        raise PullError(f"this pool has no block {host_blocks.max()}; allowed: 0 to {len(own.records) - 1}")
    records = own.records[host_blocks]
    return PulledBlocks(records, own.blocks[host_blocks])


def _check(pulled: PulledBlocks, pull: Pull) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which blocks are right, and which may become so: their record is older, or is being written.

    Epochs of different schedulers are in no order, so a record of any other epoch may be older.
    """
    host_blocks, steps = pull.blocks[:2]
    is_own_epoch = pulled.records["epoch"] == np.uint64(pull.epoch)
    right: NDArray[np.bool_] = is_own_epoch & (pulled.records["step"] == steps)
    is_older = ~is_own_epoch | (pulled.records["step"] < steps)
    if right.all():
        right = checksums_fit(pulled.records, pulled.blocks, host_blocks)
    elif right.any():
        right[right] = checksums_fit(pulled.records[right], pulled.blocks[right], host_blocks[right])
    return right, is_older
