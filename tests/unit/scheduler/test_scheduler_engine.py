"""The scheduler as gateways and operators see it: refusals, administration, failing rows."""

import re
from collections.abc import Callable

import msgspec
import pytest

from headway_executor.backend import BackendConfig
from headway_gateway.link.live_sequence import LiveSequence
from headway_proto import ingress
from headway_proto.columns import encode_column
from headway_proto.ingress import Finished, Rejected, Submit
from headway_proto.operations import AdminCall, AdminReply
from headway_proto.sampling import SamplingParams
from headway_scheduler.cells.notices import Notice
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.state.limits import SchedulerLimits
from simulation.world import World

LIMITS = SchedulerLimits(max_num_batched_tokens=64, max_num_seqs=4, max_num_waiting=6)
CONFIG = BackendConfig(
    model="",
    block_size=4,
    num_kv_blocks=40,
    max_model_len=100,
    max_num_seqs=4,
    options={"vocab_size": "97", "context_length": "100", "real_time": "false"},
)
GOOD = Submit(
    handle=1,
    request_id="a",
    index=0,
    token_ids=encode_column([1, 2, 3]),
    num_prompt_tokens=3,
    max_tokens=5,
    sampling=SamplingParams(),
)


def ready_world(limits: SchedulerLimits, config: BackendConfig = CONFIG) -> World:
    world = World(limits, config, num_gateways=1, seed=1)
    world.run_until(lambda: world.engine.fleet.info is not None, 2)
    world.run_until(lambda: world.gateways[0].link.model is not None, 2)
    return world


@pytest.fixture
def world() -> World:
    return ready_world(LIMITS)


def submit(world: World, submission: Submit) -> LiveSequence:
    sequence = LiveSequence(submission, (), lambda: None)
    world.gateways[0].link.submit(sequence)
    return sequence


def call(world: World, method: str, request_id: str = "") -> AdminReply:
    link = world.gateways[0].link
    link.call_admin(AdminCall(method=method, request_id=request_id))
    replies: list[AdminReply] = []

    def answered() -> bool:
        replies.extend(link.take_admin_replies())
        return bool(replies)

    world.run_until(answered, 2)
    return replies[0]


def sampling(**fields: object) -> dict[str, object]:
    return {"sampling": SamplingParams(**fields)}


@pytest.mark.parametrize(
    ("change", "reason", "field", "message"),
    [
        ({"token_ids": b""}, "invalid", "token_ids", "0 bytes"),
        ({"token_ids": b"abc"}, "invalid", "token_ids", "3 bytes"),
        ({"token_ids": encode_column([1, 97, 2])}, "invalid", "token_ids", "97 is not allowed; allowed: 0 to 96"),
        ({"token_ids": encode_column([1, -1, 2])}, "invalid", "token_ids", "-1 is not allowed; allowed: 0 to 96"),
        ({"num_prompt_tokens": 0}, "invalid", "prompt", "0 prompt tokens"),
        ({"num_prompt_tokens": 4}, "invalid", "prompt", "4 prompt tokens of 3"),
        ({"token_ids": encode_column([1] * 100), "num_prompt_tokens": 100}, "invalid", "prompt", "at most 99"),
        ({"max_tokens": 0}, "invalid", "max_tokens", "0 is not allowed"),
        ({"token_ids": encode_column([1] * 9), "num_prompt_tokens": 3}, "out_of_range", "resume", "6 tokens held"),
        ({"request_id": "x" * 129}, "invalid", "request_id", "128 bytes"),
        ({"tenant": "x" * 129}, "invalid", "tenant", "128 bytes"),
        ({"priority": 5}, "invalid", "priority", "1 to 4"),
        (sampling(min_tokens=6), "invalid", "min_tokens", "at most max_tokens, 5"),
        (sampling(temperature=float("nan")), "invalid", "temperature", "nan"),
        (sampling(top_p=0.0), "invalid", "top_p", "above 0"),
        (sampling(logit_bias=((97, 1.0),)), "invalid", "logit_bias", "token ids 0 to 96"),
        (sampling(stop_token_ids=(97,)), "invalid", "stop_token_ids", "token ids 0 to 96"),
        (sampling(logprobs=21), "invalid", "logprobs", "0 to 20"),
    ],
)
def test_refusals_name_field_value_and_range_and_harm_nobody(
    world: World, change: dict[str, object], reason: str, field: str, message: str
) -> None:
    neighbour = submit(world, msgspec.structs.replace(GOOD, handle=7, request_id="neighbour"))
    refused = submit(world, msgspec.structs.replace(GOOD, **change))
    world.run_until(lambda: refused.end is not None and neighbour.end is not None, 5)
    assert isinstance(refused.end, Rejected)
    assert (refused.end.reason, refused.end.field) == (reason, field)
    assert message in refused.end.message
    assert isinstance(neighbour.end, Finished)
    assert len(neighbour.tokens) == 5


