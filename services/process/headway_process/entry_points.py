"""What packages of this environment offer. Must not know: what for.

A look reads the metadata of every package, which takes some milliseconds, so a process looks once for each group.
"""

import functools
import importlib.metadata
from importlib.metadata import EntryPoints


def entry_points(group: str, name: str | None = None) -> EntryPoints:
    """Return those of a group, or the ones of this ``name``."""
    found = _of_group(group)
    return found if name is None else found.select(name=name)


@functools.cache
def _of_group(group: str) -> EntryPoints:
    return importlib.metadata.entry_points(group=group)
