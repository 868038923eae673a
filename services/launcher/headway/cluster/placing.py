"""On which node a process starts. Pure."""

from collections.abc import Mapping, Sequence

import msgspec


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of the cluster, or a part of one. ``cpus`` and ``gpus`` are all that it has."""

    node_id: str
    address: str
    cpus: float
    gpus: float
    is_head: bool = False


class Placed(msgspec.Struct, frozen=True, kw_only=True):
    """A process of this deployment that has a place."""

    node_id: str
    service: str
    cpus: float
    gpus: int


def choose(
    nodes: Sequence[Node],
    placed: Sequence[Placed],
    *,
    service: str,
    cpus: float,
    gpus: int,
    avoid: Mapping[str, float] | None = None,
) -> Node | None:
    """Return the node; None if the process fits nowhere.

    All ranks of an executor share a node. Executors spread: where there are fewest, then where there are fewest
    processes. Scheduler and gateway stay together, at the head: clients know the address of the gateway, and without its
    head the engine cannot go on either. ``avoid`` has nodes where a place was not free just now.
    """
    fitting = [node for node in nodes if node.node_id not in (avoid or {}) and _fits(node, placed, cpus, gpus)]
    if not fitting:
        return None
    if service == "executor":
        return min(fitting, key=lambda node: (*_crowd(node, placed), node.is_head, node.node_id))
    return min(fitting, key=lambda node: (not node.is_head, -_front(node, placed), node.node_id))


def _fits(node: Node, placed: Sequence[Placed], cpus: float, gpus: int) -> bool:
    here = [each for each in placed if each.node_id == node.node_id]
    return sum(each.cpus for each in here) + cpus <= node.cpus and sum(each.gpus for each in here) + gpus <= node.gpus


def _crowd(node: Node, placed: Sequence[Placed]) -> tuple[int, int]:
    here = [each for each in placed if each.node_id == node.node_id]
    return sum(each.service == "executor" for each in here), len(here)


def _front(node: Node, placed: Sequence[Placed]) -> int:
    return sum(each.node_id == node.node_id and each.service != "executor" for each in placed)