def test_an_id_in_use_is_refused_and_free_again_afterwards(world: World) -> None:
    first = submit(world, GOOD)
    second = submit(world, msgspec.structs.replace(GOOD, handle=2))
    world.run_until(lambda: first.end is not None and second.end is not None, 5)
    assert isinstance(first.end, Finished)
    assert isinstance(second.end, Rejected)
    assert second.end.reason == ingress.REJECT_ALREADY_EXISTS
    third = submit(world, msgspec.structs.replace(GOOD, handle=3))
    world.run_until(lambda: third.end is not None, 5)
    assert isinstance(third.end, Finished)


def test_a_full_queue_refuses_with_a_time_to_come_back(world: World) -> None:
    call(world, "pause")
    accepted = [submit(world, msgspec.structs.replace(GOOD, handle=n, request_id=str(n))) for n in range(6)]
    refused = submit(world, msgspec.structs.replace(GOOD, handle=6, request_id="6"))
    world.run_until(lambda: refused.end is not None, 2)
    assert isinstance(refused.end, Rejected)
    assert refused.end.reason == ingress.REJECT_OVERLOADED
    assert refused.end.retry_after_ms > 0
    call(world, "resume")
    world.run_until(lambda: all(sequence.end for sequence in accepted), 5)
    assert all(isinstance(sequence.end, Finished) for sequence in accepted)


def test_status_list_and_explain(world: World) -> None:
    long = [submit(world, msgspec.structs.replace(GOOD, handle=n, request_id=f"r{n}", max_tokens=60)) for n in range(6)]
    world.run_until(lambda: all(len(sequence.tokens) > 2 for sequence in long[:4]), 5)
    status = call(world, "status").status
    assert status is not None
    assert (status.num_running, status.num_waiting, status.scheduler_state) == (4, 2, ingress.STATE_SERVING)
    assert status.num_total_blocks == 40
    assert status.num_free_blocks < 40
    states = {state.request_id: state.state for state in call(world, "list").sequences}
    assert states == {f"r{n}": "running" if n < 4 else "waiting" for n in range(6)}
    waiting = call(world, "explain", "r5")
    assert "waits behind 1 others: max_num_seqs = 4 requests are running" in waiting.explanation
    assert "and runs:" in call(world, "explain", "r0").explanation
    assert call(world, "explain", "nobody").error == "not found"


@pytest.mark.parametrize(
    ("batching", "why"),
    [
        ("static", "batching is static, and the batch that runs has to end first"),
        ("orca", "its 3 tokens of at most 93 must find 23 blocks, and 17 are free and not promised"),
    ],
)
def test_explain_tells_what_the_policy_waits_for(batching: str, why: str) -> None:
    world = ready_world(msgspec.structs.replace(LIMITS, batching=batching))
    first = submit(world, msgspec.structs.replace(GOOD, max_tokens=90))
    world.run_until(lambda: len(first.tokens) > 2, 5)
    submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="b", max_tokens=90))
    world.run_until(lambda: world.engine.num_unfinished == 2, 5)
    assert f"waits behind 0 others: {why}." in call(world, "explain", "b").explanation


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_explain_tells_who_is_served_before_under_every_order(order: str) -> None:
    """What each is told is what comes about, as long as nobody else comes."""
    world = ready_world(msgspec.structs.replace(LIMITS, order=order, max_num_seqs=1, reserve="prompt"))
    first = submit(world, msgspec.structs.replace(GOOD, max_tokens=90, priority=ingress.PRIORITY_REALTIME))
    world.run_until(lambda: len(first.tokens) > 2, 5)
    kinds = ((3, 5, "b", 9000), (2, 60, "a", 0), (4, 20, "b", 3000), (3, 2, "a", 5000), (2, 9, "b", 0))
    waiting = [
        submit(
            world,
            msgspec.structs.replace(
                GOOD,
                handle=10 + number,
                request_id=f"w{number}",
                priority=priority,
                max_tokens=max_tokens,
                tenant=tenant,
                ttft_slo_ms=ttft_slo_ms,
            ),
        )
        for number, (priority, max_tokens, tenant, ttft_slo_ms) in enumerate(kinds)
    ]
    world.run_until(lambda: world.engine.num_unfinished == 6, 5)
    told = {}
    for number in range(len(kinds)):
        explanation = call(world, "explain", f"w{number}").explanation
        found = re.fullmatch(r"It arrived \d+\.\d s ago and waits behind (\d) others: (.*)\.", explanation)
        assert found is not None, explanation
        assert found[2] == "max_num_seqs = 1 requests are running"
        told[number] = int(found[1])
    started: list[int] = []

    def note_starts() -> bool:
        started.extend(number for number, one in enumerate(waiting) if one.has_run and number not in started)
        return len(started) == len(waiting)

    world.run_until(note_starts, 20)
    if order == "fair":
        # Of tenants it can be told who is next, and of each of its own requests; turns between them come later.
        assert told[started[0]] == 0
        assert [number for number in started if kinds[number][2] == "a"] == [1, 3]
        assert told[1] < told[3]
        assert told[0] < told[2] < told[4]
    else:
        assert {number: started.index(number) for number in started} == told


