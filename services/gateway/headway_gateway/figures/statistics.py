"""The gateway's figures."""

from collections import Counter

from headway_process.histogram import Histogram

_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_ENCODING_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class GatewayStatistics:
    """Counts, and durations in seconds."""

    def __init__(self) -> None:
        self.first_token_s = Histogram(_FIRST_TOKEN_S)
        """From the arrival of a call to its first written token."""
        self.gap_s = Histogram(_GAP_S)
        """Between written tokens; 0 inside one delta."""
        self.encoding_s = Histogram(_ENCODING_S)
        """To encode a prompt, including the wait for a thread."""
        self.constraint_s = Histogram(_ENCODING_S)
        """To check a valid constraint, including the wait."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """By method and status."""
        self.refusals: Counter[tuple[str]] = Counter()
        """By reason."""
        self.ends: Counter[tuple[str]] = Counter()
        """Of outputs, by reason."""
        self.num_deltas = 0
        self.num_tokens = 0
        self.num_joined_tokens = 0
        """Tokens behind another in one delta."""

    def count_delta(self, num_tokens: int, gap_s: float | None, since_arrival_s: float) -> None:
        """Count a delta, ``gap_s`` after the previous one."""
        self.num_deltas += 1
        if not num_tokens:
            return
        self.num_tokens += num_tokens
        if gap_s is None:
            self.first_token_s.observe(since_arrival_s)
        else:
            self.gap_s.observe(gap_s)
        if num_tokens > 1:
            self.num_joined_tokens += num_tokens - 1
            self.gap_s.observe(0.0, num_tokens - 1)
