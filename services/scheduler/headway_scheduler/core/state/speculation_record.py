"""What is known of one request's proposals.

Owns: the record. Must not know: when speculation pays (``step.speculation``).
"""

from mypy_extensions import mypyc_attr

FIRST_TOKENS = 4
"""The first number of tokens to ask for."""
SHORTEST_SEARCH_PAUSE = 4
LONGEST_SEARCH_PAUSE = 48
NEVER_POSITION = (1 << 31) - 1


@mypyc_attr(allow_interpreted_subclasses=True)
class SpeculationRecord:
    """Outlives a row."""

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
        """It speculates from this number of computed tokens on."""
        self.num_wanted = FIRST_TOKENS
        self.is_proven = False
        """Whether a proposal was right since the last pause."""
        self.num_misses = 0
        """Successive steps whose proposals were all wrong."""
        self.mean_accepted = 0.0
        self.mean_proposed = 0.0
        self.pause = 0
        """Tokens of the next pause; 0 before the first."""
        self.search_pause = SHORTEST_SEARCH_PAUSE
        self.num_proposed_tokens = 0
        self.num_accepted_tokens = 0

    def search_again_after(self, num_computed_tokens: int) -> None:
        """Pause briefly, since no proposal was found."""
        self.resumes_at = num_computed_tokens + self.search_pause
        self.search_pause = min(2 * self.search_pause, LONGEST_SEARCH_PAUSE)
