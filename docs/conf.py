"""Sphinx's settings for the documentation as a site: ``make docs`` (https://www.sphinx-doc.org/en/master/usage/configuration.html).

Owns: which files are pages, and their order. Must not know: what the pages say.

The pages are the Markdown files as they are in the repository, so they also read well there.
"""

import re
from typing import Any

from sphinx.application import Sphinx

INDEX = "docs/README"

project = "Headway"
project_copyright = "the Headway authors"
extensions = ["myst_parser"]
root_doc = INDEX
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/*.md"]
exclude_patterns = ["docs/pictures"]
source_suffix = {".md": "markdown"}
html_theme = "alabaster"
html_theme_options = {"page_width": "1200px", "fixed_sidebar": True}
html_title = "Headway"
html_static_path: list[str] = []

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
# Links to directories of the source tree lead nowhere on a site; tests hold them to what exists.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the index a list of all pages, in the order in which its table names them."""
    del app
    if docname != INDEX:
        return
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+\.md)[^)]*\)", source[0])]
    pages = ["../README.md", *dict.fromkeys(targets)]
    source[0] += "\n".join(("", "```{toctree}", ":hidden:", *pages, "```", ""))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
    return {"parallel_read_safe": True}
