"""Puts the compiled CPU kernels into the wheel; hatchling runs it whenever the project is built or installed.

Owns: whether the kernels are compiled, and what the wheel says of itself if it has them.
Must not know: how they are compiled (kernels/headway_kernels/cpu/build.py does).

HEADWAY_BUILD_CPU_KERNELS in the environment of the build decides:

    not set    compiled where that is possible; elsewhere one line tells why not, and the wheel is a pure one, with
               which the executor runs on plain PyTorch
    1          the build fails where they cannot be compiled
    0          not compiled: what a host of the scheduler or of a gateway wants. pip fetches the compiler all the same,
               as it does all that pyproject.toml names for a build, unless it is told --no-build-isolation
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.config import BuilderConfig
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

VARIABLE = "HEADWAY_BUILD_CPU_KERNELS"
BUILD_MODULE = Path("kernels", "headway_kernels", "cpu", "build.py")


def is_wanted(value: str | None) -> bool:
    """Tell whether a value of the variable, or none, wants the kernels."""
    if value not in {None, "0", "1"}:
        sys.exit(f"{VARIABLE} is {value!r}; allowed: 0, 1, or not set")
    return value != "0"


def load_by_path(path: Path) -> ModuleType:
    """Return the module in a file; its package, and what that imports, is not installed yet."""
    spec = importlib.util.spec_from_file_location("headway_kernels_cpu_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def platform_tag() -> str:
    """Return the tag of a wheel that has libraries for this platform, but nothing of one Python version's own."""
    platforms = (tag.platform for tag in sys_tags())
    here = next(name for name in platforms if not name.startswith(("manylinux", "musllinux")))
    return f"py3-none-{here}"


class CpuKernelsHook(BuildHookInterface[BuilderConfig]):
    """Compiles the kernels before the wheel is put together."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what is missing. ``version`` is ``editable`` for a wheel that only points to the source tree."""
        choice = os.environ.get(VARIABLE)
        if not is_wanted(choice):
            return
        libraries = self._libraries(is_required=choice == "1")
        if libraries and version != "editable":
            root = Path(self.root).resolve()
            build_data["artifacts"] += [f"/{library.relative_to(root).as_posix()}" for library in libraries]
            build_data["pure_python"] = False
            build_data["tag"] = platform_tag()

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
            sys.exit(f"{VARIABLE}=1 asks for the CPU kernels, and there are none, for the reason above")
        return libraries
