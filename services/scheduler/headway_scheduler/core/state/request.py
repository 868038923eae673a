"""A request, from submission to its end.

Owns: where it stands, and the counters that outlive a row.
Must not know: queues, blocks, or the columns of running rows.
"""

from enum import Enum

import numpy as np
from mypy_extensions import mypyc_attr

from headway_proto.sampling import NO_LOGPROBS
from headway_scheduler.core.state.arrival import NewRequestEvent
from headway_scheduler.core.state.counters import WasteReason
from headway_scheduler.core.state.indices import NO_BLOCKS
from headway_scheduler.core.state.speculation_record import SpeculationRecord

START_BITS = 48
NORMAL_LANE = 2


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    SHED = "shed"


def may_speculate(new: NewRequestEvent) -> bool:
    """Whether tokens may be proposed for a request at all.

    For any that draws two tokens, unless they are constrained: what a constraint allows behind a proposal is not known
    before that has been drawn.
    """
    return new.max_tokens > 1 and new.sampling.constraint is None


@mypyc_attr(allow_interpreted_subclasses=True)
class Request:
    """A live request. While it runs, its tokens and counters live in the columns of its row."""

    __slots__ = (
        "arrival",
        "arrival_time",
        "cache_node",
        "curve",
        "device_us_marks",
        "first_token_time",
        "host_blocks",
        "itl_slo_ms",
        "lane",
        "last_token_time",
        "latest_start",
        "limit",
        "lost_work",
        "mark",
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
        "token_ids",
    )

    def __init__(self, new: NewRequestEvent, *, arrival: int, rank: int, limit: int, now: float) -> None:
        self.new, self.arrival = new, arrival
        self.rank = rank
        """From its class, where the order ranks classes; an even number once it has been promoted (``waiting_queue``)."""
        self.lane = NORMAL_LANE
        """Where it stands among those of its rank while it waits."""
        self.start = -1
        """How many had started when it did for the first time; -1 before."""
        self.start_place = (0.0, 0)
        """Where its tenant stood when it last started, under an order that keeps books."""
        self.limit = limit
        """Most tokens (prompt and output) this request may come to."""
        self.arrival_time = now
        self.scheduled_time: float | None = None
        self.served_time = now
        """When part of its prompt was last scheduled."""
        self.first_token_time: float | None = None
        self.itl_slo_ms = 0
        """The objective on the gaps between its tokens, 0 for none."""
        self.latest_start: float | None = None
        """When its prompt has to start at the latest for its first token to be in time."""
        self.curve = 0
        """Its curve of output lengths."""
        self.status = RequestStatus.WAITING
        self.row = -1
        self.token_ids = new.token_ids
        """All tokens known while not running."""
        self.num_preemptions = 0
        self.num_ways_made = 0
        """Preemptions for the sake of a request of a higher class."""
        self.num_queued_tokens = 0
        """Tokens known when it last began to wait."""
        self.num_passed_over = 0
        """Requests that started before it although they come after it in the order."""
        self.host_blocks = NO_BLOCKS
        """Where its first ``num_swapped_tokens`` tokens are while it is swapped out."""
        self.num_swapped_tokens = 0
        self.num_admitted_tokens = 0
        """Tokens known when it last took a row."""
        self.num_unreturned = 0
        """Steps in flight that will still bring a token for this request although it lost its row."""
        self.last_token_time: float | None = None
        """When its newest token came, known while it does not run."""
        # What all steps together had taken on the device when it first ran, and when it had its first token.
        self.device_us_marks = 0, 0
        # Tokens that were computed when it last lost its row, and why those are lost that are not found again.
        self.lost_work = 0, WasteReason.RECOMPUTE
        self.num_predicted_tokens: int | None = None
        """The output expected of it when it first ran, where outputs are predicted."""
        # Prompt tokens, from the second on, whose log probabilities have been told, where it wants them.
        self.num_prompt_logprobs = new.num_prompt_logprobs
        # Leading blocks of its table that the prefix cache knows, and the prefix-cache node of the last of them.
        self.num_cached_blocks, self.cache_node = 0, 0
        # One of its first tokens, by which it is told from others; -1 while nobody has asked for it, or it is too short.
        self.mark = -1
        self.speculation = SpeculationRecord(may_speculate=may_speculate(new))

    @property
    def order_key(self) -> int:
        """Its place among those that run, lower is served first: by rank, then by first start."""
        return self.rank << START_BITS | self.start

    @property
    def is_owed_prompt_logprobs(self) -> bool:
        """Whether log probabilities of its prompt are still to be told."""
        is_wanted = self.new.sampling.prompt_logprobs != NO_LOGPROBS
        return is_wanted and self.num_prompt_logprobs < self.new.num_prompt_tokens - 1

    def append_token(self, token_id: int) -> None:
        """Take a token that arrived after the request lost its row."""
        self.token_ids = np.append(self.token_ids, np.int32(token_id))

    def forget_executor(self) -> None:
        """The executor that held part of it is gone."""
        self.num_unreturned = 0
        self.num_cached_blocks = 0
        self.host_blocks = NO_BLOCKS
        self.num_swapped_tokens = 0
        self.lost_work = self.lost_work[0], WasteReason.NEW_EPOCH
