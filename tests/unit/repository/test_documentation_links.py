"""The link checker of ``make lint``: what it finds, and that the documentation has nothing for it to find."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHECKER = ROOT / "tools" / "check_links.py"


def problems(root: Path) -> list[str]:
    check = subprocess.run([sys.executable, CHECKER, root], capture_output=True, text=True, check=False)
    lines = check.stderr.splitlines()
    assert check.returncode == bool(lines), check.stderr
    return lines


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose documentation is in order."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Top\n\n[docs](docs/README.md), [there](docs/page.md#a-word-of-code)\n")
    (tmp_path / "docs" / "README.md").write_text("# Index\n\n- [a page](page.md)\n")
    (tmp_path / "docs" / "page.md").write_text(
        "# Page\n\n## A `word` of code!\n\n[up](../README.md#top) [here](#page)\n"
    )
    (tmp_path / "code.py").write_text('"""See docs/page.md#page."""\n')
    return tmp_path


def test_documentation_in_order_has_no_problems(repository: Path) -> None:
    assert problems(repository) == []


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("README.md", "[a](docs/gone.md)", "README.md: docs/gone.md: no such file"),
        ("README.md", "![a](gone.png)", "README.md: gone.png: no such file"),
        ("README.md", "[a `b`](docs/page.md#c)", "README.md: docs/page.md#c: no such heading"),
        ("README.md", "[a](../../x.md)", "README.md: ../../x.md: it leads out of the repository"),
        ("docs/page.md", "[a](#gone)", "docs/page.md: #gone: no such heading"),
        ("docs/page.md", "[a](../code.py#1)", "docs/page.md: ../code.py#1: no such heading"),
        ("docs/other.md", "[a](page.md)", "docs/other.md: no link leads here from docs/README.md"),
        ("code.py", "# see docs/gone.md", "code.py: docs/gone.md: no such file"),
    ],
)
def test_what_leads_nowhere_is_found(repository: Path, file: str, text: str, found: str) -> None:
    path = repository / file
    path.write_text((path.read_text() if path.exists() else "") + f"\n{text}\n")
    assert problems(repository) == [found]


@pytest.mark.parametrize(
    "text",
    [
        "[a](https://example.org/x#y)",
        "`[a](gone.md)`",
        "```sh\n[a](gone.md)\n# no heading\n```",
        "## Page\n[a](#page-1)",
    ],
)
def test_other_sites_code_and_repeated_headings_are_no_problem(repository: Path, text: str) -> None:
    page = repository / "docs" / "page.md"
    page.write_text(f"{page.read_text()}\n{text}\n")
    assert problems(repository) == []


def test_a_copy_without_git_is_checked_too(repository: Path) -> None:
    shutil.rmtree(repository / ".git")
    assert problems(repository) == []
    (repository / "docs" / "page.md").unlink()
    assert "docs/README.md: page.md: no such file" in problems(repository)


def test_the_documentation_here_is_in_order() -> None:
    assert problems(ROOT) == []
