"""Ranks of one host that meet by torch.distributed, and send each other messages over gloo.

Owns: the rendezvous on loopback. Must not know: models, steps, who shares memory.

The rendezvous, gloo and NCCL ask nobody for a key, so they stay on this host's loopback.
"""

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from headway_executor.backend import BackendConfigError
from headway_executor.rank_place import RankPlace
from headway_proto.wording import one_line, shown

_ANSWER_SECONDS = 24 * 3600.0
"""Others end a rank that waits in vain; this bound is only for ranks that nobody watches."""

# Its types are incomplete.
_untyped: Any = torch.distributed


class GlooExchange:
    """See ``Exchange``."""

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks = ranks

    def gather(self, own: Tensor) -> list[Tensor]:
        """See ``Exchange.gather``."""
        parts = [torch.empty_like(own) for _ in range(self._ranks.size())]
        self._ranks.allgather([parts], [own]).wait()
        return parts

    def add_up(self, own: Tensor) -> Tensor:
        """See ``Exchange.add_up``."""
        total = own.clone()
        self._ranks.allreduce([total]).wait()
        return total

    def most(self, own: Tensor) -> Tensor:
        """See ``Exchange.most``."""
        agreed = own.clone()
        options = _untyped.AllreduceOptions()
        options.reduceOp = _untyped.ReduceOp.MAX
        self._ranks.allreduce([agreed], options).wait()
        return agreed

    def send(self, message: Tensor, other: int, tag: int) -> Work:
        """See ``Exchange.send``."""
        return self._ranks.send([message], other, tag)

    def receive(self, message: Tensor, other: int, tag: int) -> None:
        """See ``Exchange.receive``."""
        self._ranks.recv([message], other, tag).wait()


class GlooMeeting:
    """See ``Meeting``.

    Raises:
        BackendConfigError: the rendezvous is not on loopback, or the others did not come.
    """

    def __init__(self, place: RankPlace, join_seconds: float) -> None:
        self._place = place
        self._store = _join(place, join_seconds)

    def all_ranks(self) -> GlooExchange:
        """See ``Meeting.all_ranks``."""
        return self._exchange("ranks", self._place.rank, self._place.size)

    def stage(self) -> GlooExchange:
        """See ``Meeting.stage``."""
        place = self._place
        return self._exchange(f"stage {place.stage}", place.tensor_rank, place.tensor_parallel)

    def devices_of_stage(self) -> Any:
        """A torch.distributed.ProcessGroupNCCL of the GPUs of this rank's stage."""
        place = self._place
        # NCCL asks nobody for a key either, and would listen on another interface.
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store = _untyped.PrefixStore(f"devices of stage {place.stage}", self._store)
        return _untyped.ProcessGroupNCCL(
            store, place.tensor_rank, place.tensor_parallel, _untyped.ProcessGroupNCCL.Options()
        )

    def tell(self, name: str, text: str) -> None:
        """Let the others know ``text``."""
        self._store.set(name, text)

    def told(self, name: str) -> str:
        """What another rank told; wait for it. Raises ``RuntimeError``: it tells nothing."""
        text: str = self._store.get(name).decode()
        return text

    def close(self) -> None:
        """See ``Meeting.close``: all ends with its last owner."""

    def _exchange(self, name: str, rank: int, size: int) -> GlooExchange:
        """Without torch's process-wide group: this one ends with its owner."""
        options = _untyped.ProcessGroupGloo._Options()  # noqa: SLF001 - torch has no public name for them
        options._devices = [_untyped.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
        options._timeout = timedelta(seconds=_ANSWER_SECONDS)  # noqa: SLF001
        return GlooExchange(_untyped.ProcessGroupGloo(_untyped.PrefixStore(name, self._store), rank, size, options))


def _join(place: RankPlace, join_seconds: float) -> Any:
    host, port = _address_of(place.rendezvous)
    limit = timedelta(seconds=join_seconds)
    try:
        # A store of its own making would listen on every address of this host.
        listener = _listener(host, port) if place.rank == 0 else None
        store = _untyped.TCPStore(
            host,
            port,
            place.size,
            is_master=place.rank == 0,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        store.set(f"rank {place.rank}", "here")
        store.wait([f"rank {rank}" for rank in range(place.size)], limit)
    except (OSError, RuntimeError) as error:
        reason = one_line(error)
        raise BackendConfigError(
            f"rendezvous {shown(place.rendezvous)}: rank {place.rank} did not meet the other {place.size - 1} within "
            f"{join_seconds:g} s ({reason:.120}); allowed: an address of this host that all ranks have"
        ) from error
    return store


def _listener(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
        return listener.detach()


def _address_of(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    try:
        is_loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise BackendConfigError(
            f"rendezvous {shown(rendezvous)} is not allowed; gloo and shared memory ask nobody for a key, so allowed: "
            "127.0.0.1:PORT, or rank_transport zmq"
        )
    return host, int(port)
