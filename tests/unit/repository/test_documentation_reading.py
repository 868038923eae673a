"""docs/reading.md: what it tells a newcomer to read is there, and can be read in an hour."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reading.md"
MOST_LINES = 2_000
ROW = re.compile(r"^\| \[`[^`]+`\]\(\.\./([^)]+)\) \| ([^|]+) \|", re.MULTILINE)


def spans_of(module: ast.Module) -> dict[str, range]:
    """The lines of each class, function and method of a module, by name."""
    spans = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            spans[node.name] = range(node.lineno, (node.end_lineno or 0) + 1)
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    spans[f"{node.name}.{method.name}"] = range(method.lineno, (method.end_lineno or 0) + 1)
    return spans


def lines_to_read(path: Path, parts: str) -> set[int]:
    text = path.read_text(encoding="utf-8")
    module = ast.parse(text)
    lines: set[int] = set()
    for part in re.findall(r"`([^`]+)`|(all|opening)", parts):
        named, whole = part
        if whole == "all":
            lines.update(range(1, len(text.splitlines()) + 1))
        elif whole == "opening":
            lines.update(range(1, (module.body[0].end_lineno or 0) + 1))
        else:
            spans = spans_of(module)
            assert named in spans, f"docs/reading.md: {path.name} has no {named}"
            lines.update(spans[named])
    return lines


def test_what_is_to_be_read_is_there_and_no_more_than_an_hour_of_it() -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) >= 15
    counts = {path: len(lines_to_read(ROOT / path, parts)) for path, parts in rows}
    assert all(counts.values()), counts
    assert sum(counts.values()) <= MOST_LINES, counts
