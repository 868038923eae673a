"""The transport ``nixl``: blocks read out of another process's memory by NVIDIA's NIXL.

Owns: NIXL's agents, what an address says, reads and their time-outs. Must not know: what blocks mean.

An address carries all that a reader needs: NIXL's metadata of the owner, and where its memory lies. So no further port is
opened; but NIXL's own ports ask nobody for a key. Serving and reading have an agent each; the one that serves has a thread
of NIXL's.
"""

import base64
import binascii
import contextlib
import os
import secrets
import time
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import BackendConfigError
from headway_executor.block_store.transport import RECORD, Bytes, HostMemory, PulledBlocks, PullError
from headway_proto.columns import Int32Array
from headway_proto.wording import one_line, shown

FIELD = "nixl_devices"

_PACKAGE = "nixl"
_PLUGIN = "UCX"
_MEMORY = "DRAM"
_MAX_ADDRESS_CHARACTERS = 4000
_POLL_S = 20e-6
_MOST_SAID = 200
_ENVIRONMENT = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
"""Both print to stderr what also comes as an exception."""


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """What an address says. ``records`` and ``blocks``: where they begin in the owner's memory."""

    pool: str
    metadata: bytes
    records: int
    blocks: int
    num_blocks: int
    block_bytes: int


class _Source(NamedTuple):
    agent: str
    place: _Place


class _Read(NamedTuple):
    """A transfer, with the memory that it may write to until it is released."""

    handle: Any
    registration: Any
    pulled: PulledBlocks


class NixlTransport:
    """See ``transport.BlockTransport``."""

    def __init__(self, nixl_devices: str = "lo") -> None:
        """``nixl_devices``: UCX's names, with commas between them.

        Raises:
            BackendConfigError: the package is missing, or cannot use the devices.
        """
        self._devices = nixl_devices
        self._memory: HostMemory | None = None
        """NIXL would go on reading where it was."""
        self._server: Any = None
        self._sources: dict[str, _Source] = {}
        self._abandoned: list[_Read] = []
        if not nixl_devices:
            raise BackendConfigError(f"{FIELD}: '' is not allowed; allowed: names of network devices, for example lo")
        if find_spec(_PACKAGE) is None:
            raise BackendConfigError(
                f"block_transports: 'nixl' needs {_PACKAGE!r}, which is not installed; install the Python package "
                f"{_PACKAGE!r}, or leave it out"
            )
        # Now, since it takes seconds that a step does not have.
        self._reader: Any = self._agent("reader", has_thread=False)

    def register(self, memory: HostMemory) -> str:
        """See ``BlockTransport``."""
        place = _Place(memory.name, b"", memory.records.ctypes.data, memory.blocks.ctypes.data, *memory.blocks.shape)
        self._memory = memory
        self._server = self._agent(memory.name, has_thread=True)
        try:
            for array in (memory.records, memory.blocks):
                self._server.register_memory([_region(array)], _MEMORY)
            metadata = self._server.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no class in common
            raise self._refusal(error) from error
        packed = msgspec.msgpack.encode(msgspec.structs.replace(place, metadata=metadata))
        address = base64.urlsafe_b64encode(packed).decode("ascii")
        if len(address) > _MAX_ADDRESS_CHARACTERS:
            raise BackendConfigError(
                f"{FIELD}: {shown(self._devices)} is not allowed; the address has {len(address)} characters of "
                f"{_MAX_ADDRESS_CHARACTERS}, so allowed: fewer devices"
            )
        return address

    def pull(
        self, pool: str, address: str, host_blocks: Int32Array, *, block_bytes: int, timeout_s: float
    ) -> PulledBlocks:
        """See ``BlockTransport``."""
        deadline = time.monotonic() + timeout_s
        self._end_abandoned()
        pulled = PulledBlocks(np.empty(len(host_blocks), RECORD), np.empty((len(host_blocks), block_bytes), np.uint8))
        try:
            source = self._source(address)
            _check(source.place, pool, host_blocks, block_bytes)
            if len(host_blocks):
                self._read(source, host_blocks, pulled, deadline)
        except Exception as error:
            self.release(address)
            raise PullError(f"pool {shown(pool)} through nixl: {one_line(error, _MOST_SAID)}") from error
        return pulled

    def release(self, address: str) -> None:
        """See ``BlockTransport``."""
        source = self._sources.pop(address, None)
        if source is not None:
            with contextlib.suppress(Exception):  # it is gone already
                self._reader.remove_remote_agent(source.agent)

    def close(self) -> None:
        """See ``BlockTransport``."""
        for address in tuple(self._sources):
            self.release(address)
        self._end_abandoned()
        self._server = self._reader = self._memory = None

    def _agent(self, name: str, *, has_thread: bool) -> Any:
        os.environ.update(UCX_NET_DEVICES=self._devices)
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        try:
            api = import_module(f"{_PACKAGE}._api")
            settings = api.nixl_agent_config(enable_prog_thread=has_thread, backends=[])
            agent = api.nixl_agent(f"{name}-{secrets.token_hex(8)}", settings)
            agent.create_backend(_PLUGIN, {})
        except Exception as error:
            raise self._refusal(error) from error
        return agent

    def _refusal(self, error: Exception) -> BackendConfigError:
        return BackendConfigError(
            f"{FIELD}: {shown(self._devices)} is not allowed; NIXL cannot use it: {one_line(error, _MOST_SAID)}"
        )

    def _source(self, address: str) -> _Source:
        if self._reader is None:
            raise PullError("the transport is closed")
        self._reader.get_new_notifs()  # so it notices who is gone
        if address not in self._sources:
            place = _place_of(address)
            agent = self._reader.add_remote_agent(place.metadata)
            self._sources[address] = _Source(agent, place)
        return self._sources[address]

    def _read(self, source: _Source, host_blocks: Int32Array, pulled: PulledBlocks, deadline: float) -> None:
        reader, place = self._reader, source.place
        here = np.arange(len(host_blocks), dtype=np.uint64)
        there = host_blocks.astype(np.uint64)
        registration = reader.register_memory([_region(array) for array in pulled], _MEMORY)
        to = _descriptors(pulled.records.ctypes.data, pulled.blocks.ctypes.data, here, place.block_bytes)
        come_from = _descriptors(place.records, place.blocks, there, place.block_bytes)
        handle = None
        try:
            handle = reader.initialize_xfer(
                "READ",
                reader.get_xfer_descs(to, _MEMORY),
                reader.get_xfer_descs(come_from, _MEMORY),
                source.agent,
            )
            state = reader.transfer(handle)
            while state == "PROC":
                if time.monotonic() >= deadline:
                    raise PullError("no answer in time")
                time.sleep(_POLL_S)
                state = reader.check_xfer_state(handle)
            if state != "DONE":
                raise PullError("the transfer failed")
        finally:
            self._end(_Read(handle, registration, pulled))

    def _end(self, read: _Read) -> None:
        """A transfer that cannot be ended may still write, so its memory is kept."""
        try:
            if read.handle is not None:
                read.handle.release()
            self._reader.deregister_memory(read.registration)
        except Exception:  # noqa: BLE001 (as above)
            self._abandoned.append(read)

    def _end_abandoned(self) -> None:
        abandoned, self._abandoned = self._abandoned, []
        for read in abandoned:
            self._end(read)


