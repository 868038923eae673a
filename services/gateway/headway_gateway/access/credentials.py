"""The tokens in a file, and their roles; docs/security.md shows the format.

A search takes the same time for any token. A half-written file must grant no more than the whole: each line ends with a
newline (``token_files``), and a file that once had roles is not read as a single word.
"""

import hashlib
import hmac
import re
import time
from pathlib import Path

import msgspec

from headway_process.late_logs import log_of
from headway_process.token_files import text_of_token_file
from headway_proto.wording import shown

GENERATE, ADMIN = "generate", "admin"
ROLES = (GENERATE, ADMIN)
MAX_TOKENS = 10_000

_MAX_FILE_BYTES = 4 << 20
_MAX_NAME_CHARACTERS = 64
_MAX_TENANT_BYTES = 128
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")
_TENANT = "tenant="
_LOOK_INTERVAL_S = 0.5


class Caller(msgspec.Struct, frozen=True):
    """A token's owner. ``tenant`` None allows any."""

    name: str
    roles: frozenset[str]
    tenant: str | None = None


SOLE_CALLER = Caller("default", frozenset(ROLES))
"""The caller for a file with a single word."""


class TokenTable:
    """The callers by token."""

    def __init__(self, callers: dict[bytes, Caller]) -> None:
        """``callers`` by their tokens' SHA-256 digest."""
        self._callers = tuple(callers.items())

    def find(self, token: str) -> Caller | None:
        """Search in constant time."""
        digest = digest_of(token)
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(digest, known):
                found = caller
        return found

    def __len__(self) -> int:
        return len(self._callers)


def digest_of(token: str) -> bytes:
    """Return a token's SHA-256 digest."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def parse_tokens(text: str) -> dict[bytes, Caller]:
    """Read a token file's contents.

    Raises:
        ValueError: it names the line, never a token.
    """
    lines = [(number, line.split("#", 1)[0].split()) for number, line in enumerate(text.splitlines(), start=1)]
    lines = [(number, words) for number, words in lines if words]
    if not lines or len(lines) > MAX_TOKENS:
        raise ValueError(f"{len(lines)} tokens; allowed: 1 to {MAX_TOKENS}")
    if len(lines) == 1 and len(lines[0][1]) == 1:
        return {_digest(lines[0][1][0], lines[0][0]): SOLE_CALLER}
    callers: dict[bytes, Caller] = {}
    for number, words in lines:
        digest, caller = _entry(words, number)
        if digest in callers:
            raise ValueError(f"line {number}: another line has the same token; allowed: each token once")
        callers[digest] = caller
    return callers


def _entry(words: list[str], number: int) -> tuple[bytes, Caller]:
    if len(words) not in {3, 4}:
        raise ValueError(f"line {number}: {len(words)} words; allowed: NAME ROLE[,ROLE] TOKEN [tenant=NAME]")
    name, roles = words[0], frozenset(words[1].split(","))
    if len(name) > _MAX_NAME_CHARACTERS:
        raise ValueError(f"line {number}: a name of {len(name)} characters; allowed: {_MAX_NAME_CHARACTERS}")
    if not roles <= set(ROLES):
        # The word is not shown: it may be the token.
        raise ValueError(f"line {number}: the second word is not a list of roles; allowed: {', '.join(ROLES)}")
    return _digest(words[2], number), Caller(name, roles, _tenant(words[3:], roles, number))


def _digest(word: str, number: int) -> bytes:
    if not (word.isascii() and word.isprintable()):
        raise ValueError(f"line {number}: the token is not printable ASCII")
    if not word.startswith("sha256:"):
        return digest_of(word)
    match = _DIGEST.fullmatch(word)
    if match is None:
        raise ValueError(f"line {number}: the digest of a token is sha256: and 64 hexadecimal digits")
    return bytes.fromhex(match[1])


def _tenant(words: list[str], roles: frozenset[str], number: int) -> str | None:
    if not words:
        return None
    tenant = words[0].removeprefix(_TENANT)
    if not words[0].startswith(_TENANT) or not tenant or len(tenant.encode()) > _MAX_TENANT_BYTES:
        raise ValueError(f"line {number}: wrong fourth word; allowed: tenant=NAME, of 1 to {_MAX_TENANT_BYTES} bytes")
    if ADMIN in roles:
        raise ValueError(f"line {number}: a tenant's token cannot have the role {ADMIN}, which acts for all tenants")
    return tenant


class TokenFile:
    """A file's tokens. After an unusable change, the former ones stay valid."""

    def __init__(self, path: str, extra: dict[bytes, Caller] | None = None) -> None:
        """``extra`` are further callers.

        Raises:
            ValueError: the file is unusable; one line without a token.
        """
        self._path = Path(path)
        self._extra = dict(extra or {})
        self._seen = self._signature()
        self._has_roles = False
        self._table = self._read()
        self._looked_at = time.monotonic()
        self.problem: str | None = None
        """Why the present file is not used."""

    def table(self) -> TokenTable:
        """Return the valid tokens, now and then read anew."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_INTERVAL_S:
            self._looked_at = now
            if self._signature() != self._seen:
                self.reload()
        return self._table

    def reload(self) -> bool:
        """Read the file; return whether it is valid."""
        self._seen = self._signature()
        try:
            self._table = self._read()
        except ValueError as error:
            self.problem = str(error)
            log_of(__name__).error("tokens not read again", reason=self.problem)
            return False
        self.problem = None
        log_of(__name__).info("tokens read again", tokens=len(self._table) - len(self._extra))
        return True

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ctime_ns, status.st_size, status.st_ino

    def _read(self) -> TokenTable:
        allowed = "a readable file with a token in it, or NAME ROLE[,ROLE] TOKEN [tenant=NAME] on each line"
        try:
            callers = parse_tokens(text_of_token_file(self._path, _MAX_FILE_BYTES))
            has_roles = all(caller is not SOLE_CALLER for caller in callers.values())
            if self._has_roles and not has_roles:
                raise ValueError(
                    "a single word, but the file had roles before; only a restart accepts it as a token for everything"
                )
        except ValueError as error:
            raise ValueError(f"auth_token_file: {shown(self._path)}: {error}; allowed: {allowed}") from None
        self._has_roles |= has_roles
        return TokenTable(self._extra | callers)
