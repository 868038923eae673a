"""What an object holds, counted: every container and every number that can be reached from it, by path.

Owns: the walk. Must not know: which numbers there should be.

Nothing is named here, so that a container which is new tomorrow is counted tomorrow. Attributes are those of the
instance, of ``__slots__``, of a struct, and of a class that mypyc has compiled, which has no ``__dict__``.
"""

from collections import deque
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any

import msgspec
import numpy as np

OURS = ("headway_",)
"""Objects of these packages are walked through; all others are left alone."""

_ABSENT = object()
_RECORD = 8


def census(root: object, name: str) -> dict[str, float]:
    """By path from ``name``: ``len(path)`` of a container, ``size(path)`` of an array, the value of an integer or a truth
    value, 1 for an object. Elements of one container share a path (``path[]``), and the largest number counts.
    """
    numbers: dict[str, float] = {}
    seen: set[int] = set()
    left: deque[tuple[str, object]] = deque([(name, root)])  # so that an object has its shortest path
    while left:
        path, value = left.popleft()
        kind = _kind_of(type(value))
        if kind == _NUMBER:
            number = int(value)  # type: ignore[call-overload]
        elif kind == _ARRAY:
            path, number = f"size({path})", value.size  # type: ignore[attr-defined]
        elif kind == _CONTAINER:
            inside = f"{path}[]"
            path, number = f"len({path})", len(value)  # type: ignore[arg-type]
            if number and id(value) not in seen:
                left += [(inside, element) for element in _looked_into(value)]
                seen.add(id(value))
        elif kind == _OURS and id(value) not in seen:
            seen.add(id(value))
            left += [(f"{path}.{attribute}", entry) for attribute, entry in _attributes(value) if entry is not None]
            number = 1
        else:
            continue
        if number > numbers.get(path, -_FAR):
            numbers[path] = number
    return numbers


_FAR = 1 << 80
_NOTHING, _NUMBER, _ARRAY, _CONTAINER, _OURS = range(5)
"""Kinds of objects. Of no interest are text, times, what cannot be changed, and what is of others."""


@cache
def _kind_of(cls: type) -> int:
    if issubclass(cls, Enum):
        return _NOTHING
    if issubclass(cls, int):
        return _NUMBER
    if issubclass(cls, np.ndarray):
        return _ARRAY
    if issubclass(cls, dict | list | set | frozenset | tuple | deque):
        return _CONTAINER
    is_frozen = issubclass(cls, msgspec.Struct) and cls.__struct_config__.frozen
    is_ours = any(base.__module__.startswith(OURS) for base in cls.__mro__)
    return _OURS if is_ours and not is_frozen else _NOTHING


def _looked_into(container: Any) -> list[object]:
    """What is in a container is of one kind, but for records: short tuples."""
    elements = list(container.values() if isinstance(container, dict) else container)
    if len(elements) > _RECORD and _kind_of(type(elements[0])) <= _NUMBER:
        return []
    return [element for element in elements if _kind_of(type(element)) > _NUMBER]


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for name in _declared(type(value)):
        entry = getattr(value, name, _ABSENT)
        if entry is not _ABSENT:
            yield name, entry


@cache
def _declared(cls: type) -> tuple[str, ...]:
    """What objects of a class have beside their ``__dict__``."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        for where in ("__slots__", "__struct_fields__", "__mypyc_attrs__"):
            declared = base.__dict__.get(where, ())
            if isinstance(declared, tuple | list):
                names |= dict.fromkeys(declared)
    return tuple(name for name in names if name not in {"__dict__", "__weakref__"})
