"""What is known of one request's proposals: when it tries next, how far ahead, how it went.

Owns: the record. Must not know: when speculation pays (``step.speculation``).
"""

from mypy_extensions import mypyc_attr

FIRST_TOKENS = 4
"""Asked for by a request of which nothing is known."""
SHORTEST_SEARCH_PAUSE = 4
LONGEST_SEARCH_PAUSE = 48
NEVER_POSITION = (1 << 31) - 1


@mypyc_attr(allow_interpreted_subclasses=True)
class SpeculationRecord:
    """What is known of one request's proposals. It outlives a row."""

    __slots__ = (
        "is_proven",
        "mean_accepted",
        "mean_proposed",
        "num_accepted_tokens",
        "num_misses",
        "num_proposed_tokens",
        "num_wanted",
        "pause",
        "resumes_at",
        "search_pause",
    )

    def __init__(self, *, may_speculate: bool = True) -> None:
        self.resumes_at = 0 if may_speculate else NEVER_POSITION
        """The number of computed tokens from which on it speculates."""
        self.num_wanted = FIRST_TOKENS
        self.is_proven = False
        """Whether a proposal was right since it last paused."""
        self.num_misses = 0
        """Steps in a row whose proposals were all wrong."""
        self.mean_accepted = 0.0
        self.mean_proposed = 0.0
        self.pause = 0
        """Tokens of the next pause; 0 while it has had none."""
        self.search_pause = SHORTEST_SEARCH_PAUSE
        self.num_proposed_tokens = 0
        self.num_accepted_tokens = 0

    def search_again_after(self, num_computed_tokens: int) -> None:
        """Nothing was found: look again a little later."""
        self.resumes_at = num_computed_tokens + self.search_pause
        self.search_pause = min(2 * self.search_pause, LONGEST_SEARCH_PAUSE)
