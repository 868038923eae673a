"""What the controller needs of an engine that runs actors on the nodes of a cluster, and the engines there are."""

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from headway.cluster.placing import Node

ENGINES = {"ray": "headway.cluster.ray_commands"}
"""Modules with ``up`` and ``connect``, as ``EngineCommands`` says, by the name of ``--engine``."""


class PlaceLostError(Exception):
    """The actor, its node or the way to it is gone for good."""


class PlaceSilentError(Exception):
    """The actor cannot be reached just now."""


class NoRoomError(Exception):
    """What was to be reserved on a node is not free there."""


class Place(Protocol):
    """An actor with a ``Member``, on a node, with what it reserves there."""

    @property
    def node_id(self) -> str:
        """The node."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the member.

        Raises:
            PlaceLostError: there is no such actor any more.
            PlaceSilentError: it cannot be reached now.
        """


class Engine(Protocol):
    """Nodes, and actors on them."""

    def nodes(self) -> Sequence[Node]:
        """Return the nodes that live."""

    async def place(self, name: str, node: Node, cpus: float, gpus: int) -> Place:
        """Return the actor of this name; make one on the node if there is none.

        Raises:
            NoRoomError: it cannot be made there.
        """

    async def remove(self, name: str) -> None:
        """End the actor of this name, with its process, and free what it reserved."""


class EngineCommands(Protocol):
    """An engine's module, as the commands use it."""

    def up(self, settings: Any, plan: Any) -> "Deployed":
        """Begin a deployment."""

    def connect(self, settings: Any) -> "Deployed":
        """Return the deployment of this name.

        Raises:
            ConfigurationError: there is none.
        """


class Deployed(Protocol):
    """A deployment that runs."""

    def describe(self) -> dict[str, Any]:
        """Return what ``Controller.describe`` does."""

    def leave(self) -> None:
        """Let go of it; it goes on."""

    def down(self) -> None:
        """End it in order, and all that was started for it."""


def engine_of(name: str) -> EngineCommands:
    """Return an engine's module.

    Raises:
        ModuleNotFoundError: a package is missing.
    """
    return importlib.import_module(ENGINES[name])
