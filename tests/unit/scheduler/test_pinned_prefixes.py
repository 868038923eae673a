"""Pins: what is refused, what replaces what, what a new executor leaves of them, and how operators see them."""

import msgspec
import numpy as np
import pytest

from core_driver import CoreDriver
from headway_executor.backend import BackendConfig
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto.columns import encode_column
from headway_proto.ingress import Submit
from headway_proto.operations import AdminCall, AdminReply, PrefixToPin
from headway_proto.sampling import SamplingParams
from headway_scheduler.core.memory.pinned_prefixes import PinRefused
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from simulation.world import World

CAPACITY = ExecutorCapacity(num_blocks=64, block_size=4, max_model_len=64, vocab_size=64, max_num_rows=4)


def tokens(count: int) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    return np.arange(count, dtype=np.int32) % 64


@pytest.mark.parametrize(
    ("limits", "tenant", "token_ids", "message"),
    [
        ({}, "", tokens(3), "prefix: 3 tokens fill no block; allowed: at least 4, the block size"),
        ({}, "", tokens(0), "prefix: 0 tokens fill no block"),
        ({}, "", tokens(4) + 61, "token_ids: 64 is not allowed; allowed: 0 to 63"),
        ({}, "", tokens(4) - 2, "token_ids: -1 is not allowed; allowed: 0 to 63"),
        ({}, "", tokens(68), "prefix: 68 tokens fill 17 blocks; allowed: 16 more pinned blocks, for 16 in all"),
        ({}, "a", tokens(4), "tenant: 'a' is not allowed; allowed: none, as prefix_cache_scope is shared"),
        ({"enable_prefix_caching": False}, "", tokens(4), "prefix: nothing is cached"),
    ],
)
def test_a_pin_that_cannot_be_is_refused_in_one_line(
    limits: dict[str, bool], tenant: str, token_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]", message: str
) -> None:
    core = Scheduler(SchedulerLimits(**limits), CAPACITY)
    with pytest.raises(PinRefused) as refusal:
        core.pinned_prefixes.pin("p", tenant, token_ids)
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)
    assert core.pinned_prefixes.list() == ()


def test_blocks_of_a_model_with_states_are_no_beginning_for_another_request() -> None:
    capacity = msgspec.structs.replace(CAPACITY, keeps_states=True)
    limits = SchedulerLimits(max_num_batched_tokens=64)
    for keeps_states, hits in ((False, 16), (True, 0)):
        driver = CoreDriver(limits, msgspec.structs.replace(capacity, keeps_states=keeps_states))
        for handle in (1, 2):
            driver.add(handle, 20, 1)
            driver.all_steps()
        assert driver.core.counters.num_prefix_hit_tokens == hits
    core = Scheduler(limits, CAPACITY)
    core.pinned_prefixes.pin("p", "", tokens(8))
    core.begin_epoch(capacity, 2, same_model=True)  # the pin waits for an executor that can have it
    assert [pin.num_blocks for pin in core.pinned_prefixes.list()] == [0]
    with pytest.raises(PinRefused, match="and the model keeps no states"):
        core.pinned_prefixes.pin("q", "", tokens(8))
    core.begin_epoch(CAPACITY, 3, same_model=True)
    assert [pin.num_blocks for pin in core.pinned_prefixes.list()] == [2]


def test_all_pins_together_are_at_most_a_quarter_of_the_pool() -> None:
    pins = Scheduler(SchedulerLimits(), CAPACITY).pinned_prefixes
    pins.pin("a", "", tokens(40))
    with pytest.raises(PinRefused, match="6 more pinned blocks"):
        pins.pin("b", "", tokens(28))
    pins.pin("b", "", tokens(27))
    with pytest.raises(PinRefused, match="10 more pinned blocks"):
        pins.pin("a", "", tokens(44))  # the old one stays
    assert [(pin.name, pin.num_tokens, pin.num_blocks) for pin in pins.list()] == [("a", 40, 10), ("b", 27, 6)]
    pins.pin("a", "", tokens(4))
    assert [(pin.name, pin.num_blocks) for pin in pins.list()] == [("b", 6), ("a", 1)]
    assert pins.unpin("b")
    assert not pins.unpin("b")
    pins.pin("c", "", tokens(60))


