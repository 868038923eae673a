"""How to install missing packages.

Owns: the command. Must not know: extras' purposes.
No package index has Headway, so the command lists the extra's packages.
"""

import re
import shlex
import sys

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_EXTRA = re.compile(r"""extra == ['"]([^'"]+)['"]""")


def install_advice(extra: str = "") -> str:
    """Return the command for an extra, or the basics."""
    what = f"install the extra {extra}: " if extra else "install: "
    requirements = _requirements(extra)
    if not requirements:
        suffix = f"[{extra}]" if extra else ""
        return f"{what}pip install '.{suffix}' in a checkout of Headway"
    missing = [requirement for requirement in requirements if not _is_installed(requirement)]
    return f"{what}{shlex.join((sys.executable, '-m', 'pip', 'install', *(missing or requirements)))}"


def _requirements(extra: str) -> list[str]:
    import importlib.metadata  # it imports much, and few processes give advice

    try:
        stated = importlib.metadata.requires("headway") or ()
    except importlib.metadata.PackageNotFoundError:
        return []
    split = [requirement.partition(";") for requirement in stated]
    return [text.strip() for text, _, marker in split if ([extra] if extra else []) == _EXTRA.findall(marker)]


def _is_installed(requirement: str) -> bool:
    import importlib.metadata

    name = _NAME.match(requirement)
    assert name is not None
    try:
        importlib.metadata.version(name[0])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
