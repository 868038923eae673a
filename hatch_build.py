"""Puts what is compiled into the wheel; hatchling runs it whenever the project is built or installed.

Owns: whether the CPU kernels and the scheduler's core are compiled, and what the wheel says of itself if it has them.
Must not know: how (kernels/headway_kernels/cpu/build.py and headway_scheduler/compile_core.py do).

HEADWAY_BUILD_CPU_KERNELS and HEADWAY_BUILD_CORE in the environment of the build decide:

    not set    compiled where that is possible; elsewhere one line tells why not, and the wheel is without: the executor
               runs on plain PyTorch then, and the scheduler its core as it is written
    1          the build fails where that cannot be compiled
    0          not compiled: what a host that has no executor, or no scheduler, wants. pip fetches the compilers all the
               same, as it does all that pyproject.toml names for a build, unless it is told --no-build-isolation
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

KERNELS_VARIABLE = "HEADWAY_BUILD_CPU_KERNELS"
CORE_VARIABLE = "HEADWAY_BUILD_CORE"
BUILD_MODULE = Path("kernels", "headway_kernels", "cpu", "build.py")
SCHEDULER = Path("services", "scheduler")
COMPILED_CORE = SCHEDULER / "headway_scheduler" / "compiled_core.py"


class Choice(NamedTuple):
    """What the environment says of one part."""

    is_wanted: bool
    is_required: bool


def choice_of(variable: str) -> Choice:
    """What a variable says, or its absence."""
    value = os.environ.get(variable)
    if value not in {None, "0", "1"}:
        sys.exit(f"{variable} is {value!r}; allowed: 0, 1, or not set")
    return Choice(value != "0", value == "1")


def load_by_path(path: Path) -> ModuleType:
    """Return the module in a file; its package, and what that imports, is not installed yet."""
    spec = importlib.util.spec_from_file_location(f"headway_build_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def platform_tag(*, has_core: bool) -> str:
    """Return the tag of a wheel that has libraries for this platform, and extension modules of this Python version or not."""
    here = next(tag for tag in sys_tags() if not tag.platform.startswith(("manylinux", "musllinux")))
    return str(here) if has_core else f"py3-none-{here.platform}"


class CompiledPartsHook(BuildHookInterface[BuilderConfig]):
    """Compiles what there is to compile before the wheel is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what is missing. ``version`` is ``editable`` for a wheel that only points to the source tree."""
        kernels, core = choice_of(KERNELS_VARIABLE), choice_of(CORE_VARIABLE)
        libraries = self._libraries(is_required=kernels.is_required) if kernels.is_wanted else ()
        modules = self._core_modules(is_required=core.is_required) if core.is_wanted else ()
        if (libraries or modules) and version != "editable":
            root = Path(self.root).resolve()
            files = (*libraries, *modules)
            build_data["artifacts"] += [f"/{file.resolve().relative_to(root).as_posix()}" for file in files]
            build_data["pure_python"] = False
            build_data["tag"] = platform_tag(has_core=bool(modules))

    def _libraries(self, *, is_required: bool) -> tuple[Path, ...]:
        build = load_by_path(Path(self.root) / BUILD_MODULE)
        libraries: tuple[Path, ...] = ()
        try:
            libraries = build.build_libraries(report=self.app.display_info)
        except build.CompilerMissingError as error:
            self.app.display_warning(f"{error}; built without them, plain PyTorch runs instead")
        except build.KernelBuildError as error:
            sys.exit(str(error))
        if is_required and not libraries:
            sys.exit(f"{KERNELS_VARIABLE}=1 asks for the CPU kernels, and there are none, for the reason above")
        return libraries

    def _core_modules(self, *, is_required: bool) -> tuple[Path, ...]:
        """Compiled by a process of its own: mypyc changes the setuptools that it finds."""
        packages = str(Path(self.root, SCHEDULER))
        path = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headway_scheduler.compile_core"],
            env={**os.environ, "PYTHONPATH": path},
            check=False,
        )
        core = load_by_path(Path(self.root, COMPILED_CORE))
        if done.returncode or (is_required and not core.is_up_to_date()):
            sys.exit(f"{CORE_VARIABLE}=0 leaves the core as it is written; it cannot be compiled, for the reason above")
        return (
            tuple(sorted(path for path in core.COMPILED.rglob("*") if path.is_file())) if core.is_up_to_date() else ()
        )
