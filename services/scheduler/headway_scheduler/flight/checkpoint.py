"""Encodes the state of all cores as bytes, and restores it.

Owns: the encoding, the allowed classes, the writing process. Must not know: what an attribute means. Shared objects are
encoded once and shared again. Functions are not encoded: the state goes into new cores with the same limits. Nothing
is pickled: only classes of a fixed list are made, and only msgspec's code runs.
"""

import gc
import os
import signal
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_proto.wording import shown
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.flight.log import FlightLogWriter, write_checkpoint

_PAGE_BYTES = 4096
_CLASS_MODULES = ("headway_scheduler.core.", "headway_proto.sampling", "headway_proto.step")
_STAYS = {
    ("CoreState", "batching"),
    ("CoreState", "reservation"),
    ("CoreState", "preemption"),
    ("CoreState", "offload"),
    ("Swapping", "_offload"),
    ("Passes", "_batching"),
    ("Swapping", "_policy"),
    # Views of token_ids and of block_table.
    ("RowTable", "_flat_token_ids"),
    ("RowTable", "_flat_block_table"),
}
"""Attributes that never change after a core is made."""
_CONTAINERS: dict[str, type] = {kind.__name__: kind for kind in (list, set, frozenset, tuple)}
_MAPPINGS: dict[str, type] = {kind.__name__: kind for kind in (dict, OrderedDict, Counter)}
_FIRST_DESCRIPTOR = 3
_MOST_DESCRIPTORS = 1 << 16

(_REFERENCE, _STAY, _ENUM, _SCALAR) = range(4)
"""The first element of an array that stands for a value."""
(_OBJECT, _STRUCT, _ARRAY, _CONTAINER, _MAPPING, _DEQUE, _NAMED_TUPLE) = range(7)
"""The first element of a node."""


class CheckpointError(Exception):
    """A core cannot be encoded or restored; one line."""


class FleetState(NamedTuple):
    """The cores by the number of their cell, and the requests that no core has."""

    cores: dict[int, Scheduler]
    moving: dict[Origin, Request]


class _FurtherCore(msgspec.Struct, array_like=True):
    """``root``: the number of its node."""

    cell: int
    capacity: ExecutorCapacity
    epoch: int
    root: int


class _Checkpoint(msgspec.Struct, array_like=True):
    """``nodes`` by number; the core of ``cell`` is the first. ``moving``: the node of the requests that no core has."""

    capacity: ExecutorCapacity
    epoch: int
    nodes: list[Any]
    cell: int = 0
    further: tuple[_FurtherCore, ...] = ()
    moving: int = -1


def encode_state(state: FleetState) -> bytes:
    """Encode the state of at least one core.

    Raises:
        CheckpointError: it holds an unknown object.
    """
    encoder = _Encoder()
    roots = {cell: encoder.value(core)[1] for cell, core in state.cores.items()}
    (first, core), *others = state.cores.items()
    checkpoint = _Checkpoint(
        core.capacity,
        core.epoch,
        encoder.nodes,
        first,
        tuple([_FurtherCore(cell, other.capacity, other.epoch, roots[cell]) for cell, other in others]),
        encoder.value(state.moving)[1] if state.moving else -1,
    )
    return msgspec.msgpack.encode(checkpoint)


def restore_state(payload: bytes, limits: SchedulerLimits) -> FleetState:
    """Return cores in the encoded state.

    Raises:
        CheckpointError: not a checkpoint of cores with these ``limits``.
    """
    try:
        checkpoint = msgspec.msgpack.decode(payload, type=_Checkpoint)
        decoder = _Decoder(checkpoint.nodes)
        first = _FurtherCore(checkpoint.cell, checkpoint.capacity, checkpoint.epoch, 0)
        cores = {}
        for part in (first, *checkpoint.further):
            cores[part.cell] = core = Scheduler(limits, part.capacity, part.epoch)
            decoder.value([_REFERENCE, part.root], core)
        moving = {} if checkpoint.moving < 0 else decoder.value([_REFERENCE, checkpoint.moving])
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint does not fit this version: {str(error)[:120]}") from None
    return FleetState(cores, moving)


