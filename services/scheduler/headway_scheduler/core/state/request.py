"""A request, from submission to its end.

Owns: its status, and what outlives a row. Must not know: queues, blocks.
"""

from enum import Enum, StrEnum

import numpy as np
from mypy_extensions import mypyc_attr

from headway_proto.pooling import NO_POOLING, needs_every_token
from headway_proto.sampling import NO_LOGPROBS
from headway_scheduler.core.state.arrival import NewRequestEvent
from headway_scheduler.core.state.counters import WasteReason
from headway_scheduler.core.state.indices import NO_BLOCKS
from headway_scheduler.core.state.speculation_record import SpeculationRecord
from headway_scheduler.core.state.stored_blocks import StoredBlocks

START_BITS = 48
NORMAL_LANE = 2


class RequestStatus(Enum):
    """A stage in a request's life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    SHED = "shed"


def may_speculate(new: NewRequestEvent) -> bool:
    """Whether tokens may ever be proposed for a request.

    Under a constraint, the tokens allowed after a proposal are unknown until it is drawn.
    """
    return new.max_tokens > 1 and new.sampling.constraint is None


@mypyc_attr(allow_interpreted_subclasses=True)
class Request:
    """While it runs, its tokens and counters are columns of its row.

    ``has_lost_blocks``: once, blocks that it had left somewhere could not be brought.
    """

    __slots__ = (
        "arrival",
        "arrival_time",
        "cache_node",
        "curve",
        "device_us_marks",
        "first_token_time",
        "has_lost_blocks",
        "host_blocks",
        "is_leaving",
        "itl_slo_ms",
        "lane",
        "last_token_time",
        "latest_start",
        "limit",
        "lost_work",
        "mark",
        "must_leave",
        "new",
        "num_admitted_tokens",
        "num_cached_blocks",
        "num_passed_over",
        "num_predicted_tokens",
        "num_preemptions",
        "num_prompt_logprobs",
        "num_queued_tokens",
        "num_swapped_tokens",
        "num_unreturned",
        "num_ways_made",
        "rank",
        "row",
        "scheduled_time",
        "served_time",
        "speculation",
        "start",
        "start_place",
        "status",
        "stored",
        "token_ids",
    )

    def __init__(self, new: NewRequestEvent, *, arrival: int, rank: int, limit: int, now: float) -> None:
        self.new, self.arrival = new, arrival
        self.rank = rank
        """From its class if the order ranks classes; even once it has been promoted (``waiting_queue``)."""
        self.lane = NORMAL_LANE
        """Its group among waiting requests of its rank."""
        self.start = -1
        """How many requests had started before its first start; -1 before that."""
        self.start_place = (0.0, 0)
        """Its tenant's place at its last start, under an order that keeps books."""
        self.limit = limit
        """The most tokens, prompt and output."""
        self.scheduled_time: float | None = None
        self.arrival_time = self.served_time = now
        """When a part of its prompt was last scheduled."""
        self.first_token_time: float | None = None
        self.itl_slo_ms = 0
        """The objective on gaps between its tokens, 0 for none."""
        self.latest_start: float | None = None
        """The latest start with which its first token can be in time."""
        self.curve = 0
        self.status, self.row = RequestStatus.WAITING, -1
        self.token_ids = new.token_ids
        """All known tokens while it does not run."""
        self.num_preemptions = 0
        self.num_ways_made = 0
        """How often it was preempted for a waiting request."""
        self.num_queued_tokens = 0
        """Known tokens when it last began to wait."""
        self.num_passed_over = 0
        """How many requests started before it although they come after it in the order."""
        self.host_blocks, self.num_swapped_tokens = NO_BLOCKS, 0
        """Its first so many tokens are in these blocks while it is swapped out."""
        self.stored: StoredBlocks | None = None
        """They do, in place of ``host_blocks``, for a request that comes from another core or an earlier epoch."""
        self.is_leaving, self.must_leave, self.has_lost_blocks = False, False, False
        """With its next token it leaves this core, for another executor to go on with, its blocks kept on the host; it
        must leave even if there is no room for them."""
        self.num_admitted_tokens = 0
        """Known tokens when it last took a row."""
        self.num_unreturned = 0
        """Steps in flight that still bring it a token although it lost its row."""
        self.last_token_time: float | None = None
        """When its newest token came; set only while it does not run."""
        # Total device time of all steps at its start, and at its first token.
        self.device_us_marks = 0, 0
        # Computed tokens when it last lost its row, and why they were lost.
        self.lost_work = 0, WasteReason.RECOMPUTE
        self.num_predicted_tokens: int | None = None
        """The output expected at its first start."""
        # Prompt tokens, from the second on, whose log probabilities have been reported.
        self.num_prompt_logprobs = new.num_prompt_logprobs
        # Leading blocks of its table that are registered in the prefix cache, and the node of the last.
        self.num_cached_blocks, self.cache_node = 0, 0
        # One of its first tokens, which ``prefix_wait`` compares first; -1 before that, or if there are too few tokens.
        self.mark = -1
        self.speculation = SpeculationRecord(may_speculate=may_speculate(new))

    @property
    def order_key(self) -> int:
        """Its place in the service order: by rank, then by first start."""
        return self.rank << START_BITS | self.start

    @property
    def is_owed_prompt_logprobs(self) -> bool:
        """Whether prompt log probabilities are still to be reported."""
        is_wanted = self.new.sampling.prompt_logprobs != NO_LOGPROBS
        return is_wanted and self.num_prompt_logprobs < self.new.num_prompt_tokens - 1

    @property
    def runs_whole_prompt(self) -> bool:
        """Whether all its tokens must run in one stay, since its vector is made of all of them."""
        pooling = self.new.pooling
        return pooling != NO_POOLING and needs_every_token(pooling)

    def append_token(self, token_id: int) -> None:
        """Append a token that came too late for its row."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))

    def keep_a_token_to_run(self) -> None:
        """Its newest tokens may have been lost with a step, and the last known one must run, to sample from."""
        most = len(self.token_ids) - 1
        if self.stored is not None and self.stored.num_tokens > most:
            self.stored = self.stored._replace(num_tokens=most)

    @property
    def only_decodes(self) -> bool:
        """Whether the blocks that it left elsewhere are all but the newest token's."""
        return self.stored is not None and self.num_swapped_tokens >= len(self.token_ids) - 1

    def forget_stored(self) -> None:
        """The blocks outside this core cannot be had."""
        self.stored, self.num_swapped_tokens = None, 0

    def forget_executor(self) -> None:
        """Forget what a lost executor held of it."""
        self.num_unreturned = 0
        self.num_cached_blocks = 0
        self.host_blocks = NO_BLOCKS
        self.num_swapped_tokens = 0 if self.stored is None else self.stored.num_tokens
        self.lost_work = self.lost_work[0], WasteReason.NEW_EPOCH
