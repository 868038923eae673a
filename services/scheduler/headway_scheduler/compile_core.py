"""Compiles the core's modules with mypyc (https://mypyc.readthedocs.io) into a directory beside them.

Owns: the calls of mypyc and the C compiler. Must not know: who imports compiled modules.
Needs mypy, setuptools, a C compiler (the ``ziglang`` wheel has one) and Python's headers:

    python -m headway_scheduler.compile_core        # or: make core
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from headway_scheduler.compiled_core import COMPILED, CORE, STAMP, compiled_modules, is_up_to_date, stamp_of

PACKAGE = "headway_scheduler.core"
# The extension module with all the code; the others only refer to it.
_SHARED = f"{PACKAGE}.all"
_NEEDED = ("mypyc", "setuptools", "numpy", "msgspec", "isal")


class CoreBuildError(Exception):
    """The core cannot be compiled; one line."""


class ToolMissingError(CoreBuildError):
    """A tool is missing."""


def require_tools() -> None:
    """Check the tools.

    Raises:
        ToolMissingError: names the missing one.
    """
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise ToolMissingError(f"no {name}, which compiling the core takes")
    if importlib.util.find_spec("ziglang") is None and shutil.which("cc") is None:
        raise ToolMissingError("no C compiler for the core; pip install ziglang brings one")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise ToolMissingError(f"no {header}, which compiling the core takes (Debian: apt install python3-dev)")


def compile_core(core: Path = CORE, compiled: Path = COMPILED) -> None:
    """Compile ``core`` into ``compiled``, in another process. An import meanwhile finds no compiled module, or all.

    Raises:
        CoreBuildError: something is missing, or a compiler failed.
    """
    require_tools()
    stamp = stamp_of(core)
    with tempfile.TemporaryDirectory(prefix="headway-core-") as workplace:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headway_scheduler.compile_core", "--into", workplace, str(core)],
            env=_environment(core, workplace), capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode:
            lines = (done.stderr + done.stdout).strip().splitlines() or ["the compiler failed and did not say why"]
            problem = next((line for line in lines if "error:" in line), lines[-1])
            raise CoreBuildError(f"the core cannot be compiled: {problem.strip()}")
        made = Path(workplace, "lib", *PACKAGE.split("."))
        (made / STAMP).write_text(stamp)
        fresh = compiled.with_name(f"{compiled.name}.{os.getpid()}")
        shutil.copytree(made, fresh)
    shutil.rmtree(compiled, ignore_errors=True)
    fresh.rename(compiled)
    if stamp_of(core) != stamp:
        raise CoreBuildError("the core's sources have changed while they were compiled; compile them again")


def _environment(core: Path, workplace: str) -> dict[str, str]:
    environment = dict(os.environ)
    packages = core.parents[1]
    contracts = packages.parents[1] / "proto"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), environment.get("PYTHONPATH"))))
    environment["MYPYPATH"] = os.pathsep.join((str(contracts), str(packages)))
    if importlib.util.find_spec("ziglang") is not None and sys.platform == "linux":
        # Baseline: zig's default is this machine's processor. The sanitizer's library takes twenty seconds to build.
        compiler = f"{sys.executable} -P -m ziglang cc -mcpu=baseline -fno-sanitize=undefined"
        environment |= {"CC": compiler, "LDSHARED": f"{compiler} -shared"}
    for cache in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
        environment.setdefault(cache, str(Path(workplace, "cache")))
    return environment


def _compile(core: Path, workplace: Path) -> None:
    from mypyc.build import mypycify
    from setuptools import Distribution

    sources = [str(path) for path in compiled_modules(core)]
    options = ["--strict", "--explicit-package-bases", "--config-file=", f"--cache-dir={workplace / 'mypy'}"]
    # Level 3 compiles nearly twice as long and is not faster. Assertions stay.
    extensions = mypycify(
        [*options, *sources], group_name=_SHARED, target_dir=str(workplace / "c"), opt_level="2", debug_level="0"
    )
    build = Distribution({"name": "headway-core", "ext_modules": extensions}).get_command_obj("build_ext")
    build.build_lib = str(workplace / "lib")
    build.build_temp = str(workplace / "objects")
    build.parallel = True
    build.ensure_finalized()
    build.run()


def main() -> int:
    """Compile if sources changed; return the exit code."""
    parser = argparse.ArgumentParser(description="Compile the scheduler's core where its sources have changed.")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("core", nargs="?", type=Path, default=CORE, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into is not None:
        os.chdir(arguments.into)
        _compile(arguments.core, arguments.into)
        return 0
    if is_up_to_date():
        sys.stdout.write("the scheduler's core: up to date\n")
        return 0
    sys.stdout.write("the scheduler's core: compiling, some half a minute\n")
    sys.stdout.flush()
    start = time.perf_counter()
    try:
        compile_core()
    except ToolMissingError as error:
        sys.stdout.write(f"{error}; its sources run instead, and a step takes half as long again\n")
        return 0
    except CoreBuildError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"the scheduler's core: compiled in {time.perf_counter() - start:.1f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
