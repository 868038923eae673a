"""The controller against an engine of the tests: who is placed where and when, what follows a loss, and the order of the end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import headway.cluster.controller
from headway.__main__ import parser_of
from headway.cluster.command import _plan
from headway.cluster.controller import Controller
from headway.cluster.engine import PlaceLostError
from headway.cluster.member import Report
from headway.cluster.placing import Node
from headway.planning.cluster_config import ClusterConfig
from headway.planning.deployment import read_deployment

NODES = [Node(node_id=name, address=f"10.0.0.{n}", cpus=4, gpus=0, is_head=n == 0) for n, name in enumerate("hab")]
LINKS = {"step_address": "tcp://10.0.0.0:1", "ingress_address": "tcp://10.0.0.0:2"}


class FakePlace:
    """A member that runs at once, and answers for the scheduler as the test says."""

    def __init__(self, engine: "FakeEngine", name: str, node: Node) -> None:
        self.engine, self.name, self.node_id, self.is_lost = engine, name, node.node_id, False
        self.links: dict[str, str] = {}

    async def call(self, method: str, *arguments: Any) -> Any:
        if self.is_lost:
            raise PlaceLostError(self.name)
        self.engine.calls.append((self.name, method))
        match method:
            case "start":
                self.links = self.engine.links if self.name == "scheduler" else arguments[1]
                return self.report()
            case "report":
                return self.report()
            case "is_serving":
                return True
            case "status":
                return self.engine.figures
            case "drain":
                number, undo = arguments[1:]
                self.engine.figures["executors"][number]["is_draining"] = not undo
                return ""
        return None

    def report(self) -> Report:
        return Report(
            process_id=1, restarts=0, has_begun=True, links=self.links, exit_code=self.engine.exit_code.get(self.name),
            reason="headway executor: model: 'x' is not allowed; allowed: y",
        )  # fmt: skip


class FakeEngine:
    def __init__(self) -> None:
        self.alive = list(NODES)
        self.places: dict[str, FakePlace] = {}
        self.calls: list[tuple[str, str]] = []
        self.removed: list[str] = []
        self.links = dict(LINKS)
        self.exit_code: dict[str, int] = {}
        self.figures: dict[str, Any] = {}

    def nodes(self) -> list[Node]:
        return self.alive

    async def place(self, name: str, node: Node, cpus: float, gpus: int) -> FakePlace:
        self.places[name] = FakePlace(self, name, node)
        return self.places[name]

    async def remove(self, name: str) -> None:
        self.removed.append(name)

    def show(self, *, waiting: int, running: dict[int, int]) -> None:
        drained = {n: each["is_draining"] for n, each in self.figures.get("executors", {}).items()}
        self.figures = {
            "num_waiting": waiting,
            "num_waiting_tokens": waiting * 1000,
            "prompt_tokens_per_s": 100.0,
            "executors": {
                n: {"state": "ready", "is_draining": drained.get(n, False), "num_running": rows, "num_waiting": 0, "kv_usage": 0.0}
                for n, rows in running.items()
            },
        }  # fmt: skip


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    monkeypatch.setattr(headway.cluster.controller, "TICK_S", 0.001)
    monkeypatch.setattr(headway.cluster.controller, "_FIRST_DELAY_S", 0.001)
    return FakeEngine()


def controller_of(engine: FakeEngine, tmp_path: Path, tables: str = "[[executors]]\ncount = 2") -> Controller:
    file = tmp_path / "d.toml"
    file.write_text(f"[executor]\nbackend = 'simulated'\n{tables}")
    deployment = read_deployment(parser_of("serve").parse(["--config", str(file)]), {})
    settings = ClusterConfig(scale_up_wait_s=1.0, scale_up_after_s=0.0, scale_down_after_s=0.0)
    controller = Controller(_plan(deployment, settings), engine)
    controller.begin()
    return controller


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # nothing tells the test
            await asyncio.sleep(0.001)


async def test_executors_spread_and_get_the_links_of_the_scheduler(engine: FakeEngine, tmp_path: Path) -> None:
    controller = controller_of(engine, tmp_path)
    await until(lambda: controller.describe()["is_ready"])
    assert {name: place.node_id for name, place in engine.places.items()} == {
        "scheduler": "h", "gateway": "h", "executor-0": "a", "executor-1": "b",
    }  # fmt: skip
    assert all(place.links == LINKS for place in engine.places.values())
    await controller.stop()
    stopped = [name for name, method in engine.calls if method == "stop"]
    assert stopped == ["gateway", "scheduler", "executor-0", "executor-1"]
    assert controller.describe()["processes"] == []


async def test_what_is_lost_with_its_node_comes_back_on_another(engine: FakeEngine, tmp_path: Path) -> None:
    controller = controller_of(engine, tmp_path)
    await until(lambda: controller.describe()["is_ready"])
    lost = engine.places["executor-1"]
    engine.alive = NODES[:2]
    lost.is_lost = True
    await until(lambda: engine.places["executor-1"] is not lost and controller.describe()["is_ready"])
    assert engine.places["executor-1"].node_id == "h", "fewer executors than on a"
    assert "executor-1" in engine.removed
    assert [each["restarts"] for each in controller.describe()["processes"]] == [0, 0, 0, 1]
    await controller.stop()


async def test_a_scheduler_with_other_links_gives_them_to_all(engine: FakeEngine, tmp_path: Path) -> None:
    controller = controller_of(engine, tmp_path)
    await until(lambda: controller.describe()["is_ready"])
    engine.links = {name: address.replace("10.0.0.0", "10.0.0.1") for name, address in LINKS.items()}
    engine.places["scheduler"].is_lost = True
    await until(lambda: all(place.links == engine.links for place in engine.places.values()))
    await controller.stop()


async def test_a_process_that_refuses_its_settings_is_not_tried_again(engine: FakeEngine, tmp_path: Path) -> None:
    engine.exit_code["executor-0"] = 2
    controller = controller_of(engine, tmp_path)
    await until(lambda: controller.describe()["refusal"])
    assert controller.describe()["refusal"].startswith("headway executor: model: 'x' is not allowed")
    starts = engine.calls.count(("executor-0", "start"))
    await asyncio.sleep(0.05)
    assert engine.calls.count(("executor-0", "start")) == starts == 1
    await controller.stop()


async def test_it_adds_an_executor_while_requests_wait_and_drains_it_before_it_ends(
    engine: FakeEngine, tmp_path: Path
) -> None:
    engine.show(waiting=0, running={0: 1})
    controller = controller_of(engine, tmp_path, "[[executors]]\nmin = 1\nmax = 2")
    await until(lambda: controller.describe()["is_ready"])
    assert "executor-1" not in engine.places
    engine.show(waiting=9, running={0: 256})
    await until(lambda: "executor-1" in engine.places)
    engine.show(waiting=0, running={0: 1, 1: 1})
    await until(lambda: ("gateway", "drain") in engine.calls)
    await asyncio.sleep(0.02)
    assert ("executor-1", "stop") not in engine.calls, "it has a request left"
    engine.show(waiting=0, running={0: 1, 1: 0})
    await until(lambda: ("executor-1", "stop") in engine.calls)
    await until(lambda: len(controller.describe()["processes"]) == 3)
    await controller.stop()


async def test_an_error_of_the_engine_ends_nothing(engine: FakeEngine, tmp_path: Path) -> None:
    nodes, engine.nodes = engine.nodes, lambda: 1 / 0  # type: ignore[method-assign]
    controller = controller_of(engine, tmp_path)
    await until(lambda: any("ZeroDivisionError" in line for line in controller.describe()["events"]))
    engine.nodes = nodes  # type: ignore[method-assign]
    await until(lambda: controller.describe()["is_ready"])
    await controller.stop()
