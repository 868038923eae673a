"""What a step launches, written down where Triton's kernels would be interpreted, and torch's allocations.

No kernel runs: what the host launches must not depend on what the device computes.

Two kinds of arguments make a kernel compile anew on a device: what it is specialised for (Triton's documentation of
``triton.jit``: integers that are 1 or multiples of 16, pointers that are multiples of 16, types) and its constants.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter


@dataclass(frozen=True)
class Launch:
    """``passed``: what a graph would record; ``key``: what a compiled kernel is found by. ``may_overlap``: it waits for the
    grid before it by itself.
    """

    kernel: str
    passed: tuple[object, ...]
    key: tuple[object, ...]
    may_overlap: bool


@dataclass
class LaunchLog:
    """Of everything inside of ``logged``. ``allocations``: torch's operators that gave new memory."""

    launches: list[Launch] = field(default_factory=list)
    allocations: list[str] = field(default_factory=list)

    @property
    def keys(self) -> set[tuple[object, ...]]:
        return {launch.key for launch in self.launches}


class _Allocations(TorchDispatchMode):
    def __init__(self, log: LaunchLog) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        new = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and leaf.nbytes]
        if any(_memory(leaf) not in given for leaf in new):
            self.log.allocations.append(str(func))
        return made


@contextmanager
def logged() -> Iterator[LaunchLog]:
    """Log what is launched inside."""
    log = LaunchLog()
    run = interpreter.InterpretedFunction.run

    def write_down(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: value for name, value in named.items() if name not in kernel.arg_names}
        given = inspect.getcallargs(kernel.fn, *args, **{k: v for k, v in named.items() if k in kernel.arg_names})
        name = kernel.fn.__name__
        log.launches.append(
            Launch(
                name,
                (name, grid, *[_memory_place(value) for value in given.values()]),
                (
                    name,
                    *[_specialised(kernel, place, *pair) for place, pair in enumerate(given.items())],
                    *sorted(options.items()),
                ),
                "PDL" in kernel.arg_names,
            )
        )

    interpreter.InterpretedFunction.run = write_down
    try:
        with _Allocations(log):
            yield log
    finally:
        interpreter.InterpretedFunction.run = run


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory_place(value: object) -> object:
    return (value.data_ptr(), value.dtype) if isinstance(value, torch.Tensor) else value


def _specialised(kernel: Any, place: int, name: str, value: object) -> object:
    never, unaligned = (
        name in (kernel.kwargs.get(option) or ()) or place in (kernel.kwargs.get(option) or ())
        for option in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    if isinstance(value, torch.Tensor):
        return (name, value.dtype, not (never or unaligned) and value.data_ptr() % 16 == 0)
    if (
        "constexpr" in str(kernel.fn.__annotations__.get(name, ""))
        or not isinstance(value, int)
        or isinstance(value, bool)
    ):
        return (name, type(value) if isinstance(value, float) else value)
    if never:
        return (name, int)
    return (name, "one" if value == 1 else "sixteens" if value % 16 == 0 and not unaligned else "any")
