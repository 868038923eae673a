"""What placement asks of one cell: whether a request fits, whether it starts soon, and how soon.

Owns: these answers. Must not know: other cells, or which request is next.
"""

import math
from enum import Enum

from mypy_extensions import mypyc_attr

from headway_scheduler.core.admission.door import limit_of, what_lacks_for
from headway_scheduler.core.choosing.roles import Role
from headway_scheduler.core.memory.cached_prefixes import PrefixQuery
from headway_scheduler.core.state.request import Request, RequestStatus
from headway_scheduler.core.view import SchedulerView

_LEAST_SLACK = 0.05
"""Of a step that the rows which decode fill, prompts are expected to get so much all the same."""


class Lack(Enum):
    """What a cell has too little of for a request to start soon."""

    ROWS = "rows"
    TOKENS = "tokens of a step"
    BLOCKS = "blocks"


class Shortage:
    """With the request and all that is before it, a cell needs more than it has."""

    __slots__ = ("lack", "num_needed", "num_there")

    def __init__(self, lack: Lack, num_needed: int, num_there: int) -> None:
        self.lack = lack
        self.num_needed = num_needed
        self.num_there = num_there


@mypyc_attr(allow_interpreted_subclasses=True)
class CellLoad:
    """One cell. ``accepts``: it takes requests at all. ``kind``: cells of one number have equal capacities.

    Figures are read once for a round of placement: whoever gives the cell a request, or takes one away, calls
    ``read_anew``.
    """

    def __init__(
        self, number: int, view: SchedulerView, *, accepts: bool, role: Role = Role.BOTH, kind: int = -1
    ) -> None:
        self.number = number
        self.kind = kind
        self._view = view
        self._gaps = view.gaps
        self.capacity = view.capacity
        self._max_request_tokens = self.capacity.max_request_tokens
        self._max_running = view.max_running
        self._max_num_batched_tokens = view.max_num_batched_tokens
        self.begin_round(accepts=accepts, role=role)

    def begin_round(self, *, accepts: bool, role: Role) -> None:
        """Nothing is known of its figures any more."""
        self.accepts = accepts
        self.role = role
        self._decode_s = -1.0
        """Asked once per round: what is placed in it does not decode yet."""
        self._tightest_s: float | None = None
        self._num_coming = 0
        self._num_coming_tokens = 0
        self.read_anew()

    def read_anew(self) -> None:
        """The requests of the cell have changed."""
        view = self._view
        self.num_running = view.num_running
        """Requests with a row."""
        self._num_waiting = view.num_waiting
        self._num_waiting_tokens = view.num_waiting_tokens
        self._num_free_blocks = view.num_free_blocks
        self._num_tokens_ahead = -1

    def expect(self, request: Request) -> None:
        """Another cell lets this request go in this round: it is likely to come here."""
        self._num_coming += 1
        self._num_coming_tokens += len(request.token_ids)

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs or waits here, and something may."""
        return self.accepts and not self.num_running and not self._num_waiting

    @property
    def num_here(self) -> int:
        """Requests that run or wait here, and those that are likely to come."""
        return self.num_running + self._num_waiting + self._num_coming

    def can_hold(self, request: Request) -> bool:
        """Whether the executor could ever run this request, which another of the same model was found to run."""
        capacity, new = self.capacity, request.new
        if len(request.token_ids) >= limit_of(new, self._max_request_tokens) or what_lacks_for(new, capacity):
            return False
        return capacity.supports_prompt_logprobs or not request.is_owed_prompt_logprobs

    def has_room_for(self, request: Request) -> bool:
        """Whether it would start soon: it finds a row and blocks, and at most a step's worth of tokens waits here."""
        return self.shortage_for(request) is None

    def shortage_for(self, request: Request) -> Shortage | None:
        """Why it would not start soon here; None if it would."""
        num_tokens, num_waiting = len(request.token_ids), self._num_waiting
        num_here = self.num_here
        if not num_here:
            return None
        if num_here >= self._max_running:
            return Shortage(Lack.ROWS, num_here + 1, self._max_running)
        num_tokens += self._num_waiting_tokens
        if num_waiting and request.stored is None and num_tokens > self._max_num_batched_tokens:
            return Shortage(Lack.TOKENS, num_tokens, self._max_num_batched_tokens)
        num_before = num_here - self.num_running
        num_blocks = (num_tokens + self._num_coming_tokens) // self.capacity.block_size + num_before + 1
        num_free_blocks = self._num_free_blocks
        return Shortage(Lack.BLOCKS, num_blocks, num_free_blocks) if num_blocks > num_free_blocks else None

    def may_make_room_for(self, request: Request) -> bool:
        """Whether one of a lower class runs that would make way for it, and nothing else waits here."""
        return not self._num_waiting and self._view.lowest_running_class() > request.new.priority

    def stranded(self) -> Request | None:
        """The first preempted request that waits here and has nothing here that it could go on with."""
        return next(
            (
                request
                for request in self._view.waiting()
                if request.status is RequestStatus.PREEMPTED
                and not request.num_unreturned
                and not request.num_swapped_tokens
            ),
            None,
        )

    @property
    def num_tokens_ahead(self) -> int:
        """Tokens of prompts that are to be computed before those of a request that comes now."""
        if self._num_tokens_ahead < 0:
            self._num_tokens_ahead = self._view.num_prompt_tokens_left
        return self._num_tokens_ahead

    @property
    def relative_error(self) -> float:
        """The mean error of the step-time model, as a share of the time; large while it has learned little."""
        return self._view.step_time_error

    def num_cached_tokens(self, query: PrefixQuery) -> int:
        """Tokens of its prompt that need not be computed here."""
        return max(self._view.num_cached_tokens(query), query.request.num_swapped_tokens)

    def idle_prefill_s(self, num_tokens: int, num_cached_tokens: int) -> float | None:
        """Seconds to compute so many tokens here if nothing decodes; None while step times are not known."""
        prompts_s = self._view.prefill_s(num_tokens, num_cached_tokens)
        return None if prompts_s is None else prompts_s + self._num_steps(num_tokens) * self._gaps.step_of_one_s()

    def prefill_s(self, num_tokens: int, num_cached_tokens: int) -> float | None:
        """Seconds to compute so many tokens here, beside the rows that decode; None while step times are not known."""
        decode_s = self._decodes_s
        if not decode_s:
            return self.idle_prefill_s(num_tokens, num_cached_tokens)
        prompts_s = self._view.prefill_s(num_tokens, num_cached_tokens)
        if prompts_s is None:
            return None
        num_steps = float(self._num_steps(num_tokens))
        objective_s = self._tightest_s
        if objective_s and self._gaps.are_kept:
            # A step that decodes gives prompts only what the gap objective leaves of it.
            num_steps = max(num_steps, prompts_s / max(objective_s - decode_s, _LEAST_SLACK * objective_s))
        return prompts_s + num_steps * decode_s

    def _num_steps(self, num_tokens: int) -> int:
        return -(-num_tokens // self._max_num_batched_tokens)

    @property
    def _decodes_s(self) -> float:
        if self._decode_s < 0.0:
            self._decode_s = self._gaps.decode_s()
            self._tightest_s = self._gaps.tightest_s
        return self._decode_s

    # -------------------------------------------------------------------------------------------- objectives on gaps

    @property
    def knows_its_speed(self) -> bool:
        """Whether anything is known of its step times."""
        return self._gaps.step_of_one_s() > 0.0

    def keeps_gap_of(self, request: Request, share: float = 1.0) -> bool:
        """Whether a step with this row more is expected within ``share`` of its gap objective, if it has one."""
        if not request.itl_slo_ms:
            return True
        more_context = len(request.token_ids) + self._num_coming_tokens
        step_s = self._gaps.decode_s(more_rows=1 + self._num_coming, more_context=more_context)
        return step_s <= share * request.itl_slo_ms / 1e3

    def keeps_gaps_beside(self, request: Request, share: float = 1.0) -> bool:
        """Whether running requests decode within ``share`` of their gap objective, and keep it beside this prompt."""
        objective_s = self._gaps.tightest_s
        if not objective_s or not self.num_running:
            return True
        if self._gaps.are_kept:
            return self._decodes_s < share * objective_s
        num_tokens = min(len(request.token_ids), self._max_num_batched_tokens)
        return self._decodes_s + (self._view.prefill_s(num_tokens, 0) or 0.0) <= objective_s

    def misses_gaps(self) -> bool:
        """Whether a step of the rows that decode now takes longer than their tightest objective."""
        objective_s = self._gaps.tightest_s
        return bool(objective_s) and self.num_running > 1 and self._decodes_s > (objective_s or 0.0)

    def newest_decoding(self, least_s: float) -> Request | None:
        """The decoding request that started last, of those that do not leave already and may stay so long."""
        return self._gaps.newest_decoding(math.ceil(least_s / self._decodes_s) if self._decodes_s else 1)
