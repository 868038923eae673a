"""``serve --replicas``: what each replica has of its own, what they share, and what is refused."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

import headway.planning.plan
from headway.__main__ import parser_of
from headway.flags.configuration import Given
from headway.flags.settings import ConfigurationError
from headway.planning.plan import Plan, make_plan
from headway.planning.replicas import Layout, Member
from headway.running.processes import ChildExited, Children
from headway.running.pulse_watch import PulseWatch
from headway_process.fleet_numbers import REPLICA_VARIABLE, fleet_fields

THREE = ("--replicas", "3", "--grpc-address", "127.0.0.1:50900")


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headway.planning.plan, "_own_cores", lambda: [0, 1])


def plan_of(*words: str) -> Plan:
    return make_plan(parser_of("serve").parse(words), {}, Path("/run/x"))


def flag_of(plan: Plan, name: str, flag: str) -> str:
    (value,) = (word.partition("=")[2] for word in plan.commands[name] if word.startswith(f"{flag}="))
    return value


def test_each_replica_is_complete_and_its_processes_have_a_name_a_port_and_links_of_their_own() -> None:
    plan = plan_of(*THREE)
    assert plan.start_order == [
        f"{name}-{index}" for name in ("executor", "scheduler", "gateway") for index in range(3)
    ]
    assert [target.address for target in plan.targets] == [f"127.0.0.1:{port}" for port in (50900, 50901, 50902)]
    for index, target in enumerate(plan.targets):
        assert flag_of(plan, f"gateway-{index}", "--grpc-address") == target.address
        for link, ends in (("step", ("scheduler", "executor")), ("ingress", ("scheduler", "gateway"))):
            for end in ends:
                address = flag_of(plan, f"{end}-{index}", f"--{link}-address")
                assert address == f"ipc:///run/x/{link}-{index}"
    for name in plan.start_order:
        assert plan.environments[name] == {REPLICA_VARIABLE: name.rpartition("-")[2]}
        assert fleet_fields(plan.environments[name]) == {"replica": int(name.rpartition("-")[2])}


def test_one_replica_is_served_as_ever() -> None:
    plan = plan_of("--replicas", "1", "--flight-log", "log", "--device", "cuda:1")
    assert plan.start_order == ["executor", "scheduler", "gateway"]
    assert flag_of(plan, "scheduler", "--flight-log") == "log"
    assert flag_of(plan, "executor", "--device") == "cuda:1"
    assert plan.environments == plan.cores == {}
    assert fleet_fields({}) == {}


def test_port_0_is_another_free_port_for_each() -> None:
    plan = plan_of("--replicas", "3", "--grpc-address", "127.0.0.1:0")
    addresses = [flag_of(plan, f"gateway-{index}", "--grpc-address") for index in range(3)]
    assert addresses == [target.address for target in plan.targets]
    assert len({*addresses, "127.0.0.1:0"}) == 4


def test_each_gateway_has_a_port_for_openais_clients() -> None:
    plan = plan_of(*THREE, "--http-address", "127.0.0.1:8000")
    assert [flag_of(plan, f"gateway-{index}", "--http-address") for index in range(3)] == [
        f"127.0.0.1:{port}" for port in (8000, 8001, 8002)
    ]
    assert plan.http_urls == tuple(f"http://127.0.0.1:{port}/v1" for port in (8000, 8001, 8002))
    assert len(set(plan_of("--replicas", "2", "--http-address", "127.0.0.1:0").http_urls)) == 2
    with pytest.raises(ConfigurationError, match=r"^--http-address: port 50901 .* because --grpc-address has it"):
        plan_of(*THREE, "--http-address", "127.0.0.1:50901")
    assert plan_of(*THREE).http_urls == ()


def test_every_process_of_every_replica_has_a_port_for_its_metrics() -> None:
    plan = plan_of(*THREE, "--metrics-port", "9464", "--workers", "2")
    ports = {name: int(flag_of(plan, name, "--metrics-address").rpartition(":")[2]) for name in plan.start_order}
    assert [ports[f"{name}-1"] for name in ("scheduler", "executor", "gateway")] == [9468, 9469, 9470]
    taken = [*ports.values(), *(ports[f"gateway-{index}"] + 1 for index in range(3))]
    assert sorted(taken) == list(range(9464, 9464 + 12))


def test_flight_logs_and_devices_are_derived() -> None:
    plan = plan_of(*THREE, "--flight-log", "logs/run", "--device", "cuda")
    for index in range(3):
        assert flag_of(plan, f"scheduler-{index}", "--flight-log") == f"logs/run/replica-{index}"
        assert flag_of(plan, f"executor-{index}", "--device") == f"cuda:{index}"


def test_cores_are_shared_out_where_there_are_two_for_each_and_otherwise_an_executor_computes_in_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert flag_of(plan_of(*THREE), "executor-2", "--num-threads") == "1"
    assert plan_of(*THREE).cores == {}
    assert flag_of(plan_of(*THREE, "--num-threads", "2"), "executor-2", "--num-threads") == "2"
    monkeypatch.setattr(headway.planning.plan, "_own_cores", lambda: list(range(10, 18)))
    plan = plan_of(*THREE)
    assert plan.cores == {"executor-0": {10, 11}, "executor-1": {12, 13}, "executor-2": {14, 15}}
    assert not any(word.startswith("--num-threads") for word in plan.commands["executor-0"])
    assert plan_of(*THREE, "--num-threads", "2").cores == plan_of(*THREE, "--device", "cuda").cores == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--replicas", "0"), r"^--replicas: '0' is not allowed; allowed: a whole number, at least 1, at most 64"),
        (
            ("--grpc-address", "127.0.0.1:65534"),
            r"^--grpc-address: .* allowed: a port of at most 65533, because each of 3",
        ),
        (("--grpc-address", "127.0.0.1:65536"), r"^--grpc-address: .* allowed: HOST:PORT with a port from 0 to 65535"),
        (("--grpc-address", "256.0.0.1:0"), r"^--grpc-address: '256.0.0.1:0' cannot be bound"),
        (("--metrics-port", "65000", "--workers", "64"), None),
        (
            ("--metrics-port", "65000", "--workers", "64", "--replicas", "9"),
            r"^--metrics-port: 65000 .* at most 64942, .* 594",
        ),
        (("--metrics-port", "50052"), r"^--metrics-port: port 50052 is not allowed; .* because --grpc-address has it"),
        (
            ("--device", "cuda:1"),
            r"^--device: 'cuda:1' is not allowed; allowed: cuda, of which each of 3 replicas takes one",
        ),
        (
            ("--backend-option", "step_log=x"),
            r"^--backend-option: step_log is not allowed; .* 3 replicas would write one",
        ),
        (("--flight-log", "x", "--block-size", "12"), r"^--block-size: 12 is not allowed"),
        (("--metrics-port", "9464", "--workers", "0"), r"^--workers: .*0.* is not allowed"),
    ],
)
def test_what_replicas_cannot_have_is_refused(words: tuple[str, ...], message: str | None) -> None:
    if message is None:
        plan_of("--replicas", "3", *words)
        return
    with pytest.raises(ConfigurationError, match=message):
        plan_of("--replicas", "3", *words)


def test_smg_has_every_replica_and_a_port_of_its_own() -> None:
    pytest.importorskip("smg", reason="needs smg: the extra smg")
    pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine: the extra smg")
    plan = plan_of(*THREE, "--openai-address", "127.0.0.1:30000", "--kv-events")
    words = plan.commands["smg"]
    assert words[4] == "127.0.0.1:50900,127.0.0.1:50901,127.0.0.1:50902"
    first = words.index("--worker-urls") + 1
    assert words[first : first + 3] == [f"grpc://{target.address}" for target in plan.targets]
    assert words[first + 3].startswith("--")
    assert plan.start_order[-1] == "smg"
    assert list(plan.stop_stages[0]) == ["smg"]
    assert list(plan.stop_stages[1]) == ["gateway-0", "gateway-1", "gateway-2"]
    assert all("--kv-events" in plan.commands[f"gateway-{index}"] for index in range(3))
    with pytest.raises(ConfigurationError, match=r"^--openai-address: port 50902 .* because --grpc-address has it"):
        plan_of(*THREE, "--openai-address", "127.0.0.1:50902")


def test_an_address_on_every_interface_takes_the_port_from_all() -> None:
    with pytest.raises(ConfigurationError, match=r"^--metrics-port: port 50900"):
        plan_of("--grpc-address", "0.0.0.0:50900", "--allow-insecure-bind", "--metrics-port", "50900")


def test_a_setting_that_is_not_given_is_not_derived() -> None:
    given = {"max_num_seqs": Given(3, "--max-num-seqs")}
    assert Member("executor", 1, layout=Layout(2)).of_its_own(given) == given


async def test_a_child_keeps_to_the_cores_that_it_is_given(tmp_path: Path) -> None:
    one = min(os.sched_getaffinity(0))
    told = tmp_path / "cores"
    program = f"import os, time; time.sleep(0.2); open({str(told)!r}, 'w').write(str(os.sched_getaffinity(0)))"
    ended: asyncio.Queue[ChildExited] = asyncio.Queue()
    commands = {"a": [sys.executable, "-c", program]}
    children = Children(commands, {"a": dict(os.environ)}, {"a": {one}}, ended.put_nowait, PulseWatch(0))
    await children.start("a")
    assert await ended.get() == ChildExited("a", 0)
    assert told.read_text() == str({one})