def test_pins_outlive_executors_as_far_as_they_fit_but_not_the_model() -> None:
    core = Scheduler(SchedulerLimits(), CAPACITY)
    core.pinned_prefixes.pin("long", "", tokens(40))
    core.pinned_prefixes.pin("short", "", tokens(8))
    core.begin_epoch(msgspec.structs.replace(CAPACITY, num_blocks=16), 1)
    assert [(pin.name, pin.num_tokens, pin.num_blocks) for pin in core.pinned_prefixes.list()] == [
        ("long", 40, 0),
        ("short", 8, 2),
    ]
    core.begin_epoch(msgspec.structs.replace(CAPACITY, block_size=8), 2)
    assert [pin.num_blocks for pin in core.pinned_prefixes.list()] == [5, 1]
    core.begin_epoch(CAPACITY, 3, same_model=False)
    assert core.pinned_prefixes.list() == ()


CONFIG = BackendConfig(
    model="",
    block_size=4,
    num_kv_blocks=40,
    max_model_len=100,
    max_num_seqs=4,
    options={"vocab_size": "97", "context_length": "100", "real_time": "false"},
)


class Operator:
    """Calls through a gateway's link to a scheduler with a simulated executor."""

    def __init__(self) -> None:
        self.world = World(SchedulerLimits(max_num_batched_tokens=64), CONFIG, num_gateways=1, seed=1)
        self._link = self.world.gateways[0].link
        self._num_requests = 0

    def call(self, method: str, **prefix: object) -> AdminReply:
        self._link.call_admin(AdminCall(method=method, prefix=PrefixToPin(**prefix) if prefix else None))
        replies: list[AdminReply] = []

        def answered() -> bool:
            replies.extend(self._link.take_admin_replies())
            return bool(replies)

        self.world.run_until(answered, 2)
        return replies[0]

    def wait_for_executor(self) -> None:
        self.world.run_until(lambda: self._link.model is not None, 2)

    def generate(self, num_tokens: int, tenant: str = "") -> None:
        self._num_requests += 1
        submission = Submit(
            handle=self._num_requests,
            request_id=str(self._num_requests),
            index=0,
            token_ids=encode_column(tokens(num_tokens)),
            num_prompt_tokens=num_tokens,
            max_tokens=2,
            sampling=SamplingParams(),
            tenant=tenant,
        )
        sequence = LiveSequence(submission, (), lambda: None)
        self._link.submit(sequence)
        self.world.run_until(lambda: sequence.end is not None, 5)


def test_an_operator_pins_lists_and_unpins() -> None:
    operator = Operator()
    operator.wait_for_executor()
    (pinned,) = operator.call("pin", name="system", token_ids=encode_column(tokens(10))).pinned_prefixes
    assert (pinned.name, pinned.num_tokens, pinned.num_blocks, pinned.num_resident_blocks) == ("system", 10, 2, 0)
    for tenant in ("a", "b"):
        operator.generate(20, tenant)
    assert [pin.num_resident_blocks for pin in operator.call("pins").pinned_prefixes] == [2]
    reply = operator.call("status")
    assert reply.status is not None
    status = reply.status
    assert (status.num_pinned_blocks, status.num_reused_blocks) == (2, 2)
    assert (status.num_prefix_queries, status.num_prefix_hits, status.num_prefix_hit_tokens) == (2, 1, 16)
    assert status.recent_prefix_hit_rate == pytest.approx(0.4, abs=0.01)
    assert [(use.tenant, use.num_hit_tokens) for use in reply.tenants] == [("a", 0), ("b", 16)]
    assert operator.call("unpin", name="system").error == ""
    assert operator.call("unpin", name="system").error == "not found"
    assert operator.call("pins").pinned_prefixes == ()


def test_a_bad_pin_is_answered_with_what_is_wrong() -> None:
    operator = Operator()
    operator.wait_for_executor()
    assert operator.call("pin").error == "prefix: there is none; allowed: one with a name"
    assert operator.call("pin", name="x" * 129).error.endswith("is not allowed; allowed: 1 to 128 bytes")
    assert operator.call("pin", name="x", token_ids=b"abc").error == "token_ids: 3 bytes are no int32 column"
    assert operator.call("pin", name="x", token_ids=encode_column([1])).error.startswith("prefix: 1 tokens")
    assert operator.call("pins").pinned_prefixes == ()
