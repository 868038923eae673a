"""When a cluster adds and drains executors, and on which node each process starts."""

import msgspec
import pytest

from headway.cluster.placing import Node, Placed, choose
from headway.cluster.scaling import Figures, Scaler, waiting_s
from headway.planning.cluster_config import ClusterConfig

CONFIG = ClusterConfig(scale_up_wait_s=2.0, scale_up_after_s=3.0, scale_down_after_s=60.0, scale_down_use=0.6)
CALM = Figures(num_wanted=2, num_ready=2, wait_s=0.0, use=0.5)
LATE = Figures(num_wanted=2, num_ready=2, wait_s=2.5, use=1.0)
IDLE = Figures(num_wanted=2, num_ready=2, wait_s=0.0, use=0.1)


def decisions(scaler: Scaler, *figures: tuple[float, Figures]) -> list[int]:
    return [scaler.decide(each, now) for now, each in figures]


def scaler(role: str = "both") -> Scaler:
    return Scaler(1, 3, role, CONFIG)


def test_a_long_wait_adds_one_executor_if_it_lasts() -> None:
    assert decisions(scaler(), (0, LATE), (2.9, LATE), (3, LATE)) == [0, 0, 1]
    assert decisions(scaler(), (0, LATE), (2, CALM), (3, LATE), (5.9, LATE), (6, LATE)) == [0, 0, 0, 0, 1]


def test_after_a_change_the_wish_must_last_anew_and_the_change_must_have_come_true() -> None:
    one = scaler()
    starting = Figures(num_wanted=3, num_ready=2, wait_s=9.0, use=1.0)
    assert decisions(one, (0, LATE), (3, LATE), (3.5, starting), (9, starting)) == [0, 1, 0, 0]
    there = msgspec.structs.replace(IDLE, num_wanted=3, num_ready=3)
    assert decisions(one, (10, there), (69, there), (70, there), (70.5, IDLE), (130, IDLE), (131, IDLE)) == [
        0,
        0,
        -1,
        0,
        0,
        -1,
    ]


def test_bounds_hold() -> None:
    most = msgspec.structs.replace(LATE, num_wanted=3, num_ready=3)
    least = msgspec.structs.replace(IDLE, num_wanted=1, num_ready=1)
    assert decisions(scaler(), (0, most), (100, most)) == [0, 0]
    assert decisions(scaler(), (0, least), (1000, least)) == [0, 0]


@pytest.mark.parametrize(("use", "decision"), [(0.29, -1), (0.3, -1), (0.31, 0)])
def test_one_is_drained_only_if_the_others_stay_below_their_share(use: float, decision: int) -> None:
    figures = msgspec.structs.replace(IDLE, use=use)
    assert decisions(scaler(), (0, figures), (60, figures)) == [0, decision]


def test_an_executor_that_only_decodes_is_added_when_the_others_are_full() -> None:
    assert decisions(scaler("decode"), (0, LATE), (3, LATE)) == [0, 1]
    waiting = msgspec.structs.replace(LATE, use=0.5)
    assert decisions(scaler("decode"), (0, waiting), (3, waiting)) == [0, 0]


@pytest.mark.parametrize(
    ("num_waiting", "tokens", "pace", "rows_free", "expected"),
    [
        (0, 0, 0.0, False, 0.0),
        (4, 400, 100.0, False, 4.0),
        (4, 400, 0.0, True, 0.0),
        (4, 400, 0.0, False, float("inf")),
    ],
)
def test_the_wait_follows_the_pace(
    num_waiting: int, tokens: int, pace: float, rows_free: bool, expected: float
) -> None:
    assert waiting_s(num_waiting, tokens, pace, rows_free) == expected


HEAD = Node(node_id="h", address="10.0.0.1", cpus=4, gpus=0, is_head=True)
LEFT = Node(node_id="l", address="10.0.0.2", cpus=4, gpus=2)
RIGHT = Node(node_id="r", address="10.0.0.3", cpus=4, gpus=2)
NODES = [RIGHT, HEAD, LEFT]


def placed(node: Node, service: str = "executor", cpus: float = 1, gpus: int = 0) -> Placed:
    return Placed(node_id=node.node_id, service=service, cpus=cpus, gpus=gpus)


def test_executors_spread_and_scheduler_and_gateway_stay_at_the_head() -> None:
    assert choose(NODES, [], service="scheduler", cpus=1, gpus=0) == HEAD
    assert choose(NODES, [placed(HEAD, "scheduler")], service="gateway", cpus=1, gpus=0) == HEAD
    assert choose(NODES, [], service="executor", cpus=1, gpus=0) == LEFT
    assert choose(NODES, [placed(LEFT)], service="executor", cpus=1, gpus=0) == RIGHT
    assert choose([LEFT, RIGHT], [placed(RIGHT, "scheduler")], service="gateway", cpus=1, gpus=0) == RIGHT


def test_all_ranks_of_an_executor_fit_on_one_node_or_it_has_no_place() -> None:
    assert choose(NODES, [placed(LEFT, gpus=1)], service="executor", cpus=2, gpus=2) == RIGHT
    both = [placed(LEFT, gpus=1), placed(RIGHT, gpus=1)]
    assert choose(NODES, both, service="executor", cpus=2, gpus=2) is None
    assert choose(NODES, [], service="executor", cpus=5, gpus=0) is None
    assert choose(NODES, [], service="executor", cpus=1, gpus=0, avoid={"l": 1.0, "r": 1.0}) == HEAD
