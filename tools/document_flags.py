"""Writes the table of settings in docs/settings.md from the configuration structs themselves.

Owns: the layout of the table and its marks. Must not know: any setting.

    python tools/document_flags.py             # rewrite the table (`make flags`)
    python tools/document_flags.py --check     # exit 1 if it differs
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from headway.flags.settings import Setting, settings_of
from headway.planning.cluster_config import ClusterConfig
from headway.planning.serve_config import ServeConfig
from headway.planning.services import SERVICES, SETTLED_BY_SERVE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
BEGIN = "<!-- settings: written by tools/document_flags.py -->"
END = "<!-- end of settings -->"


def rows() -> Iterator[str]:
    """Yield the table's lines; a setting of several services comes once, with all of them."""
    declared = {
        "serve": settings_of(ServeConfig),
        **{name: service.settings for name, service in SERVICES.items()},
        "cluster": settings_of(ClusterConfig),
    }
    owners: dict[tuple[str, str, str, str], list[str]] = {}
    for section, settings in declared.items():
        for name, setting in settings.items():
            flag = f"`{setting.flag}`" + "*" * (name in SETTLED_BY_SERVE)
            owners.setdefault((flag, _default(setting), _allowed(setting), setting.description), []).append(section)
    yield "| flag | of | default | allowed | |"
    yield "|---|---|---|---|---|"
    for (flag, default, within, description), sections in owners.items():
        yield f"| {flag} | {', '.join(sections)} | {default} | {within} | {description} |"


def _allowed(setting: Setting) -> str:
    """The allowed values, if they can be listed or bounded."""
    return "on, off" if setting.is_bool else setting.within


def _default(setting: Setting) -> str:
    if setting.required:
        return "required"
    if isinstance(setting.default, bool):
        return "on" if setting.default else "off"
    return f"`{setting.default}`" if setting.default not in ("", {}, ()) else ""  # {} has no hash


def written(text: str) -> str:
    """Return the page's text with the table of today between the marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n".join((BEGIN, *rows(), END)) + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the table, or with ``--check`` compare."""
    parser = argparse.ArgumentParser(description="Write the table of settings in docs/settings.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the table differs")
    text = PAGE.read_text(encoding="utf-8")
    expected = written(text)
    if parser.parse_args(arguments).check:
        if text != expected:
            print("docs/settings.md: the table of settings is out of date; run `make flags`", file=sys.stderr)
        return int(text != expected)
    PAGE.write_text(expected, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
