"""Requests and steps in flight, as plain values. Must not know: any decision."""

from dataclasses import dataclass, field

from headway_scheduler.core.state.arrival import Origin
from specification_of_learning import EVERYBODY, Curve, SpecifiedRecord

DEAD = -1
"""The version of a block behind one that was evicted: it cannot be reached and is not cached."""


@dataclass(eq=False)
class SpecRequest:
    origin: Origin
    arrival: int
    arrival_time: float
    priority: int
    tenant: str
    rank: int
    latest_start: float | None
    tokens: list[int]
    num_prompt_tokens: int
    limit: int
    stops: frozenset[int]
    min_tokens: int
    adapter: str
    pooling: int
    scope: str
    """Only requests of the same scope share cached blocks."""
    row: int | None = None
    place: tuple[float, int] = (0.0, 0)
    """fair: where its tenant stood when it last started."""
    lane: int = 2
    """0 preempted, 1 about to miss its objective, 2 neither, 3 has missed it."""
    has_started: bool = False
    start: int = -1
    """How many had started when it did for the first time."""
    preemptions: int = 0
    ways_made: int = 0
    passed_over: int = 0
    swapped: int = 0
    """Tokens that are on the host, in ``host_blocks``."""
    host_blocks: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    stay: int = 0
    unreturned: int = 0
    stalled: bool = False
    """It decodes and found no block the last time it was served."""
    confirmed: int = 0
    """Tokens of this stay whose KV is known to be in the blocks."""
    chain: list[int] = field(default_factory=list)
    """Cache versions of the leading blocks that the cache knows."""
    prompt_end: int = 0
    """Tokens known when it took its row: all of them are prefilled before it decodes."""
    curve: Curve = EVERYBODY
    served_time: float = 0.0
    """When part of its prompt was last scheduled."""
    work: int = 0
    """shortest: what is expected of it."""
    objective_s: float = 0.0
    danger: int = 0
    """1: it has been told to be at risk, 2: to be too late."""
    itl_slo_s: float = 0.0
    token_time: float = 0.0
    """When its newest token came, or will come; only while some running request has an objective on gaps."""
    sampled_ahead: int = 0
    """Tokens that steps in flight will bring to this stay."""
    wants_prompt_logprobs: bool = False
    runs_whole: bool = False
    """Its vector is made of all tokens, so all run in one stay."""
    told: int = 0
    """Prompt tokens, from the second on, whose log probabilities are known."""
    speculation: SpecifiedRecord = field(default_factory=SpecifiedRecord)
    step_lane: int | None = None
    """In whose steps it decodes: those of the lane in which its prompt ended."""

    @property
    def key(self) -> tuple[int, int]:
        """Its place among those that run."""
        return self.rank, self.start

    @property
    def expected(self) -> int:
        return len(self.tokens) + self.sampled_ahead


@dataclass
class SpecStep:
    """One step in flight: what it runs, by request and stay."""

    number: int
    ran: list[tuple[SpecRequest, int, int, int, bool]]  # request, stay, row, computed afterwards, samples
    message: dict[str, object]
    speculating: dict[int, int]
    """Most proposals by row."""
    lane: int = 0
    sent_time: float = 0.0
    expected_s: float | None = None
    """How long it will take, if any running request had an objective on gaps."""
