"""The fast core makes exactly the decisions of the readable specification, over random workloads."""

from collections import Counter

import msgspec
import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from drawn_examples import FACTOR
from headway_proto.columns import Int32Array, decode_column, decode_columns, encode_column, encode_columns
from headway_proto.pooling import POOL_CLS
from headway_proto.sampling import SamplingParams
from headway_proto.step import (
    DIGEST_INTERVAL_STEPS,
    ExecutorOutput,
    LaneOutput,
    SchedulerOutput,
    adapters_in,
    pooled_in,
)
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.memory.pinned_prefixes import PinRefused
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.events import StepEvents
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.step_shape import StepShape
from specification import Specification

VOCAB_SIZE = 6  # so small that prefixes coincide and stop tokens are hit often
TENANTS = ("", "one")
ADAPTERS = ("", "", "a@1", "b@1", "c@1")


def readable(output: SchedulerOutput) -> dict[str, object]:
    """A message in the specification's form."""
    scheduled = dict(decode_columns(output.num_scheduled_tokens, 2).T.tolist())
    return {
        "step": output.step,
        "new": [
            {
                "row": new.row,
                "token_ids": decode_column(new.token_ids).tolist(),
                "block_ids": decode_column(new.block_ids).tolist(),
                "num_computed_tokens": new.num_computed_tokens,
                "scheduled": scheduled.get(new.row, 1),
            }
            for new in output.scheduled_new_reqs
        ],
        "finished_rows": decode_column(output.finished_rows).tolist(),
        "new_blocks": sorted(
            (tuple(pair) for pair in decode_columns(output.new_blocks, 2).T.tolist()), key=lambda entry: entry[0]
        ),
        "exceptions": sorted(scheduled.items()),
        "swap_out": [tuple(pair) for pair in decode_columns(output.swap_out, 2).T.tolist()],
        "swap_in": [tuple(pair) for pair in decode_columns(output.swap_in, 2).T.tolist()],
        "lane": output.lane if isinstance(output, LaneOutput) else None,
        "adapters": [(of.row, of.adapter) for of in adapters_in(output)],
        "pooled": [tuple(pair) for pair in decode_columns(pooled_in(output), 2).T.tolist()],
        "total": output.total_num_scheduled_tokens,
        "speculative": [tuple(pair) for pair in decode_columns(output.num_speculative_tokens, 2).T.tolist()],
    }


def readable_events(events: StepEvents) -> tuple[list[tuple[Origin, int, int]], list[tuple[Origin, str, int]]]:
    columns = (events.owners, events.handles, events.indices, events.token_ids)
    delivered = [(Origin(o, h), i, t) for o, h, i, t in zip(*(column.tolist() for column in columns), strict=True)]
    return delivered, [(end.origin, end.reason.value, end.stop_token_id) for end in events.finished]


