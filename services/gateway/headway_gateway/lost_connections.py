"""Connections that end before any call: counted by reason, and logged seldom. Must not know: what is served."""

import asyncio
import collections
import ssl
from typing import Any

from headway_gateway.accepting import peer
from headway_process.late_logs import log_of

_INTERVAL_S = 10.0
_MOST_PEERS = 4


class LostConnections:
    """Logs the first one at once, and then at most one line in ten seconds. Belongs to one event loop."""

    def __init__(self) -> None:
        self._new: collections.Counter[str] = collections.Counter()
        self._peers: dict[str, None] = {}
        self._num_all = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(self, reason: str, whose: str = "") -> None:
        """Count one, from the peer HOST:PORT if that is known."""
        self._new[reason] += 1
        if whose and len(self._peers) < _MOST_PEERS:
            self._peers[whose] = None
        if self._timer is None:
            self._log()

    def note_wait(self, reason: str) -> None:
        """Say why connections cannot be accepted now; how often that is tried says nothing."""
        if not self._new[reason]:
            self.note(reason)

    def context(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Let failed handshakes of ``context`` be noted, which asyncio keeps to itself. Return it."""

        def note(reason: str) -> None:
            self.note(reason, peer.get())

        context.sslobject_class = type("SSLObject", (_Handshake,), {"note": staticmethod(note)})
        return context

    def _log(self) -> None:
        self._timer = None
        if not self._new:
            return
        self._num_all += self._new.total()
        log_of(__name__).warning("connections failed", new=dict(self._new), total=self._num_all, **self._whose())
        self._new.clear()
        self._peers.clear()
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._log)

    def _whose(self) -> dict[str, list[str]]:
        return {"peers": [*self._peers]} if self._peers else {}


class _Handshake(ssl.SSLObject):
    """The peer's complaint about our certificate comes behind the handshake, when the first bytes are read."""

    @staticmethod
    def note(reason: str) -> None:
        """Count one."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if not isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
                self.note(_words_of(error))
            raise

    def read(self, len: int = 1024, buffer: Any = None) -> Any:  # noqa: A002  # as ssl's
        try:
            return super().read(len, buffer)
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                self.note(_words_of(error))
            raise


def _words_of(error: ssl.SSLError) -> str:
    reason = (error.reason or error.strerror or "").lower().replace("_", " ")
    detail = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else ""
    return f"TLS: {reason}" + f": {detail}" * bool(detail)
