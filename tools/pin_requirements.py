"""Writes the pinned requirement files in ``requirements/`` from the environment that runs it.

Owns: the distributions in each lock. Must not know: how the locks are installed.

``dev.lock`` is everything that is installed; the others are the closure of one service's needs (``serve.lock``: all
three on a CPU). So each version is pinned in one place.

    python tools/pin_requirements.py           # after upgrading something in the virtual environment
"""

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

PROJECT = "headway"
LOCKS = Path(__file__).resolve().parents[1] / "requirements"
SERVICE_EXTRAS = {
    "scheduler": ("metrics",),
    "gateway": ("gateway", "vllm-engine", "metrics", "traces"),
    "executor": ("executor", "metrics"),
    "executor-cuda": ("executor", "cuda", "metrics"),
    "serve": ("gateway", "executor", "metrics", "top"),
}
# The field's gateway, of which nothing of ours is beside it.
FOREIGN_LOCKS = ("smg",)
# What builds the wheel of this project, without build isolation, wherever a lock is installed.
BUILD_REQUIREMENTS = ("hatchling", "editables")


def applicable(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether a requirement holds on this platform with any of the wanted extras, or none."""
    if requirement.marker is None:
        return True
    environment = {key: str(value) for key, value in default_environment().items()}
    return any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))


def closure(roots: Iterable[Requirement]) -> set[str]:
    """The canonical names of the roots and of all that they need."""
    names: set[str] = set()
    seen: set[tuple[str, str]] = set()
    pending = list(roots)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        new_extras = {extra for extra in ("", *requirement.extras) if (name, extra) not in seen}
        if not new_extras:
            continue
        seen.update((name, extra) for extra in new_extras)
        names.add(name)
        declared = map(Requirement, importlib.metadata.requires(name) or ())
        pending.extend(needed for needed in declared if applicable(needed, new_extras - {""}))
    return names - {PROJECT}


def pinned(names: Iterable[str]) -> Iterator[str]:
    """Yield ``name==version`` sorted by name, without a local version label (``+cpu``)."""
    for name in sorted(names):
        yield f"{name}=={Version(importlib.metadata.version(name)).public}"


def installed() -> set[str]:
    """Every distribution of this environment except the project and pip."""
    names: set[str] = {canonicalize_name(found.metadata["Name"]) for found in importlib.metadata.distributions()}
    return names - {PROJECT, "pip"}


def write_lock(name: str, names: Iterable[str]) -> None:
    """Write one lock and print its name."""
    lines = list(pinned(names))
    path = LOCKS / f"{name}.lock"
    header = "# Written by tools/pin_requirements.py (`make lock`); do not edit.\n"
    path.write_text(header + "\n".join(lines) + "\n")
    print(f"{path.relative_to(LOCKS.parent)}: {len(lines)} distributions")


def main() -> int:
    """Write every lock."""
    LOCKS.mkdir(exist_ok=True)
    write_lock("dev", installed())
    for service, extras in SERVICE_EXTRAS.items():
        suffix = f"[{','.join(extras)}]" if extras else ""
        roots = [Requirement(PROJECT + suffix), *map(Requirement, BUILD_REQUIREMENTS)]
        write_lock(service, closure(roots))
    for name in FOREIGN_LOCKS:
        write_lock(name, closure([Requirement(name)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
