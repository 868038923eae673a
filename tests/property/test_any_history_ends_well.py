"""Requests, aborts, steps, answers, failing rows, quarantines and new epochs in any order, under any policies: nothing is lost."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drawn_examples import FACTOR
from exact_core import VOCAB_SIZE, ExactCore
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.memory.preemption import PREEMPTIONS
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.policies.token_budget import TOKEN_BUDGETS
from headway_scheduler.core.state.arrival import Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

MAX_MODEL_LEN = 20
MOST_BEATS = 4000

LIMITS = st.builds(
    SchedulerLimits,
    batching=st.sampled_from(sorted(BATCHING_POLICIES)),
    reserve=st.sampled_from(sorted(RESERVATIONS)),
    order=st.sampled_from(sorted(ORDERS)),
    budget=st.sampled_from(sorted(TOKEN_BUDGETS)),
    preemption=st.sampled_from(sorted(PREEMPTIONS)),
    aging_s=st.sampled_from([0.0, 0.05, 30.0]),
    tenant_weights=st.sampled_from([{}, {"0": 4.0, "1": 0.5}]),
    default_itl_slo_ms=st.sampled_from([0, 1, 50]),
    default_ttft_slo_ms=st.sampled_from([0, 0, 20]),
    shed_late=st.booleans(),
    protect_itl=st.booleans(),
    max_decode_only_steps=st.sampled_from([0, 1, 4]),
    prefix_aware=st.booleans(),
    prefix_cache_scope=st.sampled_from(["shared", "tenant"]),
    enable_prefix_caching=st.booleans(),
    max_num_batched_tokens=st.integers(1, 32),
    max_num_seqs=st.integers(1, 6),
    max_steps_in_flight=st.integers(0, 4),
)


class AnyHistory(RuleBasedStateMachine):
    """Runs one core; its teardown serves everybody who is left."""

    core_type: type[ExactCore] = ExactCore

    @initialize(
        limits=LIMITS,
        block_size=st.sampled_from([1, 2, 4]),
        spare_blocks=st.integers(0, 8),
        num_host_blocks=st.sampled_from([0, 2, 64]),
        swap_us_per_block=st.sampled_from([0.0, 1.0]),
        max_speculative_tokens=st.sampled_from([0, 1, 5]),
        num_lanes=st.sampled_from([1, 1, 2, 3]),
    )
    def begin(
        self,
        limits: SchedulerLimits,
        block_size: int,
        spare_blocks: int,
        num_host_blocks: int,
        swap_us_per_block: float,
        max_speculative_tokens: int,
        num_lanes: int,
    ) -> None:
        num_blocks = -(-MAX_MODEL_LEN // block_size) + spare_blocks
        self.run = self.core_type(
            limits,
            ExecutorCapacity(
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=VOCAB_SIZE,
                max_num_rows=8,
                num_host_blocks=min(num_host_blocks, num_blocks),
                swap_us_per_block=swap_us_per_block,
                num_lanes=num_lanes,
                max_speculative_tokens=max_speculative_tokens if num_lanes == 1 else 0,
            ),
        )

    @rule(
        num_shared=st.integers(0, 8),
        own=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=10),
        max_tokens=st.integers(1, 14),
        stop_token_ids=st.sampled_from([frozenset(), frozenset({3})]),
        priority=st.integers(1, 4),
        tenant=st.sampled_from(["", "0", "1"]),
        ttft_slo_ms=st.sampled_from([0, 5, 500]),
        itl_slo_ms=st.sampled_from([0, 3]),
    )
    def add(
        self,
        num_shared: int,
        own: list[int],
        max_tokens: int,
        stop_token_ids: frozenset[int],
        priority: int,
        tenant: str,
        ttft_slo_ms: int,
        itl_slo_ms: int,
    ) -> None:
        self.run.add(
            [1] * num_shared + own,
            max_tokens,
            priority=priority,
            tenant=tenant,
            stop_token_ids=stop_token_ids,
            ttft_slo_ms=ttft_slo_ms,
            itl_slo_ms=itl_slo_ms,
        )

    @rule(lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 14)), min_size=2, max_size=6))
    def add_several(self, lengths: list[tuple[int, int]]) -> None:
        """Enough at once to fill a pool; classes and tenants take turns."""
        for number, (num_prompt_tokens, max_tokens) in enumerate(lengths):
            self.run.add([2 + number] * num_prompt_tokens, max_tokens, priority=4 - number % 4, tenant=str(number % 2))

    @rule(is_paused=st.booleans())
    def pause_or_resume(self, is_paused: bool) -> None:
        self.run.core.paused = is_paused

    @precondition(lambda self: self.run.live)
    @rule(place=st.integers(0, 100))
    def abort(self, place: int) -> None:
        self.run.abort(self.run.live[place % len(self.run.live)])

    @precondition(lambda self: self.run.live)
    @rule(place=st.none() | st.integers(0, 100))
    def run_alone(self, place: int | None) -> None:
        live = self.run.live
        self.run.core.run_alone(None if place is None else Origin(0, live[place % len(live)]))

    @rule()
    def start_slowly(self) -> None:
        self.run.core.start_slowly(Origin(0, handle) for handle in self.run.live)

    @rule(milliseconds=st.sampled_from([0, 1, 40]))
    def schedule(self, milliseconds: int) -> None:
        self.run.now += milliseconds / 1e3
        self.run.schedule()

    @precondition(lambda self: self.run.num_in_flight)
    @rule(milliseconds=st.sampled_from([0, 1, 40]))
    def answer(self, milliseconds: int) -> None:
        self.run.now += milliseconds / 1e3
        self.run.answer()

    @rule(count=st.integers(1, 8))
    def go_on(self, count: int) -> None:
        """Some undisturbed beats, so that pools do fill."""
        for _ in range(count):
            self.run.now += 0.002
            while self.run.schedule():
                pass
            if self.run.num_in_flight:
                self.run.answer()

    @precondition(lambda self: self.run.num_in_flight)
    @rule(place=st.integers(0, 10))
    def fail_a_row(self, place: int) -> None:
        self.run.answer(failing=place)

    @rule()
    def begin_epoch(self) -> None:
        self.run.begin_epoch()

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "run"):
            self.run.check()

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.core.paused = False
            self.run.drain(MOST_BEATS)
            self.run.check_nothing_is_left()


TestAnyHistoryEndsWell = AnyHistory.TestCase
TestAnyHistoryEndsWell.settings = settings(
    max_examples=100 * FACTOR,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
