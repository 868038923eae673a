"""The state that outlives an executor, and the policies that the settings name.

Owns: these objects. Must not know: rows, blocks or steps.
"""

from headway_scheduler.core.admission.fair_queue import burst_tokens_of
from headway_scheduler.core.admission.loss_recovery import LossRecovery
from headway_scheduler.core.admission.objectives import FirstTokenWatch
from headway_scheduler.core.admission.orders import ORDERS, QueueSettings
from headway_scheduler.core.admission.waiting_requests import WaitingRequests
from headway_scheduler.core.memory.preemption import OFFLOADS, PREEMPTIONS
from headway_scheduler.core.memory.prefix_statistics import PrefixStatistics
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.output_lengths import OutputLengths
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.policies.step_observer import StepObserver
from headway_scheduler.core.policies.step_time import StepTimeModel
from headway_scheduler.core.policies.token_budget import TOKEN_BUDGETS
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.counters import SchedulerCounters, WasteReason
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.request import Request
from headway_scheduler.core.state.stored_blocks import StoredBlocks


class CoreState:
    """``capacity`` is that of the newest executor."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity) -> None:
        self.limits = limits
        self.serve(capacity)
        self.counters = SchedulerCounters()
        self.prefix_statistics = PrefixStatistics(self.counters)
        self.is_paused = False
        order = ORDERS[limits.order]
        self.batching = BATCHING_POLICIES[limits.batching]
        self.reservation = RESERVATIONS[self.batching.reservation if limits.reserve == "auto" else limits.reserve]
        self.preemption = PREEMPTIONS[limits.preemption]
        self.offload = OFFLOADS[limits.prefix_offload]
        self.lengths = OutputLengths(is_used=order.predicts or self.reservation.predicts)
        self.step_times = StepTimeModel()
        self.budget = TOKEN_BUDGETS[limits.budget](limits.max_num_batched_tokens, self.step_times)
        needs_times = self.preemption.needs_costs or limits.prefix_offload == "auto" or limits.protect_itl
        self.observer = StepObserver(self.budget, is_wanted=needs_times)
        self.requests: dict[Origin, Request] = {}
        queue = order.make_queue(
            QueueSettings(limits.aging_s, limits.tenant_weights, self._predicted_output, self._burst_tokens)
        )
        self.waiting = WaitingRequests(limits, queue)
        self.first_tokens = FirstTokenWatch()
        self.losses = LossRecovery()
        self.ended_leases: list[StoredBlocks] = []
        """Blocks in host pools that nobody needs any more, for the cores that keep the books."""
        self.num_arrivals = 0
        self.num_started = 0

    def serve(self, capacity: ExecutorCapacity) -> None:
        """Requests run on an executor of this capacity from now on."""
        self.capacity = capacity
        self.max_request_tokens = capacity.max_request_tokens

    def has(self, request: Request) -> bool:
        """Whether a request of a step in flight is still here: it may have ended, or run in another core, in a row of that."""
        return self.requests.get(request.new.origin) is request

    def count_surplus(self, num_tokens: int) -> None:
        """Count computed tokens that nobody wants."""
        if num_tokens:
            self.counters.wasted_tokens[WasteReason.SURPLUS] += num_tokens

    def _predicted_output(self, request: Request) -> int:
        age = len(request.token_ids) - request.new.num_prompt_tokens
        most = request.limit - request.new.num_prompt_tokens
        predicted = self.lengths.predicted_output(request.curve, age, most)
        return (most if predicted is None else predicted) - age

    def _burst_tokens(self) -> int:
        capacity = self.capacity
        return burst_tokens_of(self.max_request_tokens, capacity.num_blocks * capacity.block_size)
