"""An executor's host blocks, as this process offers them to others, and the blocks it brings from them.

Owns: where the memory is, its name, its addresses. Must not know: rows, frames, how a transport works.

A pool's name is ``RANDOM-IDENTITY``. The random part is new whenever contents begin; who takes over contents keeps it.
The identity says what a block's bytes mean: model, backend, dtype, sizes and layout. A block counts only where it is the
same.
"""

import hashlib
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from headway_executor.backend import BackendConfigError
from headway_executor.batch.diff_checks import Pull
from headway_executor.block_store.pool_file import SHARED_MEMORY, PoolFile, PoolLayout, hold_pool_file
from headway_executor.block_store.puller import PATIENCE_S, BlockPuller, FetchedBlocks, nothing_of
from headway_executor.block_store.records import BlockRecords
from headway_executor.block_store.transport import RECORD, BlockTransport, Bytes, HostMemory
from headway_proto.columns import Int32Array
from headway_proto.step import BackendInfo

_IDENTITY_CHARACTERS = 12


class Store(Protocol):
    """What the step cycle needs."""

    def begin_write(self, host_blocks: Int32Array) -> int:
        """See ``BlockRecords.begin``."""
        ...

    def end_write(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        """See ``BlockRecords.end``."""
        ...

    def forget(self) -> None:
        """This executor's state is another than it should be, so its host blocks may hold anything: offer none of them."""
        ...

    def fetch(self, pulls: tuple[Pull, ...]) -> Future[FetchedBlocks]:
        """See ``BlockPuller.fetch``."""
        ...


class NoStore:
    """Nothing is shared, and nothing can be brought."""

    def begin_write(self, host_blocks: Int32Array) -> int:
        """See ``Store``."""
        del host_blocks
        return 0

    def end_write(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        """See ``Store``."""

    def forget(self) -> None:
        """See ``Store``."""

    def fetch(self, pulls: tuple[Pull, ...]) -> Future[FetchedBlocks]:
        """See ``Store``."""
        future: Future[FetchedBlocks] = Future()
        future.set_result(nothing_of(pulls, "this executor has no block store"))
        return future


class BlockStore:
    """The store of one executor process: ``host_memory`` while its backend opens, then ``open``, then the steps."""

    def __init__(
        self,
        transports: Mapping[str, BlockTransport],
        *,
        place: str,
        number: int = -1,
        variant: str = "",
        uses_shared_memory: bool = True,
        warn: Callable[[str], None] = lambda _: None,
        directory: Path = SHARED_MEMORY,
        patience_s: float = PATIENCE_S,
        predecessor_s: float = 0.0,
    ) -> None:
        """Make a store without memory.

        ``place`` and ``number`` (-1: none) tell this executor from others of this user and host. ``variant``: what else
        changes the contents of blocks, beside what the backend announces. ``predecessor_s``: how long the process before may
        take to end.
        """
        self._transports = transports
        self._place = place
        self._number = number
        self._variant = variant
        self._uses_shared_memory = uses_shared_memory
        self._warn = warn
        self._directory = directory
        self._patience_s = patience_s
        self._predecessor_s = predecessor_s
        self._block_bytes = 0
        self._layout = ""
        self._file: PoolFile | None = None
        self._memory: HostMemory | None = None
        self._records: BlockRecords | None = None
        self._puller: BlockPuller | None = None

    def host_memory(self, num_blocks: int, block_bytes: int, layout: str) -> Bytes | None:
        """See ``BackendConfig.host_memory``. The last call counts."""
        self._drop_memory()
        self._block_bytes, self._layout = block_bytes, layout
        if not num_blocks or not self._transports:
            return None
        if self._uses_shared_memory:
            try:
                self._file = hold_pool_file(
                    self._directory,
                    self._place,
                    self._number,
                    PoolLayout(num_blocks, block_bytes),
                    patience_s=self._predecessor_s,
                )
            except OSError as error:
                self._warn(f"host blocks are not in shared memory: {self._directory}: {error.strerror or error}")
        if self._file is not None:
            self._memory = HostMemory("", str(self._file.path), self._file.records, self._file.blocks)
        elif self._transports.keys() - {"shm"}:
            blocks = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
            self._memory = HostMemory("", "", np.zeros(num_blocks, dtype=RECORD), blocks)
        return None if self._memory is None else self._memory.blocks

    def open(self, info: BackendInfo) -> BackendInfo:
        """Name and offer the memory; return ``info`` with both. Contents of another identity are given up."""
        identity = self._identity_of(info)
        addresses: tuple[str, ...] = ()
        if self._memory is not None:
            self._memory = self._memory._replace(name=self._name_contents(identity))
            self._records = BlockRecords(self._memory.records, self._memory.blocks)
            addresses = self._register(self._memory)
            if not addresses:
                self._memory = self._memory._replace(name="")
        self._puller = BlockPuller(
            self._transports,
            own=self._memory if addresses else None,
            identity=identity[:_IDENTITY_CHARACTERS],
            block_bytes=self._block_bytes,
            patience_s=self._patience_s,
        )
        name = "" if self._memory is None else self._memory.name
        return msgspec.structs.replace(info, host_pool=name, block_addresses=addresses)

    def begin_write(self, host_blocks: Int32Array) -> int:
        """See ``Store``."""
        return self._records.begin(host_blocks) if self._records is not None else 0

    def end_write(self, write: int, host_blocks: Int32Array, *, epoch: int, step: int) -> None:
        """See ``Store``."""
        if self._records is not None:
            self._records.end(write, host_blocks, epoch=epoch, step=step)
            if self._file is not None:
                self._file.touch()

    def forget(self) -> None:
        """See ``Store``."""
        if self._records is not None:
            self._records.forget()

    def fetch(self, pulls: tuple[Pull, ...]) -> Future[FetchedBlocks]:
        """See ``Store``."""
        assert self._puller is not None
        return self._puller.fetch(pulls)

    def close(self) -> None:
        """End what others read, and remove the file. May be called twice."""
        if self._puller is not None:
            self._puller.close()
            self._puller = None
        self._drop_memory()

    def leave(self) -> None:
        """Remove a file without contents: this process ends before it has any. For signal handlers."""
        if self._file is not None and not self._file.header.name:
            self._file.close(remove=True)

    def _drop_memory(self) -> None:
        self._memory = self._records = None
        if self._file is not None:
            self._file.close(remove=True)
            self._file = None

    def _identity_of(self, info: BackendInfo) -> str:
        announced = (info.model_fingerprint, info.backend, info.dtype, info.block_size)
        own = (self._block_bytes, self._layout, self._variant)
        return hashlib.sha256(repr((announced, own)).encode()).hexdigest()

    def _name_contents(self, identity: str) -> str:
        if self._file is not None and self._file.header.name and self._file.header.identity == identity:
            return self._file.header.name
        name = f"{secrets.token_hex(12)}-{identity[:_IDENTITY_CHARACTERS]}"
        if self._file is not None:
            self._file.records[:] = np.zeros(1, dtype=RECORD)
            self._file.write_header(name=name, identity=identity)
        return name

    def _register(self, memory: HostMemory) -> tuple[str, ...]:
        addresses = []
        for name, transport in self._transports.items():
            try:
                addresses.append(f"{name}:{transport.register(memory)}")
            except BackendConfigError as error:
                self._warn(f"host blocks are not offered by {name}: {error}")
        return tuple(addresses)