def teach(core: Scheduler) -> None:
    """Steps take 10 ms, 1 ms per token, and 0.1 ms per position of context."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        num_rows, num_context, num_prompt = (int(number) for number in rng.integers((1, 0, 0), (20, 200, 60)))
        shape = StepShape(num_rows, num_rows, num_context, 0).with_prompt(num_prompt, 0)
        core.step_times.observe(shape, 10e-3 + 1e-3 * shape.num_tokens + 1e-4 * shape.num_context_tokens)


class Pair:
    """Core and specification side by side, given the same events."""

    def __init__(self, limits: SchedulerLimits, capacity: ExecutorCapacity, *, knows_durations: bool = False) -> None:
        self.core = Scheduler(limits, capacity)
        self.answer_time = 0.0
        predict_s = None
        if knows_durations:
            teach(self.core)

            def predict_s(*shape: int) -> float:
                predicted_s = self.core.step_times.predict_s(StepShape(*shape))
                assert predicted_s is not None
                return predicted_s

        self.specification = Specification(limits, capacity, predict_s)
        self.output_tokens: dict[Origin, list[int]] = {}
        self.now = 0.0
        self.acceptance = 0.0

    def add(self, new: NewRequestEvent) -> None:
        self.core.add_request(new, now=self.now)
        self.specification.add(new, now=self.now)
        self.output_tokens[new.origin] = []

    def pin(self, name: str, tenant: str, token_ids: Int32Array) -> None:
        if self.core.limits.prefix_cache_scope == "shared":
            tenant = ""
        try:
            pinned = self.core.pinned_prefixes.pin(name, tenant, token_ids)
        except PinRefused:
            is_pinned = False
        else:
            is_pinned = pinned.num_blocks > 0
        is_caching = self.core.limits.enable_prefix_caching
        assert is_pinned == (is_caching and self.specification.state.pool.pin(name, tenant, token_ids.tolist()))

    def unpin(self, name: str) -> None:
        assert self.core.pinned_prefixes.unpin(name) == self.specification.state.pool.unpin(name)

    def abort(self, origin: Origin) -> None:
        assert (self.core.abort(origin) is not None) == self.specification.abort(origin)

    def mind_a_loss(self, rng: np.random.Generator, origins: list[Origin]) -> None:
        """What a scheduler may do once steps were lost: let somebody run alone, everybody again, or a few at a time."""
        if rng.random() < 0.3:
            lost = [origin for origin in origins if rng.random() < 0.7]
            self.core.start_slowly(lost)
            self.specification.start_slowly(lost)
            return
        alone = None if rng.integers(0, 3) == 0 else origins[int(rng.integers(0, len(origins)))]
        self.core.run_alone(alone)
        self.specification.run_alone(alone)

    def schedule(self) -> bool:
        output = self.core.schedule(now=self.now)
        expected = self.specification.schedule(now=self.now)
        assert [end.origin for end in self.core.take_shed()] == self.specification.take_shed()
        assert (output is None) == (expected is None)
        if output is not None:
            assert readable(output) == expected
        return output is not None

    def update(self, draw_token: "np.random.Generator") -> bool:
        if not self.specification.state.in_flight:
            return False
        rows = self.specification.sampling_rows()
        sampled = draw_token.integers(0, VOCAB_SIZE, size=len(rows)).tolist()
        step = self.specification.state.in_flight[0].number
        digest = self.core._epoch.in_flight[0].digest
        assert (digest is not None) == (step % DIGEST_INTERVAL_STEPS == 0)
        accepted = self._accept(draw_token)
        tokens = [
            token
            for row, first in zip(rows, sampled, strict=True)
            for token in (first, *(accepted[row][1] if row in accepted else ()))
        ]
        columns = [(row, count, len(further)) for row, (count, further) in sorted(accepted.items())]
        output = ExecutorOutput(
            epoch=0,
            step=step,
            sampled_token_ids=encode_column(tokens),
            state_digest=digest,
            accepted_tokens=encode_columns(np.array(columns, dtype=np.int32).reshape(-1, 3).T),
        )
        events = readable_events(self.core.update(output, now=self.answer_time))
        assert events == self.specification.update(sampled, accepted, self.answer_time)
        for origin, index, token in events[0]:
            assert index == len(self.output_tokens[origin])
            self.output_tokens[origin].append(token)
        return True

    def _accept(self, rng: np.random.Generator) -> dict[int, tuple[int, list[int]]]:
        """For each row that speculates: how many tokens it proposed, and those that were right with the draw behind them."""
        accepted = {}
        for row, most in self.specification.state.in_flight[0].speculating.items():
            num_proposed = int(rng.integers(0, most + 1))
            num_accepted = int(rng.integers(0, num_proposed + 1)) if rng.random() < self.acceptance else 0
            accepted[row] = num_proposed, rng.integers(0, VOCAB_SIZE, size=num_accepted).tolist()
        return accepted

    def check(self) -> None:
        core, specification = self.core, self.specification
        tables = [core.rows.blocks_of(row) for row in core.rows.live_rows().tolist()]
        core.pool.check(np.concatenate(tables) if tables else np.empty(0, dtype=np.intp))
        assert core.pool.num_free == specification.state.pool.num_free
        assert core.pool.num_fenced == len(specification.state.pool.fenced)
        assert core.cache.num_cached == len(specification.state.pool.cache)
        worth = Counter(map(specification.state.pool.worth, specification.state.pool.chain_of))
        assert core.cache.num_worth() == [worth[level] for level in range(3)]
        for pin in core.pinned_prefixes.list():
            assert pin.num_resident_blocks == len(specification.state.pool.resident[pin.name])
        assert core.counters.num_evicted_blocks == specification.state.pool.num_evicted
        assert core.counters.num_prefix_hit_tokens == specification.state.num_hit_tokens
        assert core.num_running == len(specification.state.running)
        assert core.num_waiting == len(specification.state.waiting)
        for lane in core.lanes:
            decoding = lane.indices()
            num_context_tokens = core.rows.num_computed_tokens[decoding].sum()
            assert lane.shape() == (len(decoding), len(decoding), num_context_tokens, 0)
        assert core.counters.num_preemptions == specification.state.num_preemptions


@st.composite
def workloads(draw: st.DrawFn) -> tuple[SchedulerLimits, ExecutorCapacity, int, int]:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    max_model_len = draw(st.integers(min_value=4, max_value=48))
    least = -(-(max_model_len - 1) // block_size)
    num_lanes = draw(st.sampled_from([1, 1, 2, 3, 5]))
    capacity = ExecutorCapacity(
        num_blocks=draw(st.integers(min_value=least, max_value=4 * least) | st.just(200)),
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        max_num_rows=draw(st.integers(min_value=1, max_value=12) | st.just(20)),
        num_host_blocks=draw(st.sampled_from([0, 3, 100])),
        max_num_batched_tokens=draw(st.sampled_from([0, 0, 3, 20])),
        supports_prompt_logprobs=True,
        max_speculative_tokens=draw(st.sampled_from([0, 1, 4, 9])) if num_lanes == 1 else 0,
        num_lanes=num_lanes,
        supports_adapters=draw(st.booleans()),
        embedding_size=draw(st.sampled_from([0, 8])),
    )
    limits = SchedulerLimits(
        max_num_batched_tokens=draw(st.integers(min_value=1, max_value=64)),
        max_num_seqs=draw(st.integers(min_value=1, max_value=12) | st.just(20)),
        max_steps_in_flight=draw(st.integers(min_value=0, max_value=4) | st.just(7)),
        order=draw(st.sampled_from(["fcfs", "priority", *ORDERS])),
        batching=draw(st.sampled_from(["chunked", *BATCHING_POLICIES])),
        reserve=draw(st.sampled_from(["auto", *RESERVATIONS])),
        preemption=draw(st.sampled_from(["recompute", "swap"])),
        aging_s=draw(st.sampled_from([0.0, 5.0, 1e9])),
        default_ttft_slo_ms=draw(st.sampled_from([0, 4000])),
        shed_late=draw(st.booleans()),
        prefix_aware=draw(st.booleans()),
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        prefix_cache_scope=draw(st.sampled_from(["shared", "shared", "tenant"])),
        prefix_wait_tokens=draw(st.sampled_from([0, 1, 1, 3, 8])),
        max_speculating_seqs=draw(st.sampled_from([2, 32])),
        max_decode_only_steps=draw(st.sampled_from([0, 0, 1, 3])),
        max_adapters=draw(st.sampled_from([1, 2, 16])),
    )
    return limits, capacity, draw(st.integers(0, 2**32 - 1)), draw(st.integers(min_value=1, max_value=150))


def random_request(
    rng: np.random.Generator, number: int, capacity: ExecutorCapacity, *, pools: bool = False
) -> NewRequestEvent:
    max_model_len = capacity.max_model_len
    num_prompt_tokens = int(rng.integers(1, max_model_len))
    shared = np.tile(np.arange(VOCAB_SIZE, dtype=np.int32), max_model_len)
    split = int(rng.integers(0, num_prompt_tokens + 1))
    own = rng.integers(0, VOCAB_SIZE, size=num_prompt_tokens - split).astype(np.int32)
    return NewRequestEvent(
        origin=Origin(int(rng.integers(0, 2)), number),
        request_id=str(number),
        token_ids=np.concatenate((shared[:split], own)),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=int(rng.integers(1, max_model_len)),
        sampling=SamplingParams(min_tokens=int(rng.integers(0, 4)), prompt_logprobs=int(rng.choice([-1, -1, 0]))),
        stop_token_ids=frozenset({0} if rng.integers(0, 2) else ()),
        priority=int(rng.integers(1, 5)),
        tenant=TENANTS[int(rng.integers(0, len(TENANTS)))],
        ttft_slo_ms=int(rng.choice([0, 0, 2000, 20000])),
        adapter=str(rng.choice(ADAPTERS)) if capacity.supports_adapters else "",
        pooling=number % (POOL_CLS + 1) if pools else 0,
    )


def random_prefix(rng: np.random.Generator, max_model_len: int) -> Int32Array:
    """A beginning that many requests share, or one like it."""
    prefix = np.resize(np.arange(VOCAB_SIZE, dtype=np.int32), int(rng.integers(1, max_model_len)))
    if rng.integers(0, 3) == 0:
        prefix[rng.integers(0, len(prefix))] = rng.integers(0, VOCAB_SIZE)
    return prefix


@settings(max_examples=150 * FACTOR, suppress_health_check=[HealthCheck.too_slow])
@given(workloads())
# A request was compared with others by a token that it had when it was shorter, and nobody waited for its prefix.
@example(
    (
        SchedulerLimits(
            max_num_batched_tokens=5,
            max_num_seqs=4,
            max_steps_in_flight=3,
            preemption="swap",
            aging_s=1e9,
            default_ttft_slo_ms=4000,
            prefix_aware=True,
            prefix_cache_scope="tenant",
            prefix_wait_tokens=3,
            max_speculating_seqs=2,
        ),
        ExecutorCapacity(
            num_blocks=17,
            block_size=1,
            max_model_len=15,
            vocab_size=VOCAB_SIZE,
            max_num_rows=4,
            num_host_blocks=100,
            supports_prompt_logprobs=True,
            max_speculative_tokens=1,
        ),
        510511,
        115,
    )
)
# The specification promoted somebody while another was to run alone, since it asked the queue whose turn it would be.
@example(
    (
        SchedulerLimits(
            max_num_batched_tokens=6,
            max_num_seqs=20,
            max_steps_in_flight=4,
            order="shortest",
            reserve="predicted",
            preemption="recompute",
            aging_s=0.0,
            shed_late=True,
            prefix_wait_tokens=0,
            max_speculating_seqs=2,
        ),
        ExecutorCapacity(
            num_blocks=7,
            block_size=8,
            max_model_len=10,
            vocab_size=VOCAB_SIZE,
            max_num_rows=20,
            supports_prompt_logprobs=True,
        ),
        659,
        80,
    )
)
# The question whether a request behind prompts under way only decodes took the oldest's turn to be promoted.
@example(
    (
        SchedulerLimits(
            max_num_batched_tokens=3,
            max_num_seqs=20,
            max_steps_in_flight=1,
            order="shortest",
            batching="static",
            aging_s=0.0,
            default_ttft_slo_ms=4000,
            max_speculating_seqs=2,
            max_adapters=1,
            reserve="auto",
            preemption="recompute",
            prefix_offload="off",
        ),
        ExecutorCapacity(
            num_blocks=200,
            block_size=1,
            max_model_len=15,
            vocab_size=VOCAB_SIZE,
            max_num_rows=20,
            num_lanes=2,
            supports_prompt_logprobs=True,
        ),
        1,
        110,
    )
)
def test_core_equals_specification(workload: tuple[SchedulerLimits, ExecutorCapacity, int, int]) -> None:
    limits, capacity, seed, num_actions = workload
    rng = np.random.default_rng(seed)
    pair = Pair(limits, capacity)
    pair.acceptance = float(rng.choice([0.0, 0.5, 0.9]))
    origins: list[Origin] = []
    for _ in range(num_actions):
        action = rng.random()
        pair.now += float(rng.random())
        if action < 0.25:
            new = random_request(rng, len(origins), capacity, pools=capacity.embedding_size > 0)
            pair.add(new)
            origins.append(new.origin)
        elif action < 0.3 and origins:
            pair.abort(origins[int(rng.integers(0, len(origins)))])
        elif action < 0.33:
            tenant = TENANTS[int(rng.integers(0, len(TENANTS)))]
            pair.pin(str(rng.integers(0, 3)), tenant, random_prefix(rng, capacity.max_model_len))
        elif action < 0.34:
            pair.unpin(str(rng.integers(0, 3)))
        elif action < 0.36 and origins:
            pair.mind_a_loss(rng, origins)
        elif action < 0.72:
            pair.schedule()
        else:
            pair.update(rng)
        pair.check()
    for _ in range(30_000):
        scheduled = pair.schedule()
        if not pair.update(rng) and not scheduled:
            break
        pair.check()
    # Everything that was accepted has ended, and every block came back.
    assert pair.core.num_unfinished == 0
    assert pair.core.pool.num_free == capacity.num_blocks


@settings(max_examples=60 * FACTOR, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), st.sampled_from([0, 15, 25, 40, 100]), st.sampled_from([0.0, 0.1, 1e9]))
# Prompts ran in each lane in turn, took the blocks that they gave up in the lane before, and no lane ever decoded.
@example(
    (
        SchedulerLimits(
            max_num_batched_tokens=5,
            max_num_seqs=4,
            order="priority",
            batching="prefill_first",
            reserve="none",
            preemption="recompute",
            enable_prefix_caching=False,
            max_decode_only_steps=3,
            prefix_aware=True,
            prefix_cache_scope="tenant",
            prefix_wait_tokens=3,
            max_speculating_seqs=2,
        ),
        ExecutorCapacity(
            num_blocks=15,
            block_size=2,
            max_model_len=21,
            vocab_size=VOCAB_SIZE,
            max_num_rows=4,
            num_host_blocks=3,
            max_num_batched_tokens=3,
            supports_prompt_logprobs=True,
            num_lanes=5,
        ),
        2582872438,
        21,
    ),
    25,
    1e9,
)
def test_core_equals_specification_where_gaps_are_protected(
    workload: tuple[SchedulerLimits, ExecutorCapacity, int, int], default_itl_slo_ms: int, aging_s: float
) -> None:
    """Steps have durations; what else depends on them is left out."""
    limits, capacity, seed, num_actions = workload
    capacity = msgspec.structs.replace(capacity, max_speculative_tokens=0)
    limits = msgspec.structs.replace(
        limits, default_ttft_slo_ms=0, default_itl_slo_ms=default_itl_slo_ms, aging_s=aging_s, protect_itl=True
    )
    rng = np.random.default_rng(seed)
    pair = Pair(limits, capacity, knows_durations=True)
    origins: list[Origin] = []
    for _ in range(4 * num_actions):
        action = rng.random()
        pair.now += float(rng.choice([0.0, 0.005, 0.02]))
        pair.answer_time = pair.now
        if action < 0.2:
            new = random_request(rng, len(origins), capacity)
            pair.add(msgspec.structs.replace(new, ttft_slo_ms=0, itl_slo_ms=int(rng.choice([0, 0, 15, 30, 60]))))
            origins.append(new.origin)
        elif action < 0.22 and origins:
            pair.abort(origins[int(rng.integers(0, len(origins)))])
        elif action < 0.62:
            pair.schedule()
        else:
            pair.update(rng)
        pair.check()
    for _ in range(30_000):
        scheduled = pair.schedule()
        pair.now += 0.01
        pair.answer_time = pair.now
        if not pair.update(rng) and not scheduled:
            break
        pair.check()
    assert pair.core.num_unfinished == 0
    assert pair.core.pool.num_free == capacity.num_blocks
