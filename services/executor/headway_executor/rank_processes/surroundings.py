"""What the environment says about a rank: its place, where rank 0 listens, with which keys, on which cores or device.

Owns: the names of variables, torchrun's among them, and what they may say. Must not know: sockets, processes.

Without RANK, a process is rank 0 and starts the others, which find these variables. With RANK, whoever set it starts
them all.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway_executor.config import CUDA, EXECUTOR_SECRET_KEY, ExecutorConfig
from headway_executor.link_keys import LinkKeys
from headway_executor.rank_place import RankPlace
from headway_process.addresses import check_link_address, is_loopback
from headway_process.link_keys import load_own_keys
from headway_proto.wording import shown

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_RANK = "LOCAL_RANK"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
OF_TORCHRUN = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT)

ADDRESS_VARIABLE = "_HEADWAY_RANKS_ADDRESS"
KEYS_VARIABLE = "_HEADWAY_RANKS_KEYS"
"""Only ranks that rank 0 has started have these two."""

_LAST_PORT = 65535
LISTEN, MEET = 1, 2
"""Ports behind MASTER_PORT, which torchrun itself may use: where rank 0 listens, and where backends meet."""


class Surroundings(NamedTuple):
    """``starts_others``: this is rank 0, and nobody else starts the others. ``address``: rank 0's; "" if there is none
    yet. ``field`` is where it comes from. ``num_local``: ranks of this host that share its cores. ``keys``: of the link
    between ranks, once they are known.
    """

    place: RankPlace
    starts_others: bool = False
    is_child: bool = False
    field: str = ""
    address: str = ""
    local_rank: int = 0
    num_local: int = 1
    keys: LinkKeys | None = None


def surroundings_of(config: ExecutorConfig, environment: Mapping[str, str]) -> Surroundings:
    """Read and check the variables.

    Raises:
        ValueError: one line with a variable, its value and what is allowed.
    """
    place = RankPlace(
        tensor_parallel=config.tensor_parallel,
        pipeline_parallel=config.pipeline_parallel,
    )
    if RANK not in environment:
        return Surroundings(place, starts_others=not place.is_alone, num_local=place.size)
    size = _number(environment, WORLD_SIZE, least=1, most=_LAST_PORT)
    if size != place.size:
        raise ValueError(
            f"{WORLD_SIZE}: {size} is not allowed; allowed: {place.size}, which is tensor_parallel {place.tensor_parallel} "
            f"times pipeline_parallel {place.pipeline_parallel}"
        )
    rank = _number(environment, RANK, least=0, most=size - 1)
    if place.is_alone:
        return Surroundings(place)
    num_local = _number(environment, LOCAL_WORLD_SIZE, least=1, most=size, default=1)
    host, port = _text(environment, MASTER_ADDR), _number(environment, MASTER_PORT, least=1, most=_LAST_PORT - MEET)
    own = environment.get(ADDRESS_VARIABLE, "")
    field, address = MASTER_ADDR, own or f"tcp://{host}:{port + LISTEN}"
    if config.ranks_address:
        field, address = "ranks_address", own or config.ranks_address
    _check_reachable(field, address, has_keys=bool(config.curve_keys))
    return Surroundings(
        RankPlace(
            rank=rank,
            tensor_parallel=place.tensor_parallel,
            pipeline_parallel=place.pipeline_parallel,
            rendezvous=f"{'127.0.0.1' if host == 'localhost' else host}:{port + MEET}",
        ),
        is_child=bool(own),
        field=field,
        address=address,
        local_rank=_number(environment, LOCAL_RANK, least=0, most=num_local - 1, default=0),
        num_local=num_local,
    )


def keys_of(config: ExecutorConfig, environment: Mapping[str, str]) -> LinkKeys | None:
    """The keys with which this rank reaches rank 0, or is reached; None: the link is plain.

    Raises:
        ValueError: the key files cannot be used.
    """
    given = environment.get(KEYS_VARIABLE, "").split()
    if given:
        return LinkKeys(*(key.encode() for key in given))
    if not config.curve_keys:
        return None
    public, secret = load_own_keys(Path(config.curve_keys), EXECUTOR_SECRET_KEY)
    return LinkKeys(public, public, secret)


def take_cores(config: ExecutorConfig, around: Surroundings) -> int:
    """Share this host's cores among its ranks, where threads are chosen automatically; return ``num_threads``.

    Each rank keeps to its equal share. With fewer cores than ranks, each uses one thread.
    """
    if around.num_local == 1 or config.num_threads or config.device != "cpu" or not hasattr(os, "sched_setaffinity"):
        return config.num_threads
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // around.num_local
    if not each:
        return 1
    os.sched_setaffinity(0, cores[around.local_rank * each : (around.local_rank + 1) * each])
    return 0


def own_device(config: ExecutorConfig, around: Surroundings) -> str:
    """This rank's device: of ``cuda``, the one of this host with its number there."""
    return f"{CUDA}:{around.local_rank}" if config.device == CUDA and not around.place.is_alone else config.device


def _check_reachable(field: str, address: str, *, has_keys: bool) -> None:
    if not has_keys and not is_loopback(address.removeprefix("tcp://").rpartition(":")[0]):
        raise ValueError(
            f"{field}: {shown(address)} is not allowed; allowed: a loopback address, or any address together with curve_keys"
        )
    check_link_address(field, address, has_keys=has_keys)


def _text(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name, "")
    if not value:
        raise ValueError(f"{name}: '' is not allowed together with {RANK}; allowed: as torchrun sets it")
    return value


def _number(environment: Mapping[str, str], name: str, *, least: int, most: int, default: int | None = None) -> int:
    value = environment.get(name, "" if default is None else str(default))
    if not (value.isascii() and value.isdigit() and len(value) <= 5 and least <= int(value) <= most):
        raise ValueError(f"{name}: {shown(value)} is not allowed; allowed: {least} to {most}, as torchrun sets it")
    return int(value)
