"""Ray as the engine: it places, heals and counts processes, and carries neither steps, tokens nor blocks.

Each process has an actor that supervises it, in a placement group of one bundle on a node that we choose: so all ranks of
an executor are together. Members have no restarts of their own; the controller makes a new one, since it alone knows the
scheduler's present addresses. Ray restarts the controller, at its head, and it finds the members by name.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from headway.cluster.controller import Controller
from headway.cluster.description import ClusterPlan, Probe, ProcessOrder, loopback_only
from headway.cluster.engine import NoRoomError, PlaceLostError, PlaceSilentError
from headway.cluster.member import Member, Report
from headway.cluster.placing import Node
from headway.flags.settings import ConfigurationError
from headway.planning.cluster_config import ClusterConfig

NAMESPACE = "headway"
_CONTROLLER = "controller"
_HEAD = "node:__internal_head__"
_ROOM_S = 20.0
_LOOK_S = 0.2
_CALL_S = 60.0
_DOWN_S = 3600.0


@ray.remote(num_cpus=0, max_restarts=0)
class MemberActor:
    """A ``Member`` where Ray put it."""

    def __init__(self) -> None:
        _end_with_node()
        self._member = Member(ray.util.get_node_ip_address())

    async def whereabouts(self) -> tuple[str, str]:
        """Return the node and the version of Headway there."""
        return ray.get_runtime_context().get_node_id(), self._member.version()

    async def start(self, order: ProcessOrder, links: dict[str, str]) -> Report:
        """See ``Member``."""
        return await self._member.start(order, links)

    async def stop(self) -> None:
        """See ``Member``."""
        await self._member.stop()

    async def report(self) -> Report:
        """See ``Member``."""
        return self._member.report()

    async def is_serving(self, probe: Probe) -> bool:
        """See ``Member``."""
        return await self._member.is_serving(probe)

    async def status(self, probe: Probe) -> dict[str, Any]:
        """See ``Member``."""
        return await self._member.status(probe)

    async def drain(self, probe: Probe, executor: int, undo: bool) -> str:
        """See ``Member``."""
        return await self._member.drain(probe, executor, undo)


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class ControllerActor:
    """A ``Controller``, by name for every command."""

    def __init__(self, plan: ClusterPlan) -> None:
        _end_with_node()
        self._plan = plan
        self._controller: Controller | None = None

    async def describe(self) -> dict[str, Any]:
        """See ``Controller``."""
        return self._begun().describe()

    async def stop(self) -> None:
        """See ``Controller``."""
        await self._begun().stop()

    def _begun(self) -> Controller:
        if self._controller is None:  # The event loop does not run in the constructor.
            self._controller = Controller(self._plan, RayEngine(self._plan.cluster.name))
            self._controller.begin()
        return self._controller


def _end_with_node() -> None:
    """End this actor's process when that of its node ends, which Ray alone may leave running; its child ends with it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class RayPlace:
    """See ``Place``."""

    def __init__(self, actor: Any, node_id: str) -> None:
        self._actor = actor
        self._node_id = node_id

    @property
    def node_id(self) -> str:
        """The node."""
        return self._node_id

    async def call(self, method: str, *arguments: Any) -> Any:
        """See ``Place``."""
        return await _answer(getattr(self._actor, method).remote(*arguments))


