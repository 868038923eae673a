"""The result of each request of a load. Times are seconds from the load's start."""

from collections.abc import Callable

import msgspec

from headway_proto.wording import one_line

OK = "OK"
TIMEOUT = "TIMEOUT"
DISCONNECTED = "DISCONNECTED"
CUT_SHORT = "CUT_SHORT"
MALFORMED = "MALFORMED"
"""Any other status is the server's own: the name of a gRPC code, or ``HTTP 429``."""
TOO_MUCH_LOAD = frozenset({"RESOURCE_EXHAUSTED", "HTTP 429"})
"""The statuses of a server that has too much to do."""


class ServerTimings(msgspec.Struct, frozen=True, kw_only=True):
    """A Headway server's timings, in milliseconds since the request's arrival."""

    queue_ms: float
    ttft_ms: float
    mean_itl_ms: float


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``chunk_tokens[i]`` tokens came together at ``chunk_times_s[i]``.

    The server's counts of tokens win.
    """

    number: int
    intended_s: float
    sent_s: float
    end_s: float
    status: str
    error: str = ""
    chunk_times_s: list[float]
    chunk_tokens: list[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Prompt tokens from the server's prefix cache, if it reports them."""
    server: ServerTimings | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it was answered to its end."""
        return self.status == OK


class RequestFailed(Exception):  # noqa: N818  # it names what happened
    """A request ended early."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = one_line(message)


class Answer:
    """Collects one answer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.chunk_times_s: list[float] = []
        self.chunk_tokens: list[int] = []
        self.num_prompt_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.num_cached_tokens = 0
        self.server: ServerTimings | None = None

    def tokens_came(self, count: int) -> None:
        """Record tokens that arrived together, now."""
        self.chunk_times_s.append(self._clock())
        self.chunk_tokens.append(count)
