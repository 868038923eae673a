"""A module that may be installed, with calls of known arguments.

Owns: finding it. Must not know: what it computes.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from headway_kernels.gpu.attention.long_chunks import LibraryLacking


def found_in(module: str, calls: Mapping[str, Sequence[str]]) -> list[Any]:
    """What ``module`` has by these names, perhaps dotted, each with arguments of these names.

    Raises:
        LibraryLacking: something of that is not there; says what in one line.
    """
    try:
        root: Any = importlib.import_module(module)
        found: list[Any] = [reduce(getattr, name.split("."), root) for name in calls]
    # Beyond what is not there, such modules fail at import in their own ways: no driver, no compiler, another version of a part.
    except Exception as error:
        raise LibraryLacking(
            f"{module}.{next(iter(calls))} cannot be had: {' '.join(str(error).split())[:100]}"
        ) from error
    for (name, arguments), call in zip(calls.items(), found, strict=True):
        taken = inspect.signature(call).parameters
        if missing := [argument for argument in arguments if argument not in taken]:
            raise LibraryLacking(f"{module}.{name} takes no {', '.join(missing)}; it is of another version")
    return found
