"""``serve --executors``: what each executor has of its own, what is refused, and when all is ready."""

import os
from pathlib import Path

import pytest

import headway.planning.plan
from headway.__main__ import parser_of
from headway.flags.settings import ConfigurationError
from headway.planning.plan import Plan, make_plan
from headway.running import readiness
from headway.running.health import Target
from headway.running.pulse_watch import PulseWatch
from headway_process.fleet_numbers import fleet_fields
from headway_process.pulse import Pulse
from headway_proto import generation_pb2

TWO = ("--executors", "2", "--grpc-address", "127.0.0.1:50900")
MODEL = generation_pb2.GetModelResponse(name="m", backend="b", device="d", dtype="t")


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headway.planning.plan, "_own_cores", lambda: [0, 1])


def plan_of(*words: str, **environment: str) -> Plan:
    return make_plan(parser_of("serve").parse(words), environment, Path("/run/x"))


def flag_of(plan: Plan, name: str, flag: str) -> str:
    (value,) = (word.partition("=")[2] for word in plan.commands[name] if word.startswith(f"{flag}="))
    return value


def test_one_scheduler_has_several_executors_and_each_of_these_has_a_name() -> None:
    plan = plan_of(*TWO)
    assert plan.start_order == ["executor-0", "executor-1", "scheduler", "gateway"]
    assert [list(stage) for stage in plan.stop_stages] == [["gateway"], ["scheduler"], ["executor-0", "executor-1"]]
    assert flag_of(plan, "scheduler", "--max-executors") == "2"
    for name in ("executor-0", "executor-1", "scheduler"):
        assert flag_of(plan, name, "--step-address") == "ipc:///run/x/step"
    assert [fleet_fields(plan.environments[name]) for name in ("executor-0", "executor-1")] == [
        {"executor": 0},
        {"executor": 1},
    ]
    assert set(plan.environments) == {"executor-0", "executor-1"}
    assert plan.awaited == ("executor-0", "executor-1")


def test_one_executor_is_served_as_ever() -> None:
    plan = plan_of("--executors", "1", "--device", "cuda:1", "--backend-option", "step_log=x")
    assert plan.start_order == ["executor", "scheduler", "gateway"]
    assert flag_of(plan, "executor", "--device") == "cuda:1"
    assert not [word for word in plan.commands["scheduler"] if word.startswith("--max-executors")]
    assert plan.environments == plan.cores == {}
    assert plan.awaited == ()


def test_serve_settles_the_most_executors_of_its_scheduler() -> None:
    plan = plan_of(*TWO, HEADWAY_SCHEDULER_MAX_EXECUTORS="7")
    assert flag_of(plan, "scheduler", "--max-executors") == "2"
    with pytest.raises(SystemExit):
        plan_of("--max-executors", "2")


def test_replicas_may_each_have_several_executors() -> None:
    plan = plan_of(*TWO, "--replicas", "2", "--device", "cuda")
    executors = ["executor-0-0", "executor-0-1", "executor-1-0", "executor-1-1"]
    assert plan.start_order == [*executors, "scheduler-0", "scheduler-1", "gateway-0", "gateway-1"]
    assert [flag_of(plan, name, "--device") for name in executors] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [flag_of(plan, name, "--step-address")[-1] for name in executors] == ["0", "0", "1", "1"]
    assert fleet_fields(plan.environments["executor-1-0"]) == {"replica": 1, "executor": 0}
    assert fleet_fields(plan.environments["scheduler-1"]) == {"replica": 1}


def test_every_executor_has_a_port_for_its_metrics() -> None:
    plan = plan_of(*TWO, "--replicas", "2", "--metrics-port", "9464", "--workers", "2")
    ports = {name: int(flag_of(plan, name, "--metrics-address").rpartition(":")[2]) for name in plan.start_order}
    first = ("scheduler-0", "executor-0-0", "executor-0-1", "gateway-0")
    assert [ports[name] for name in first] == [9464, 9465, 9466, 9467]
    taken = [*ports.values(), ports["gateway-0"] + 1, ports["gateway-1"] + 1]
    assert sorted(taken) == list(range(9464, 9464 + 10))


@pytest.mark.parametrize(
    ("cores", "words", "own"),
    [
        ([4, 7], (), [{4}, {7}]),
        (range(5), (), [{0, 1}, {2, 3}]),
        (range(8), ("--replicas", "2"), [{0, 1}, {2, 3}, {4, 5}, {6, 7}]),
        ([0], (), []),
        (range(8), ("--num-threads", "1"), []),
        (range(8), ("--device", "cuda"), []),
    ],
)
def test_cores_are_shared_out_as_far_as_each_executor_gets_one(
    cores: list[int], words: tuple[str, ...], own: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headway.planning.plan, "_own_cores", lambda: list(cores))
    assert list(plan_of(*TWO, *words).cores.values()) == own


def test_executors_compute_in_one_thread_where_cores_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headway.planning.plan, "_own_cores", lambda: [0])
    assert flag_of(plan_of(*TWO), "executor-1", "--num-threads") == "1"
    assert flag_of(plan_of(*TWO, "--num-threads", "2"), "executor-1", "--num-threads") == "2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--executors", "0"), r"^--executors: '0' is not allowed; allowed: a whole number, at least 1, at most 64"),
        (("--executors", "65"), r"^--executors: '65' is not allowed"),
        (
            ("--device", "cuda:1"),
            r"^--device: 'cuda:1' .* allowed: cuda, of which each of 2 executors takes one, or cpu",
        ),
        (
            ("--device", "cuda:1", "--replicas", "2"),
            r"^--device: 'cuda:1' .* allowed: cuda, of which each of 4 executors takes one, or cpu",
        ),
        (("--backend-option", "step_log=x"), r"^--backend-option: step_log .* 2 executors would write one file"),
        (("--metrics-port", "65000", "--executors", "64", "--replicas", "9"), r"^--metrics-port: 65000 .* 594 ports"),
    ],
)
def test_what_executors_cannot_have_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan_of(*TWO, *words)


async def test_ready_means_that_every_executor_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(readiness, "PROGRESS_INTERVAL_S", 0.0)
    monkeypatch.setattr(readiness, "_model_if_serving", lambda _: MODEL)
    watch, reports = PulseWatch(0), []
    ends = {name: watch.open(name) for name in ("executor-0", "executor-1")}
    pulses = {name: Pulse(end) for name, end in ends.items()}
    pulses["executor-0"].beat(0.0)

    def report(text: str) -> None:
        reports.append(text)
        if len(reports) == 3:
            pulses["executor-1"].beat(0.0)
        watch.look()

    line = await readiness.wait_until_serving(
        [Target(address="h:1")], tuple(pulses), started=0.0, report=report, has_begun=watch.has_begun
    )
    assert [text.partition(": ")[2] for text in reports] == [
        "no sign of executor-0, executor-1",
        "no sign of executor-1",
        "no sign of executor-1",
    ]
    assert line.startswith("headway is ready on h:1 (model m, b/d/t, 2 executors, ")
    for name, end in ends.items():
        os.close(end)
        watch.close(name)
