"""Checks the links of the documentation: files, #anchors, and the way from docs/README.md to every page of docs/.

Owns: how GitHub makes an anchor of a heading, and what counts as a link. Must not know: what the pages say, nor the network.

    python tools/check_links.py [ROOT]     # exit 1, with a line for each broken link, if there are any (`make lint`)
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

INDEX = Path("docs/README.md")
_FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[`~]*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_NAMED = re.compile(r"(?<![\w/.-])docs/[\w-]+\.md(?:#[\w-]+)?")  # in messages and comments of the code


def links_of(text: str) -> Iterator[str]:
    """Yield the targets of a page's links and pictures; what stands in code is none."""
    for match in _LINK.finditer(_CODE.sub("``", _FENCE.sub("", text))):
        yield match[1]


def anchors_of(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        plain = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        anchors.add(f"{plain}-{seen[plain]}" if seen[plain] else plain)
        seen[plain] += 1
    return anchors


def files_of(root: Path) -> list[Path]:
    """Return the files that git tracks or would track; outside of a repository, all that are not hidden."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 (wherever PATH says)
        cwd=root,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
        return sorted(path for path in found if not any(part.startswith(".") for part in path.parts))
    return [Path(name) for name in listed.stdout.decode().split("\0") if (root / name).is_file()]


class Documentation:
    """The files of a repository, and the pages among them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files = files_of(root)
        self._pages = [path for path in self._files if path.suffix == ".md"]
        self._read = cache(lambda path: (root / path).read_text(encoding="utf-8"))
        self._anchors = cache(lambda path: anchors_of(self._read(path)))

    def problems(self) -> Iterator[str]:
        """Yield one line for each link that leads nowhere and for each page of docs/ that no link reaches."""
        for page in self._pages:
            for target in links_of(self._read(page)):
                if reason := self._broken(page, target):
                    yield f"{page}: {target}: {reason}"
        for path in self._files:
            if path.suffix in {".py", ".proto", ".yaml", ".toml"} and path.parts[0] != "tests":
                for target in _NAMED.findall(self._read(path)):
                    if reason := self._broken(Path(), target):
                        yield f"{path}: {target}: {reason}"
        pages = {page for page in self._pages if page.parts[0] == INDEX.parts[0]}
        for page in sorted(pages - self._reached(INDEX)):
            yield f"{page}: no link leads here from {INDEX}"

    def _broken(self, page: Path, target: str) -> str:
        """Say why a link of a page leads nowhere; empty, if it does not."""
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            return ""
        path, _, anchor = target.partition("#")
        found = self._resolved(page, path)
        if found is None:
            return "it leads out of the repository"
        if not (self._root / found).exists():
            return "no such file"
        if anchor and (found.suffix != ".md" or anchor not in self._anchors(found)):
            return "no such heading"
        return ""

    def _resolved(self, page: Path, path: str) -> Path | None:
        if not path:
            return page
        there = (self._root / page.parent / path).resolve()
        root = self._root.resolve()
        return there.relative_to(root) if there.is_relative_to(root) else None

    def _reached(self, start: Path) -> set[Path]:
        reached: set[Path] = set()
        waiting = [start]
        while waiting:
            page = waiting.pop()
            if page in reached or page not in self._pages:
                continue
            reached.add(page)
            if page.parts[0] != start.parts[0]:
                continue  # a page elsewhere is no part of the way
            for target in links_of(self._read(page)):
                if not re.match(r"[a-z][a-z0-9+.-]*:", target):
                    found = self._resolved(page, target.partition("#")[0])
                    waiting += [found] if found else []
        return reached


def main(arguments: Sequence[str]) -> int:
    """Print the problems; return 1 if there are any."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    problems = list(Documentation(root).problems())
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