def test_explain_tells_of_a_preempted_request_how_often_it_was_and_what_it_waits_for() -> None:
    limits = msgspec.structs.replace(LIMITS, order="priority", max_num_seqs=1, preemption="swap")
    world = ready_world(limits)
    low = submit(world, msgspec.structs.replace(GOOD, request_id="low", max_tokens=60, priority=ingress.PRIORITY_LOW))
    world.run_until(lambda: len(low.tokens) > 2, 5)
    urgent = submit(
        world,
        msgspec.structs.replace(GOOD, handle=2, request_id="urgent", max_tokens=60, priority=ingress.PRIORITY_REALTIME),
    )
    world.run_until(lambda: len(urgent.tokens) > 2, 5)
    explanation = call(world, "explain", "low").explanation
    assert "was preempted 1 times and waits behind 0 others: max_num_seqs = 1 requests are running" in explanation
    (state,) = call(world, "explain", "low").sequences
    assert (state.state, state.num_preemptions, state.priority) == ("preempted", 1, ingress.PRIORITY_LOW)
    assert "and runs:" in call(world, "explain", "urgent").explanation


def test_explain_tells_of_the_inter_token_objective_that_one_more_would_break() -> None:
    """Frames take a beat each way, so that a step takes longer than the objective allows."""
    config = msgspec.structs.replace(
        CONFIG, num_kv_blocks=600, max_model_len=2000, options={**CONFIG.options, "context_length": "2000"}
    )
    limits = msgspec.structs.replace(LIMITS, budget="slo", default_itl_slo_ms=1, max_steps_in_flight=1)
    world = ready_world(limits, config)
    first = submit(world, msgspec.structs.replace(GOOD, max_tokens=1500))
    world.run_until(lambda: len(first.tokens) > 600, 20)
    second = submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="b"))
    world.run_until(lambda: world.engine.num_unfinished == 2, 5)
    explanation = call(world, "explain", "b").explanation
    assert (
        "waits behind 0 others: with one more, running requests would miss their inter-token objective" in explanation
    )
    world.run_until(lambda: second.end is not None, 20)
    assert isinstance(second.end, Finished)


def test_class_tenant_and_objectives_reach_the_core() -> None:
    world = ready_world(msgspec.structs.replace(LIMITS, default_itl_slo_ms=70))
    told = msgspec.structs.replace(GOOD, priority=2, tenant="t", ttft_slo_ms=500, itl_slo_ms=30, max_tokens=50)
    submit(world, told)
    submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="b", max_tokens=50))
    world.run_until(lambda: world.engine.num_unfinished == 2, 5)
    assert world.engine.fleet.cells[0].core is not None
    first, second = world.engine.fleet.cells[0].core.requests()
    assert (first.new.priority, first.new.tenant, first.new.ttft_slo_ms, first.itl_slo_ms) == (2, "t", 500, 30)
    assert (second.new.priority, second.new.tenant, second.new.ttft_slo_ms, second.itl_slo_ms) == (3, "", 0, 70)


