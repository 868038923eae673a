"""Regular expressions over names of modules, as configuration files have them.

Owns: which of them are tried. Must not know: what they choose.

Python's engine tries one way after the other, and nothing else runs meanwhile: the pattern of a file could take longer than
anybody waits. So there is a bound on the ways, which the text of a pattern gives.
"""

import math
import re
from collections.abc import Sequence

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_proto.wording import shown

_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"[*+{]")
_OPTION = re.compile(r"(?<!\()\?")
_GROUP = re.compile(r"[()]")
_MAX_LENGTH = 512
_NAME_LENGTH = 100
_MAX_WAYS = 50_000_000


def name_patterns(fields: ConfigFields, field: str, texts: Sequence[str]) -> list[re.Pattern[str]]:
    """The patterns of a field, compiled.

    Raises:
        ModelFilesError: one of them is no regular expression, or could take too long.
    """
    found, ways = [], 0
    for text in texts:
        ways += _num_ways(text) if len(text) <= _MAX_LENGTH else _MAX_WAYS + 1
        if _REPEATED_GROUP.search(text) or ways > _MAX_WAYS:
            raise ModelFilesError(
                f"{fields.source}: {field}: pattern {shown(text)} could take too long; allowed: at most {_MAX_LENGTH} "
                "characters, four repeats, few choices, and no repeated groups"
            )
        try:
            found.append(re.compile(text))
        except (re.error, OverflowError, RecursionError) as error:
            raise ModelFilesError(
                f"{fields.source}: {field}: pattern {shown(text)} is not a regular expression ({error}); allowed: one"
            ) from None
    return found


def _num_ways(text: str) -> int:
    """To try a pattern without repeated groups with a name, at most."""
    repeats, options = len(_REPEAT.findall(text)), len(_OPTION.findall(text))
    choices = math.prod(1 + part.count("|") for part in _GROUP.split(text))
    return math.comb(_NAME_LENGTH + repeats, repeats) * choices << options
