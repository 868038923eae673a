"""What a host is told to install is there to be installed: real extras, from real metadata, never from an index of ours."""

import ast
import importlib.metadata
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from headway.__main__ import _EXTRAS, main
from headway_lab.doctor.host import _PACKAGES
from headway_process import installation
from headway_process.installation import install_advice
from headway_scheduler.compile_core import _NEEDED

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
REQUIRES = [
    "msgspec>=0.19",
    "no-such-a>=1; extra == 'bench'",
    'msgspec>=0.19; extra == "bench"',
    "b>=2; extra == 'top'",
]


def test_it_is_a_command_for_the_python_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: REQUIRES)
    command = f"{shlex.quote(sys.executable)} -m pip install"
    assert install_advice("bench") == f"install the extra bench: {command} 'no-such-a>=1'"
    assert install_advice("top") == f"install the extra top: {command} 'b>=2'"
    assert install_advice() == f"install: {command} 'msgspec>=0.19'"
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: None)
    assert install_advice("top") == "install the extra top: pip install '.[top]' in a checkout of Headway"


def test_every_extra_that_is_named_exists() -> None:
    sources = [path.read_text() for area in ("proto", "services", "lab") for path in (ROOT / area).rglob("*.py")]
    named = {extra for text in sources for extra in re.findall(r"install_advice\(['\"]([\w-]+)['\"]\)", text)}
    assert {"bench", "smg", "cuda", "metrics", "traces"} <= named
    assert named | set(_EXTRAS.values()) | {extra for _, _, extra in _PACKAGES if extra} <= EXTRAS.keys()


def test_nothing_tells_to_install_a_name_that_is_on_no_index() -> None:
    texts = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    texts += [path for area in ("proto", "services", "lab") for path in (ROOT / area).rglob("*.py")]
    wrong = [
        str(path.relative_to(ROOT))
        for path in texts
        if re.search(r"headway\[[a-z]|pip install 'headway", path.read_text())
    ]
    assert wrong == []
    named = {
        one
        for path in texts
        for extras in re.findall(r"'\.\[([\w,-]+)\]'", path.read_text())
        for one in extras.split(",")
    }
    assert named <= EXTRAS.keys()


@pytest.mark.parametrize("command", ["simulate", "bench", "timeline"])
def test_a_picture_without_matplotlib_names_the_extra_that_brings_it(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest)
    )
    monkeypatch.setattr(installation, "install_advice", install_advice)
    log = [str(tmp_path)] if command == "timeline" else []
    assert main([command, *log, "--png", str(tmp_path / "a.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"headway {command}: --png: this host lacks matplotlib; ")
    assert "install the extra bench: " in error
    assert error.count("\n") == 1


def test_who_compiles_the_core_is_told_to_install_what_it_imports() -> None:
    """The compiler reads the core and the modules beneath it, so what these import must be there, whoever calls it."""
    packages = (ROOT / "services" / "scheduler", ROOT / "proto")
    core = (ROOT / "services" / "scheduler" / "headway_scheduler" / "core").rglob("*.py")
    waiting, seen, others = [path for path in core if "_compiled" not in path.parts], set(), set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = [found for package in packages if (found := package / f"{name.replace('.', '/')}.py").exists()]
                waiting += own
                others |= set() if own or name.startswith("headway_") else {name.split(".")[0]}
    imported = others - sys.stdlib_module_names - {"mypy_extensions"}
    assert {"numpy", "msgspec", "isal"} <= imported <= set(_NEEDED)
    needed = {"mypy" if name == "mypyc" else name for name in _NEEDED}
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needed <= {re.split(r"[^\w-]", name)[0] for name in requires}
    fetched = re.search(r"--constraint requirements/dev\.lock \\\n([^;]*);", (ROOT / "Makefile").read_text())
    assert fetched is not None
    assert needed <= set(fetched[1].split())