def test_a_request_that_can_no_longer_be_in_time_is_refused_once_and_its_id_is_free() -> None:
    world = ready_world(msgspec.structs.replace(LIMITS, shed_late=True, max_num_seqs=1))
    sent: list[Rejected] = []
    send = world.engine.gateways.send

    def noting(owner: int, body: msgspec.Struct) -> None:
        if isinstance(body, Rejected):
            sent.append(body)
        send(owner, body)

    world.engine.gateways.send = noting  # type: ignore[method-assign]
    long = submit(world, msgspec.structs.replace(GOOD, max_tokens=90))
    world.run_until(lambda: len(long.tokens) > 2, 5)
    late = submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="late", ttft_slo_ms=30))
    world.run_until(lambda: late.end is not None, 5)
    assert long.end is None
    assert isinstance(late.end, Rejected)
    assert (late.end.reason, late.end.field) == (ingress.REJECT_OVERLOADED, "")
    assert call(world, "explain", "late").error == "not found"
    again = submit(world, msgspec.structs.replace(GOOD, handle=3, request_id="late"))
    world.run_until(lambda: again.end is not None and long.end is not None, 5)
    assert isinstance(again.end, Finished)
    assert isinstance(long.end, Finished)
    assert [rejected.handle for rejected in sent] == [2]


def test_cancel_ends_the_request_and_may_be_repeated(world: World) -> None:
    sequence = submit(world, msgspec.structs.replace(GOOD, max_tokens=90))
    world.run_until(lambda: len(sequence.tokens) > 3, 5)
    assert call(world, "cancel", "a").error == ""
    world.run_until(lambda: sequence.end is not None, 2)
    assert isinstance(sequence.end, Finished)
    assert sequence.end.reason == ingress.FINISH_ABORT
    assert call(world, "cancel", "a").error == ""
    assert call(world, "cancel", "b").error == "not found"
    status = call(world, "status").status
    assert status is not None
    assert status.num_free_blocks == status.num_total_blocks


def test_pause_holds_back_the_waiting_and_lets_the_running_finish(world: World) -> None:
    running = submit(world, msgspec.structs.replace(GOOD, max_tokens=40))
    world.run_until(lambda: len(running.tokens) > 1, 2)
    call(world, "pause")
    waiting = submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="b"))
    world.run_until(lambda: running.end is not None, 5)
    assert waiting.end is None
    assert "admission is paused" in call(world, "explain", "b").explanation
    call(world, "resume")
    world.run_until(lambda: waiting.end is not None, 5)


def test_draining_refuses_new_requests_and_finishes_the_accepted(world: World) -> None:
    accepted = submit(world, GOOD)
    call(world, "drain")
    refused = submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="b"))
    world.run_until(lambda: accepted.end is not None and refused.end is not None, 5)
    assert isinstance(accepted.end, Finished)
    assert isinstance(refused.end, Rejected)
    assert refused.end.reason == ingress.REJECT_UNAVAILABLE


def break_link(world: World) -> None:
    (link,) = world.engine.gateways.links()
    world.engine.gateway_frame(link.peer, b"damaged", world.now)
    assert not world.engine.live


def test_who_was_accepted_before_a_drain_ends_although_its_link_is_lost(world: World) -> None:
    accepted = [
        submit(world, msgspec.structs.replace(GOOD, handle=number, request_id=f"r{number}", max_tokens=60))
        for number in range(1, 7)
    ]
    world.run_until(lambda: len(accepted[0].tokens) > 3, 5)
    assert not accepted[-1].tokens, "it waits"
    call(world, "drain")
    break_link(world)
    assert world.engine.num_unfinished == 6, "a process that is to stop goes on"
    refused = submit(world, msgspec.structs.replace(GOOD, handle=7, request_id="r7"))
    world.run_until(lambda: all(sequence.end is not None for sequence in (*accepted, refused)), 20)
    assert all(isinstance(sequence.end, Finished) and len(sequence.tokens) == 60 for sequence in accepted)
    assert isinstance(refused.end, Rejected)
    assert world.engine.num_unfinished == 0


def test_a_drain_does_not_wait_long_for_a_gateway_that_is_gone(world: World) -> None:
    submit(world, msgspec.structs.replace(GOOD, max_tokens=90))
    world.run_until(lambda: len(world.engine.live) == 1, 5)
    call(world, "drain")
    world.restart_gateway(0)
    break_link(world)
    lost_at = world.now
    assert world.engine.num_unfinished == 1
    world.run_until(lambda: not world.engine.num_unfinished, 10)
    assert 2.9 < world.now - lost_at < 3.5


def test_who_was_accepted_before_a_drain_and_before_an_executor_ends() -> None:
    world = World(LIMITS, CONFIG, num_gateways=1, seed=1)
    world.kill_executor(0)
    accepted = submit(world, GOOD)
    world.run_until(lambda: len(world.engine.early) == 1, 5)
    call(world, "drain")
    world.start_executor(0)
    world.run_until(lambda: accepted.end is not None, 10)
    assert isinstance(accepted.end, Finished)


