"""The group as rank 0 has it: the other ranks' processes, and the socket to them.

Owns: starting, opening and ending them together. Must not know: the scheduler, steps.
"""

import os
import time
from collections.abc import Callable

import zmq

from headway_executor.backend import RankLostError
from headway_executor.config import ExecutorConfig
from headway_executor.host.beside import begun
from headway_executor.host.metrics import GroupFigures
from headway_executor.link_keys import LinkKeys
from headway_executor.rank_place import RankPlace
from headway_executor.rank_processes import surroundings as names
from headway_executor.rank_processes.children import Children
from headway_executor.rank_processes.followers import Followers
from headway_executor.rank_processes.pools import joined
from headway_executor.rank_processes.refusal import REFUSAL_CODES, RankRefusedError, Refusal, exit_code_of
from headway_executor.rank_processes.surroundings import Surroundings, keys_of
from headway_executor.ranks.listener import RanksSocket
from headway_process.free_ports import free_ports
from headway_process.last_words import LAST_WORDS_VARIABLE
from headway_proto.step import BackendInfo
from headway_proto.wording import one_line

_HOST = "127.0.0.1"
_TURN_S = 0.02
_OWN_REFUSAL_S = 0.5
_GOOD_ORDER_S = 3.0
_LAST_FRAMES_S = 0.3


class Group:
    """All other ranks, from their start to their end. See ``process.Companions``."""

    has_ended = False

    def __init__(self, config: ExecutorConfig, around: Surroundings) -> None:
        """Listen, and start the others if nobody else does.

        Raises:
            BackendConfigError, ValueError: address or keys cannot be used.
        """
        self._children: Children | None = None
        self.keys: LinkKeys | None
        """Rank 0's end of every link between ranks."""
        if around.starts_others:
            own, theirs = (zmq.curve_keypair() for _ in range(2))
            self.place, field, address = _with_rendezvous(around.place), "ranks", f"tcp://{_HOST}:*"
            self.keys = LinkKeys(theirs[0], *own)
        else:
            self.place, field, address = around.place, around.field, around.address
            self.keys = keys_of(config, os.environ)
        own_pair = None if self.keys is None else (self.keys.public, self.keys.secret)
        self.socket = RanksSocket(field, address, own_pair, admitted=self.keys.peer if self.keys else b"")
        self.followers = Followers(self.place, self.socket.send)
        if around.starts_others:
            keys = LinkKeys(own[0], *theirs)
            self._children = Children(_variables(self.place, f"tcp://{_HOST}:{self.socket.port}", keys))

    @property
    def figures(self) -> GroupFigures:
        """See ``Companions``."""
        return self.followers.figures

    def turn(self) -> None:
        """Hear what the others say, and see who has ended."""
        while (received := self.socket.receive()) is not None:
            self.followers.hear(*received, time.monotonic())
        ended = None if self._children is None else self._children.ended()
        if ended is None:
            return
        if ended.code in REFUSAL_CODES and self.followers.refusal is None:
            self.followers.refusal = Refusal(f"{ended.in_words}; see above", ended.code)
        self.followers.lose(ended.in_words)

    def open(self, own: Callable[[], BackendInfo]) -> BackendInfo:
        """Open this rank beside the others; return what the scheduler is told. If one cannot, all end.

        Raises:
            RankRefusedError: another rank cannot begin.
            RankLostError: one has ended.
            Exception: of ``own``.
        """
        try:
            return self._open(own)
        except BaseException as error:
            self.give_up(one_line(error), exit_code_of(error))
            raise

    def _open(self, own: Callable[[], BackendInfo]) -> BackendInfo:
        opening = begun(own, name="opening")
        refused_at = float("inf")
        while True:
            self.turn()
            now = time.monotonic()
            self.followers.look(now)
            if opening.done() and opening.exception() is not None:
                opening.result()
            others = self.followers.opened
            if opening.done() and others is not None:
                self.followers.check(opening.result())
            if self.followers.refusal is not None:
                refused_at = min(refused_at, now)
                if opening.done() or now - refused_at > _OWN_REFUSAL_S:  # rank 0's own reason is better
                    raise RankRefusedError(self.followers.refusal)
            elif self.followers.broken:
                raise RankLostError(self.followers.broken)
            elif opening.done() and others is not None:
                return joined({0: opening.result(), **others})
            self.socket.wait(_TURN_S)

    def end(self, close: Callable[[], None]) -> None:
        """End all in good order, while ``close`` closes this rank. Whoever has closed all it had may be killed."""
        self.followers.end()
        close()
        deadline = time.monotonic() + _GOOD_ORDER_S
        while not self.followers.have_left and time.monotonic() < deadline:
            self.turn()
            self.socket.wait(_TURN_S)
        if self._children is not None:
            self._children.kill()
        self.socket.close(linger_s=_LAST_FRAMES_S)

    def leave(self) -> None:
        """End what has not begun. For signal handlers."""
        if self._children is not None:
            self._children.terminate()
            self._children.wait(_LAST_FRAMES_S)
            self._children.kill()

    def give_up(self, reason: str, exit_code: int) -> None:
        """End all, also those that stand still."""
        self.followers.give_up(reason, exit_code)
        if self._children is not None:
            self._children.kill()
        self.socket.close(linger_s=_LAST_FRAMES_S)


def _with_rendezvous(place: RankPlace) -> RankPlace:
    (port,) = free_ports(_HOST, 1)
    return RankPlace(
        tensor_parallel=place.tensor_parallel,
        pipeline_parallel=place.pipeline_parallel,
        rendezvous=f"{_HOST}:{port}",
    )


def _variables(place: RankPlace, address: str, keys: LinkKeys) -> dict[int, dict[str, str]]:
    host, _, port = place.rendezvous.rpartition(":")
    shared = {
        names.WORLD_SIZE: str(place.size),
        names.LOCAL_WORLD_SIZE: str(place.size),
        names.MASTER_ADDR: host,
        names.MASTER_PORT: str(int(port) - names.MEET),
        names.ADDRESS_VARIABLE: address,
        names.KEYS_VARIABLE: " ".join(key.decode() for key in keys),
        LAST_WORDS_VARIABLE: "",
    }
    return {rank: {**shared, names.RANK: str(rank), names.LOCAL_RANK: str(rank)} for rank in range(1, place.size)}