class RayEngine:
    """See ``Engine``."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment

    def nodes(self) -> Sequence[Node]:
        """See ``Engine``."""
        return [
            Node(
                node_id=each["NodeID"],
                address=each["NodeManagerAddress"],
                cpus=each["Resources"].get("CPU", 0.0),
                gpus=each["Resources"].get("GPU", 0.0),
                is_head=_HEAD in each["Resources"],
            )
            for each in ray.nodes()
            if each["Alive"]
        ]

    async def place(self, name: str, node: Node, cpus: float, gpus: int) -> RayPlace:
        """See ``Engine``."""
        full = self._full(name)
        with contextlib.suppress(ValueError):
            return await self._place_of(ray.get_actor(full, NAMESPACE))
        needs = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {})}
        group = placement_group(
            [needs],
            strategy="STRICT_PACK",
            name=full,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": node.node_id}],
        )
        try:
            async with asyncio.timeout(_ROOM_S):
                await group.ready()
        except (TimeoutError, RayError):
            remove_placement_group(group)
            raise NoRoomError(node.node_id) from None
        actor = MemberActor.options(  # type: ignore[attr-defined]  # Ray adds it
            name=full,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=cpus,
            num_gpus=gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
        ).remote()
        return await self._place_of(actor)

    async def remove(self, name: str) -> None:
        """See ``Engine``."""
        full = self._full(name)
        with contextlib.suppress(ValueError, RayError):
            ray.kill(ray.get_actor(full, NAMESPACE), no_restart=True)
        with contextlib.suppress(ValueError, RayError):
            remove_placement_group(get_placement_group(full))

    def _full(self, name: str) -> str:
        return f"{self._deployment}.{name}"

    async def _place_of(self, actor: Any) -> RayPlace:
        node_id, version = await _answer(actor.whereabouts.remote())
        own = Member("").version()
        if version != own:
            raise PlaceLostError(f"node {node_id[:8]} has Headway {version}; allowed: {own}, as on the others")
        return RayPlace(actor, node_id)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayActorError as error:
        kind = PlaceSilentError if type(error).__name__ == "ActorUnavailableError" else PlaceLostError
        raise kind(str(error).splitlines()[0]) from None


class RayDeployment:
    """A deployment on Ray, seen from a command. See ``Deployed``."""

    def __init__(self, controller: Any, end_engine: Callable[[], None]) -> None:
        self._controller = controller
        self._end_engine = end_engine

    def describe(self) -> dict[str, Any]:
        """See ``Deployed``."""
        try:
            found: dict[str, Any] = ray.get(self._controller.describe.remote(), timeout=_CALL_S)
        except (RayError, GetTimeoutError) as error:
            raise ConfigurationError(f"the controller does not answer: {str(error).splitlines()[0]}") from None
        return found

    def leave(self) -> None:
        """See ``Deployed``."""
        ray.shutdown()

    def down(self) -> None:
        """See ``Deployed``."""
        with contextlib.suppress(RayActorError):
            ray.get(self._controller.stop.remote(), timeout=_DOWN_S)
        ray.kill(self._controller, no_restart=True)
        ray.shutdown()
        self._end_engine()


def up(settings: ClusterConfig, plan: ClusterPlan, address: str, end_engine: Callable[[], None]) -> RayDeployment:
    """Begin a deployment; ``end_engine`` ends the Ray that was started for it.

    Raises:
        ConfigurationError: Ray cannot be reached, is open to others, or has a deployment of this name.
    """
    _connect(address)
    with contextlib.suppress(ValueError):
        ray.get_actor(f"{settings.name}.{_CONTROLLER}", NAMESPACE)
        raise ConfigurationError(
            f"name: {settings.name!r} is not allowed; allowed: another, or headway cluster down first, because it runs"
        )
    head = next(node for node in RayEngine(settings.name).nodes() if node.is_head)
    controller = ControllerActor.options(  # type: ignore[attr-defined]  # Ray adds it
        name=f"{settings.name}.{_CONTROLLER}",
        namespace=NAMESPACE,
        lifetime="detached",
        scheduling_strategy=NodeAffinitySchedulingStrategy(head.node_id, soft=False),
    ).remote(plan)
    return RayDeployment(controller, end_engine)


def connect(settings: ClusterConfig, address: str, end_engine: Callable[[], None]) -> RayDeployment:
    """Return the deployment of this name.

    Raises:
        ConfigurationError: there is none.
    """
    _connect(address)
    try:
        controller = ray.get_actor(f"{settings.name}.{_CONTROLLER}", NAMESPACE)
    except ValueError:
        raise ConfigurationError(
            f"name: {settings.name!r} does not run; allowed: one that headway cluster up has started"
        ) from None
    return RayDeployment(controller, end_engine)


def _connect(address: str) -> None:
    try:
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(
            f"address: {address!r} cannot be reached ({reason:.120}); allowed: HOST:PORT of a Ray head, auto where one was "
            "started, or --nodes-here"
        ) from None
    _require_guarded(ray.nodes(), os.environ)


def _require_guarded(nodes: Sequence[Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """Refuse a Ray that strangers could use: whoever reaches its ports runs code as its user."""
    beyond = [each["NodeManagerAddress"] for each in nodes if not loopback_only(f"{each['NodeManagerAddress']}:0")]
    if beyond and environment.get("RAY_AUTH_MODE", "").lower() != "token":
        ray.shutdown()
        raise ConfigurationError(
            f"address: Ray listens on {beyond[0]} without authentication; allowed: loopback alone, or every ray start, and "
            "this command, with RAY_AUTH_MODE=token and the token of the cluster, see docs/cluster.md"
        )
