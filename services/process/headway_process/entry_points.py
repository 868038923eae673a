"""What goes by a name: the built-in things, and what packages of this environment offer. Must not know: what for.

A look into the environment imports much, and reads the metadata of every package. So a built-in name is never looked up,
and others once.
"""

import functools
import pkgutil
from collections.abc import Mapping


class ByName:
    """``built_in`` things, ``module:attribute`` by name, and those of an entry point group under other names."""

    def __init__(self, group: str, built_in: Mapping[str, str]) -> None:
        self.group = group
        self._built_in = built_in

    @property
    def names(self) -> tuple[str, ...]:
        """All, sorted; nothing is imported."""
        return tuple(sorted({*self._built_in, *self._offered}))

    def __contains__(self, name: str) -> bool:
        return name in self._built_in or name in self._offered

    def load(self, name: str) -> object:
        """Import what goes by a known name.

        Raises:
            ModuleNotFoundError: it needs a package that is not installed.
        """
        return pkgutil.resolve_name(self._built_in.get(name) or self._offered[name])

    @functools.cached_property
    def _offered(self) -> Mapping[str, str]:
        import importlib.metadata

        return {found.name: found.value for found in importlib.metadata.entry_points(group=self.group)}