def _place_of(address: str) -> _Place:
    try:
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(address), type=_Place)
    except (binascii.Error, msgspec.DecodeError, ValueError) as error:
        raise PullError(f"this is no address: {shown(address)}") from error


def _check(place: _Place, pool: str, host_blocks: Int32Array, block_bytes: int) -> None:
    """NIXL would take any address within registered memory."""
    if pool != place.pool:
        raise PullError("another pool is there")
    if block_bytes != place.block_bytes:
        raise PullError(f"its blocks have {place.block_bytes} bytes, not {block_bytes}")
    outside = host_blocks[(host_blocks < 0) | (host_blocks >= place.num_blocks)]
    if len(outside):
        raise PullError(f"it has no block {outside[0]}; allowed: 0 to {place.num_blocks - 1}")


def _region(array: Bytes | NDArray[np.void]) -> tuple[int, int, int, str]:
    """Address, bytes, device, label."""
    return array.ctypes.data, array.nbytes, 0, ""


def _descriptors(records: int, blocks: int, index: NDArray[np.uint64], block_bytes: int) -> NDArray[np.uint64]:
    """uint64, ``[2 n, 3]``: address, bytes, device."""
    found = np.zeros((2 * len(index), 3), dtype=np.uint64)
    for part, begin, size in (
        (found[: len(index)], records, RECORD.itemsize),
        (found[len(index) :], blocks, block_bytes),
    ):
        part[:, 0] = np.uint64(begin) + index * np.uint64(size)
        part[:, 1] = size
    return found