def test_a_failing_row_ends_that_request_alone() -> None:
    config = msgspec.structs.replace(CONFIG, options={**CONFIG.options, "nan_row_token": "96"})
    world = World(LIMITS, config, num_gateways=1, seed=2)
    good = submit(world, GOOD)
    bad = submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="b", token_ids=encode_column([1, 2, 96])))
    world.run_until(lambda: good.end is not None and bad.end is not None, 5)
    assert isinstance(good.end, Finished)
    assert isinstance(bad.end, Finished)
    assert (good.end.reason, bad.end.reason) == (ingress.FINISH_LENGTH, ingress.FINISH_ERROR)
    assert "NaN" in bad.end.error
    core = world.engine.fleet.cells[0].core
    assert core is not None
    world.run_until(lambda: core.num_in_flight == 0, 1)
    assert core.pool.num_free == core.pool.num_blocks


@pytest.mark.parametrize("advance", [lambda sequence: len(sequence.tokens) > 3, lambda sequence: True])
def test_an_aborted_sequence_frees_its_blocks_at_the_next_step(
    world: World, advance: Callable[[LiveSequence], bool]
) -> None:
    sequence = submit(
        world, msgspec.structs.replace(GOOD, token_ids=encode_column([5] * 70), num_prompt_tokens=70, max_tokens=20)
    )
    core = world.engine.fleet.cells[0].core
    assert core is not None
    world.run_until(lambda: advance(sequence) and core.num_running == 1, 2)
    world.gateways[0].link.abort([sequence])
    steps = core.counters.num_steps
    world.run_until(lambda: core.num_running == 0 and core.num_in_flight == 0, 2)
    assert core.counters.num_steps - steps <= LIMITS.steps_in_flight(num_lanes=1) + 1
    assert core.pool.num_free == core.pool.num_blocks


@pytest.mark.parametrize(("seed", "reason"), [(0, ingress.FINISH_LENGTH), (1, ingress.FINISH_ERROR)])
def test_a_request_goes_on_with_another_executor_only_if_that_runs_the_same_model(
    world: World, seed: int, reason: int
) -> None:
    running = submit(world, msgspec.structs.replace(GOOD, max_tokens=50))
    world.run_until(lambda: len(running.tokens) > 3, 2)
    world.config = msgspec.structs.replace(CONFIG, seed=seed)
    world.start_executor()
    world.run_until(lambda: running.end is not None, 10)
    assert isinstance(running.end, Finished)
    assert running.end.reason == reason
    assert (running.end.error == "the executor that took over runs another model") == (seed == 1)
    later = submit(world, msgspec.structs.replace(GOOD, handle=2, request_id="b"))
    world.run_until(lambda: later.end is not None, 5)
    assert isinstance(later.end, Finished)
    assert later.end.reason == ingress.FINISH_LENGTH


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_notices_of_requests_carry_their_ids_and_come_only_if_wanted(world: World) -> None:
    def run(handle: int) -> list[Notice]:
        world.engine.notices.take()
        good = submit(
            world, msgspec.structs.replace(GOOD, handle=handle, request_id=f"r{handle}", traceparent=TRACEPARENT)
        )
        bad = submit(world, msgspec.structs.replace(GOOD, handle=handle + 1, max_tokens=0))
        world.run_until(lambda: good.end is not None and bad.end is not None, 5)
        return world.engine.notices.take()

    assert run(1) == []
    world.engine.notices.includes_requests = True
    notices = run(11)
    assert [notice.event for notice in notices] == ["request accepted", "request refused", "request finished"]
    assert {notice.level for notice in notices} == {"debug"}
    accepted, refused, finished = (notice.details for notice in notices)
    assert accepted["request_id"] == finished["request_id"] == "r11"
    assert accepted["trace_id"] == finished["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert finished["reason"] == "length"
    assert refused["reason"] == "invalid"
    assert "trace_id" not in refused


def test_a_request_that_fails_is_told_of_at_any_level() -> None:
    config = msgspec.structs.replace(CONFIG, options={**CONFIG.options, "nan_row_token": "96"})
    world = World(LIMITS, config, num_gateways=1, seed=2)
    bad = submit(world, msgspec.structs.replace(GOOD, request_id="b", token_ids=encode_column([1, 2, 96])))
    world.run_until(lambda: bad.end is not None, 5)
    (notice,) = [notice for notice in world.engine.notices.take() if notice.event == "request failed"]
    assert (notice.level, notice.details["request_id"]) == ("warning", "b")
    assert notice.details["error"]