class _Encoder:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._held: list[object] = []  # keeps numbered objects alive, so that no other gets their address

    def value(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in {bool, int, float, str, bytes}:
            return value
        if isinstance(value, Enum):
            return [_ENUM, _name(kind), value.name]
        if isinstance(value, np.generic):
            return [_SCALAR, value.dtype.str, value.tobytes()]
        if callable(value):
            return [_STAY]
        number = self._numbers.get(id(value))
        if number is None:
            number = len(self.nodes)
            self._numbers[id(value)] = number
            self._held.append(value)
            self.nodes.append(None)
            self.nodes[number] = self._node(value, kind)
        return [_REFERENCE, number]

    def _node(self, value: Any, kind: type) -> list[Any]:
        if isinstance(value, np.ndarray):
            return [_ARRAY, value.dtype.str, list(value.shape), list(_pages(value))]
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            return [_MAPPING, kind.__name__, [[self.value(key), self.value(entry)] for key, entry in value.items()]]
        if kind is deque:
            return [_DEQUE, value.maxlen, [self.value(entry) for entry in value]]
        if kind in {set, frozenset}:
            return [_CONTAINER, kind.__name__, [self.value(entry) for entry in sorted(value)]]
        if kind in {list, tuple}:
            return [_CONTAINER, kind.__name__, [self.value(entry) for entry in value]]
        if _name(kind) not in _classes():
            raise CheckpointError(f"a core holds a {kind.__module__}.{kind.__qualname__}, which has no encoding")
        if isinstance(value, tuple):
            return [_NAMED_TUPLE, _name(kind), [self.value(entry) for entry in value]]
        if isinstance(value, msgspec.Struct):
            fields = [[name, self.value(getattr(value, name))] for name in value.__struct_fields__]
            return [_STRUCT, _name(kind), fields]
        attributes = [
            [name, [_STAY] if (kind.__name__, name) in _STAYS else self.value(entry)]
            for name, entry in _attributes(value)
        ]
        return [_OBJECT, _name(kind), attributes]


class _Decoder:
    def __init__(self, nodes: list[Any]) -> None:
        self._nodes = nodes
        self._made: dict[int, Any] = {}
        self._taken: set[int] = set()
        """The ids of restored objects; all are in ``_made``."""
        self._classes = _classes()

    def value(self, encoded: Any, present: Any = None) -> Any:
        """``present`` is the new core's value in this place."""
        if type(encoded) is not list:
            return encoded
        match encoded:
            case [0, number]:
                if number not in self._made:
                    self._make(number, present)
                return self._made[number]
            case [1]:
                return present
            case [2, name, member]:
                return self._classes[name][member]  # type: ignore[index]  # an Enum
            case [3, dtype, data]:
                return np.frombuffer(data, dtype=np.dtype(dtype))[0]
        raise ValueError(f"{shown(encoded)} is no value")

    def _make(self, number: int, present: Any) -> None:
        node = self._nodes[number]
        match node:
            case [0, name, attributes]:
                self._made[number] = made = self._object(name, present)
                for attribute, encoded in attributes:
                    setattr(made, attribute, self.value(encoded, getattr(made, attribute, None)))
            case [1, name, fields]:
                values = {field: self.value(encoded) for field, encoded in fields}
                self._made[number] = self._classes[name](**values)
            case [2, dtype, shape, pages]:
                self._made[number] = _array(np.dtype(dtype), tuple(shape), pages, present)
            case [3, kind, entries]:
                self._make_container(number, _CONTAINERS[kind], entries, present)
            case [4, kind, entries]:
                self._made[number] = mapping = _MAPPINGS[kind]()
                for key, encoded in entries:
                    mapping[self.value(key)] = self.value(encoded)
            case [5, maxlen, entries]:
                self._made[number] = found = deque[Any](maxlen=maxlen)
                found.extend(self.value(entry) for entry in entries)
            case [6, name, entries]:
                self._made[number] = self._classes[name](*[self.value(entry) for entry in entries])
            case _:
                raise ValueError(f"node {number} is none")

    def _object(self, name: str, present: Any) -> Any:
        """Take the new core's object, since functions are bound to it; else make one without ``__init__``.

        A compiled class allows that only with ``mypyc_attr``.
        """
        kind: Any = self._classes[name]
        is_free = type(present) is kind and id(present) not in self._taken
        made = present if is_free else kind.__new__(kind)
        self._taken.add(id(made))
        return made

    def _make_container(self, number: int, kind: type, entries: list[Any], present: Any) -> None:
        if kind is list:
            made: list[Any] = []
            self._made[number] = made
            is_alike = type(present) is list and len(present) == len(entries)
            places = present if is_alike else [None] * len(entries)
            made.extend(self.value(entry, place) for entry, place in zip(entries, places, strict=True))
        else:
            self._made[number] = kind([self.value(entry) for entry in entries])


def _classes() -> dict[str, type]:
    modules = [module for name, module in sys.modules.items() if name.startswith(_CLASS_MODULES)]
    return {
        _name(entry): entry
        for module in modules
        for entry in vars(module).values()
        if isinstance(entry, type) and entry.__module__ == module.__name__
    }


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    for kind in type(value).__mro__:
        slots = getattr(kind, "__mypyc_attrs__", getattr(kind, "__slots__", ()))
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
    yield from vars(value).items() if hasattr(value, "__dict__") else ()


def _pages(array: NDArray[Any]) -> Iterator[list[Any]]:
    """Yield (offset, bytes) of nonzero pages."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    num_whole = len(flat) // _PAGE_BYTES
    whole = flat[: num_whole * _PAGE_BYTES].reshape(num_whole, _PAGE_BYTES)
    for page in np.flatnonzero(whole.any(axis=1)).tolist():
        yield [page * _PAGE_BYTES, whole[page].tobytes()]
    if num_whole * _PAGE_BYTES < len(flat):
        yield [num_whole * _PAGE_BYTES, flat[num_whole * _PAGE_BYTES :].tobytes()]


def _array(dtype: np.dtype[Any], shape: tuple[int, ...], pages: list[Any], present: Any) -> NDArray[Any]:
    """Reuse a similar ``present`` array: there may be views of it."""
    if dtype.hasobject:
        raise ValueError("an array of objects")
    array: NDArray[Any] = np.zeros(shape, dtype=dtype)
    is_alike = isinstance(present, np.ndarray) and present.dtype == dtype and present.shape == shape
    if is_alike and present.flags.writeable and present.flags.c_contiguous:
        array = present
        array[...] = 0
    flat = array.reshape(-1).view(np.uint8)
    for offset, data in pages:
        flat[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
    return array


class ForkingCheckpointer:
    """Begins a segment with a checkpoint that a forked child writes.

    The scheduler waits only for ``fork``. While a child writes, segments begin without a checkpoint.
    """

    def __init__(self, log: FlightLogWriter, fork: Callable[[], int] = os.fork) -> None:
        self._log = log
        self._fork = fork
        self._child = 0

    def __call__(self, state: FleetState) -> None:
        """Begin a segment."""
        paths = self._log.rotate()
        if self._is_child_alive():
            return
        try:
            self._child = self._fork()
        except OSError:  # no memory or process left: a replay must begin with an earlier segment
            return
        if not self._child:
            _write_and_exit(state, paths.checkpoint)

    def _is_child_alive(self) -> bool:
        if not self._child:
            return False
        try:
            ended, _ = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:
            ended = self._child
        if ended:
            self._child = 0
        return not ended


def _write_and_exit(state: FleetState, path: Path) -> None:
    """The child must not touch the parent's resources."""
    exit_code = 1
    try:
        gc.disable()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # An open socket would keep its address from a restarted scheduler.
        os.closerange(_FIRST_DESCRIPTOR, _MOST_DESCRIPTORS)
        os.nice(19)
        write_checkpoint(path, encode_state(state))
        exit_code = 0
    finally:
        os._exit(exit_code)
