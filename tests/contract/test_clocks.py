"""Nothing that serves looks at the wall clock, which an operator or a time server may set at any moment."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path for area in ("proto", "services/*") for path in ROOT.glob(f"{area}/headway*") if path.is_dir())
WALL_CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("datetime", "today"),
    ("date", "today"),
}
ALLOWED = [
    "services/gateway/headway_gateway/text/chat_templates.py",
    "services/gateway/headway_gateway/figures/tracing.py",
    "services/gateway/headway_gateway/wall_clock.py",
]
"""Chat templates may ask for the date, traces are told in it, and some answers of VllmEngine carry it."""


def wall_clocks_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in WALL_CLOCKS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {owner}.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"{path}:{node.lineno}: {name.name}" for name in node.names if name.name.startswith("time"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_no_wall_clock(package: Path) -> None:
    found = [where for path in sorted(package.rglob("*.py")) for where in wall_clocks_in(path)]
    assert [where for where in found if where.partition(":")[0] not in ALLOWED] == []
