"""Texts and regular expressions as grammars have them, in Lark's dialect."""

import json
import re

_ENDS_A_PATTERN = re.compile(r"\\.|/|\n", re.DOTALL)
_SAID = {"/": r"\/", "\n": r"\n"}


def text(literal: str) -> str:
    """Return a text as a grammar has it."""
    return json.dumps(literal, ensure_ascii=False)


def pattern(regex: str) -> str:
    """Return a regular expression as a grammar has it: what would end it is written otherwise."""
    return f"/{_ENDS_A_PATTERN.sub(lambda found: _SAID.get(found[0], found[0]), regex)}/"
