"""Formats of texts in JSON schemas, in words that the grammar library has.

Owns: which formats mean something else than the library takes them for. Must not know: schemas around them.
"""

import re
from collections.abc import Mapping
from typing import Any

_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_UUID_WITH = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-%s-[0-9a-fA-F]{12}"
UUID = _UUID_WITH % "[0-9a-fA-F]{4}-[0-9a-fA-F]{4}"
"""The pattern of a UUID of any version."""


_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_SECONDS = r"[0-9]+(?:[.,][0-9]+)?S"
_CLOCK = f"T(?:[0-9]+H(?:[0-9]+M)?(?:{_SECONDS})?|[0-9]+M(?:{_SECONDS})?|{_SECONDS})"
_CALENDAR = "(?:[0-9]+Y(?:[0-9]+M)?(?:[0-9]+D)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

DURATION = f"P(?:[0-9]+W|{_CALENDAR}(?:{_CLOCK})?|{_CLOCK})"
"""The pattern of a duration, of weeks or of other units."""


def escaped(text: str) -> str:
    """Return a pattern of a text, or what a class of characters holds."""
    return re.sub(r"[!-/:;=?@\[-^`{-~]", r"\\\g<0>", text)


def _whole(pattern: str) -> dict[str, Any]:
    return {"pattern": f"^(?:{pattern})$"}


def _base64(letters: str) -> dict[str, Any]:
    one = f"[A-Za-z0-9{letters}]"
    return _whole(f"(?:{one}{{4}})*(?:{one}{{2}}==|{one}{{3}}=)?")


FORMATS: Mapping[str, dict[str, Any]] = {
    # The library also allows February 29 of every year, the year 0 and the 60th second, which few programs read.
    "date": _whole(_DATE),
    "date-time": _whole(f"{_DATE}[tT]{_TIME}"),
    "time": _whole(_TIME),
    # Of Pydantic, zod and OpenAPI; no draft has them.
    **{
        f"uuid{version}": _whole(_UUID_WITH % f"{version}[0-9a-fA-F]{{3}}-[89abAB][0-9a-fA-F]{{3}}")
        for version in range(1, 9)
    },
    "base64": _base64("+/"),
    "byte": _base64("+/"),
    "base64url": _base64("_-"),
    "ipvanyaddress": {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    "url": {"format": "uri"},
    # A network has no bits behind its mask; these are the usual ones.
    "ipv4network": _whole(
        rf"{_BYTE}\.0\.0\.0/8|{_BYTE}\.{_BYTE}\.0\.0/16|(?:{_BYTE}\.){{3}}0/24|(?:{_BYTE}\.){{3}}{_BYTE}/32"
    ),
    "ipv4interface": _whole(rf"(?:{_BYTE}\.){{3}}{_BYTE}/(?:3[0-2]|[12]?[0-9])"),
    # These say nothing of the text.
    **{name: {} for name in ("binary", "directory-path", "file-path", "password", "path")},
}
PATTERNS: Mapping[str, dict[str, Any]] = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": _whole(
        r"(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@(?:[A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": _whole(DURATION),
    r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$": {
        "maxLength": 253,
        **_whole(rf"{_LABEL}(?:\.{_LABEL})*\.?"),
    },
}
"""What zod 4 writes beside the formats email, duration and hostname, without look-ahead."""

FORMATS_OF_DRAFTS = frozenset(
    [
        "duration",
        "email",
        "hostname",
        "idn-email",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "iri",
        "iri-reference",
        "json-pointer",
        "regex",
        "relative-json-pointer",
        "unknown",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    ]
)
"""Those without another way, with the library's own ``unknown``."""
