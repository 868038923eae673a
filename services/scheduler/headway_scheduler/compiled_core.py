"""Chooses between the core's compiled modules and their sources.

Owns: which modules are compiled, and whether they match the sources. Must not know: how they are compiled.
Compiled modules count only if their stamp matches the sources, so an edited source runs at once. Only the standard
library is imported, because a build runs before anything is installed.
"""

import functools
import hashlib
import os
import re
import sysconfig
from pathlib import Path

CORE = Path(__file__).resolve().parent / "core"
COMPILED = CORE / "_compiled"
STAMP = "made_from.txt"

INTERPRET_VARIABLE = "_HEADWAY_INTERPRET_CORE"
"""If set, the sources run even if they are compiled: for profilers and tests."""

# mypyc cannot compile msgspec's metaclass, so modules with structs stay uncompiled.
_STRUCT = re.compile(rb"^class \w+\(msgspec\.Struct\b", re.MULTILINE)


def sources_of(core: Path = CORE) -> list[Path]:
    """Return the core's modules, by path."""
    return sorted((*core.glob("*.py"), *core.glob("[a-z]*/*.py")))


def compiled_modules(core: Path = CORE) -> tuple[Path, ...]:
    """Return the sources to compile, by path."""
    sources = [path for path in sources_of(core) if path.name != "__init__.py"]
    return tuple(path for path in sources if not _STRUCT.search(path.read_bytes()))


def stamp_of(core: Path = CORE) -> str:
    """Return a digest (hex) of Python, compiling code and all sources: compiled modules rely on others' types."""
    digest = hashlib.sha256(f"{sysconfig.get_config_var('EXT_SUFFIX')}\n".encode())
    for path in (core.parent / "compile_core.py", *sources_of(core)):
        content = path.read_bytes()
        name = path.relative_to(core.parent).as_posix()
        digest.update(b"%b %d\n%b" % (name.encode(), len(content), content))
    return digest.hexdigest()


def is_up_to_date(core: Path = CORE, compiled: Path = COMPILED) -> bool:
    """Whether compiled modules of exactly these sources exist."""
    try:
        return (compiled / STAMP).read_text() == stamp_of(core)
    except FileNotFoundError:
        return False


@functools.cache
def runs_compiled() -> bool:
    """Whether this process runs compiled modules."""
    return INTERPRET_VARIABLE not in os.environ and is_up_to_date()


def search_path(room: str = "") -> list[str]:
    """Return the directories of the core's or a room's modules."""
    return [str(COMPILED / room), str(CORE / room)] if runs_compiled() else [str(CORE / room)]
