"""The page of metrics names each one."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
DEFINED = re.compile(r'families\.\w+\(\s*"headway_(\w+)"')


def test_every_metric_is_documented() -> None:
    sources = (REPOSITORY / "services").rglob("*.py")
    names = {name for path in sources for name in DEFINED.findall(path.read_text(encoding="utf-8"))}
    page = (REPOSITORY / "docs" / "observability.md").read_text(encoding="utf-8")
    assert len(names) > 50
    assert [name for name in sorted(names) if not re.search(rf"\b{name}(_total)?\b", page)] == []
