"""Where the core's modules are taken from: as mypyc has compiled them, or as they are written.

Owns: which modules there are compiled, and whether those are made of the sources beside them.
Must not know: how they are compiled (``compile_core`` does), or what the core does.

The sources are what counts. Compiled modules lie in a directory of their own, and it comes before the sources in the
core's search path only while a file in it tells that it was made of exactly these. So whoever edits a source runs that source,
without having to know that there is a compiler; ``make core`` compiles it again. Only the standard library is
imported here, because a build asks before anything is installed.
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
"""In the environment, with any value: run the sources even where they are compiled, as a profiler or a test may want."""

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
    """What was made of these sources, for this Python, says of itself: a digest, in hex.

    Of all the sources, since what is compiled relies on the types of what is not; and of what compiles them.
    """
    digest = hashlib.sha256(f"{sysconfig.get_config_var('EXT_SUFFIX')}\n".encode())
    for path in (core.parent / "compile_core.py", *sources_of(core)):
        content = path.read_bytes()
        name = path.relative_to(core.parent).as_posix()
        digest.update(b"%b %d\n%b" % (name.encode(), len(content), content))
    return digest.hexdigest()


def is_up_to_date(core: Path = CORE, compiled: Path = COMPILED) -> bool:
    """Whether there are compiled modules, made of exactly the sources in ``core`` for this Python."""
    try:
        return (compiled / STAMP).read_text() == stamp_of(core)
    except FileNotFoundError:
        return False


@functools.cache
def runs_compiled() -> bool:
    """Whether this process runs compiled modules; found out once, when the core is imported or before."""
    return INTERPRET_VARIABLE not in os.environ and is_up_to_date()


def search_path(room: str = "") -> list[str]:
    """The directories in which the modules of the core, or of one of its rooms, are looked for."""
    return [str(COMPILED / room), str(CORE / room)] if runs_compiled() else [str(CORE / room)]
