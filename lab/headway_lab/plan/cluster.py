"""The devices that a plan may use, the degrees of parallelism to search, and what a hand-off moves.

Must not know: schedulers, requests, rates.
"""

from collections.abc import Iterator
from typing import NamedTuple

from headway_lab.simulate.hardware import Accelerator
from headway_lab.simulate.model_shapes import ModelShape
from headway_lab.simulate.roofline import Roofline

DEFAULT_GB_S = {"fast": 50.0, "slow": 3.125}
"""Between nodes: InfiniBand of 400 Gbit/s, and the 25 Gbit/s of DistServe's own cluster (Zhong et al., 2024, 6.1)."""


class Degrees(NamedTuple):
    """How one executor shares the model among devices."""

    tensor_parallel: int
    pipeline_parallel: int = 1

    @property
    def num_devices(self) -> int:
        """The devices of all stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def label(self) -> str:
        """As in tables: ``tp 2 pp 4``."""
        return f"tp {self.tensor_parallel}" + f" pp {self.pipeline_parallel}" * (self.pipeline_parallel > 1)


class Cluster(NamedTuple):
    """Equal nodes with a fast link inside. ``node_bandwidth``: bytes per second from node to node."""

    accelerator: Accelerator
    shape: ModelShape
    most_devices: int
    devices_per_node: int
    most_stages: int
    node_bandwidth: float
    block_size: int

    @property
    def link_bandwidth(self) -> float:
        """Bytes per second inside a node."""
        return self.accelerator.link_bandwidth * self.accelerator.link_share

    def crosses_nodes(self, num_devices: int) -> bool:
        """Whether so many devices take more than one node."""
        return num_devices > self.devices_per_node

    def roofline(self, degrees: Degrees, *, crosses_nodes: bool = False) -> Roofline:
        """Return an executor's costs; with ``crosses_nodes``, each stage sends to the next from node to node."""
        bandwidth = min(self.node_bandwidth, self.link_bandwidth) if crosses_nodes else self.link_bandwidth
        return Roofline(self.accelerator, self.shape, *degrees, stage_bandwidth=bandwidth)

    def nodes_of_pair(self, prefill: Degrees, decode: Degrees) -> int | None:
        """Return the fewest nodes that two executors can share, each with the same part of the layers of both.

        None: they have too many devices for a node's part, or for all.
        """
        num_devices = prefill.num_devices + decode.num_devices
        for num_nodes in _powers_of_two(min(prefill.pipeline_parallel, decode.pipeline_parallel)):
            if num_devices <= min(num_nodes * self.devices_per_node, self.most_devices):
                return num_nodes
        return None

    def all_degrees(self) -> Iterator[Degrees]:
        """Yield powers of two: tensor parallelism within a node, stages that divide the layers."""
        for tensor_parallel in _powers_of_two(min(self.devices_per_node, self.most_devices)):
            for pipeline_parallel in _powers_of_two(min(self.most_stages, self.most_devices // tensor_parallel)):
                if self.shape.num_layers % pipeline_parallel == 0:
                    yield Degrees(tensor_parallel, pipeline_parallel)

    def fitting_degrees(self) -> list[Degrees]:
        """Return the degrees that leave at least one KV block beside the weights."""
        return [degrees for degrees in self.all_degrees() if self.roofline(degrees).num_blocks(self.block_size) >= 1]


class HandOff(NamedTuple):
    """What a request's keys and values weigh, and how long they take at the full bandwidth of a link."""

    num_bytes: int
    seconds: float


def hand_off(shape: ModelShape, num_prompt_tokens: int, bandwidth: float) -> HandOff:
    """Return the ideal cost of handing over a prompt's keys and values at ``bandwidth`` bytes per second.

    There is no protocol, queue or synchronisation in it.
    """
    num_bytes = shape.kv_bytes_per_token() * num_prompt_tokens
    return HandOff(num_bytes, num_bytes / bandwidth)


def _powers_of_two(most: int) -> Iterator[int]:
    value = 1
    while value <= most:
        yield value
        value *= 2
