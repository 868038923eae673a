"""Chooses between the compiled modules of the core and their sources.

Owns: which modules are compiled, and whether they match their sources. Must not know: how they are compiled.

Compiled modules lie in a directory of their own. It comes first in the core's search path only if its stamp matches the
sources, so an edited source runs at once; ``make core`` compiles it again. Only the standard library is imported here,
because a build runs before anything is installed.
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
"""If it is in the environment, the sources run even if they are compiled: for profilers and tests."""

# Their metaclass is msgspec's, of which mypyc makes nothing: modules with messages and settings stay as they are.
_STRUCT = re.compile(rb"^class \w+\(msgspec\.Struct\b", re.MULTILINE)


def sources_of(core: Path = CORE) -> list[Path]:
    """The modules of the core and of its rooms, by path."""
    return sorted((*core.glob("*.py"), *core.glob("[a-z]*/*.py")))


def compiled_modules(core: Path = CORE) -> tuple[Path, ...]:
    """The sources that are compiled, by name."""
    sources = [path for path in sources_of(core) if path.name != "__init__.py"]
    return tuple(path for path in sources if not _STRUCT.search(path.read_bytes()))


def stamp_of(core: Path = CORE) -> str:
    """A digest (hex) of this Python, the compiling code and all sources.

    All of them, because compiled modules rely on the types of the others.
    """
    digest = hashlib.sha256(f"{sysconfig.get_config_var('EXT_SUFFIX')}\n".encode())
    for path in (core.parent / "compile_core.py", *sources_of(core)):
        content = path.read_bytes()
        name = path.relative_to(core.parent).as_posix()
        digest.update(b"%b %d\n%b" % (name.encode(), len(content), content))
    return digest.hexdigest()


def is_up_to_date(core: Path = CORE, compiled: Path = COMPILED) -> bool:
    """Whether there are compiled modules of exactly these sources for this Python."""
    try:
        return (compiled / STAMP).read_text() == stamp_of(core)
    except FileNotFoundError:
        return False


@functools.cache
def runs_compiled() -> bool:
    """Whether this process runs compiled modules; decided once."""
    return INTERPRET_VARIABLE not in os.environ and is_up_to_date()


def search_path(room: str = "") -> list[str]:
    """The directories of the core's modules, or of those of one room."""
    return [str(COMPILED / room), str(CORE / room)] if runs_compiled() else [str(CORE / room)]
