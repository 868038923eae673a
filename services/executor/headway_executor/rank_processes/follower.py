"""Any rank but rank 0, from its start to its end.

Owns: the connection to rank 0 while this rank opens and when it ends. Must not know: steps, the scheduler.
"""

import os
import time
from collections.abc import Callable

from headway_executor.backend import RankLostError
from headway_executor.config import ExecutorConfig
from headway_executor.host.beside import begun
from headway_executor.links.channel import DealerChannel
from headway_executor.rank_processes.agreed_store import AgreedStore
from headway_executor.rank_processes.following_link import FollowingLink
from headway_executor.rank_processes.refusal import REFUSAL_CODES, RankRefusedError, Refusal, exit_code_of
from headway_executor.rank_processes.surroundings import Surroundings, keys_of
from headway_executor.rank_processes.watched_backend import WatchedBackend
from headway_proto.step import BackendInfo
from headway_proto.wording import one_line

_TURN_S = 0.02
_UNHEARD_REFUSAL_S = 5.0
_LAST_FRAMES_S = 0.3


class Follower:
    """See ``process.Companions``."""

    figures = None

    def __init__(self, config: ExecutorConfig, around: Surroundings) -> None:
        """Connect to rank 0.

        Raises:
            ValueError, zmq.ZMQError: keys or address cannot be used.
        """
        self.place = around.place
        self.keys = keys_of(config, os.environ)
        """This rank's end of every link between ranks."""
        self.channel = DealerChannel(around.address, self.keys)
        self.link = FollowingLink(around.place)

    @property
    def has_ended(self) -> bool:
        """Whether rank 0 has ended in good order."""
        return self.link.has_ended

    def open(self, own: Callable[[], BackendInfo]) -> BackendInfo:
        """Open this rank, and show life meanwhile.

        Raises:
            RankLostError: rank 0 has ended.
            RankRefusedError: another rank cannot begin, or this one, which rank 0 knows.
        """
        opening = begun(own, name="opening")
        failed_at = float("inf")
        while True:
            now = time.monotonic()
            while (frame := self.channel.receive()) is not None:
                self.link.receive(frame, now)
            self._send(self.link.tick(now).frames)
            if self.link.exit_code in REFUSAL_CODES:
                raise RankRefusedError(Refusal(f"rank 0: {self.link.broken}", self.link.exit_code))
            if self.link.broken:
                raise RankLostError(self.link.broken)
            error = opening.exception() if opening.done() else None
            if error is not None:
                failed_at = min(failed_at, now)
                has_reason = self.link.was_heard and not isinstance(error, RankLostError)  # else rank 0's is better
                if has_reason or now - failed_at > _UNHEARD_REFUSAL_S:
                    self._send(self.link.refuse(one_line(error), exit_code_of(error)))
                    self.channel.close(linger_s=_LAST_FRAMES_S)
                    raise RankRefusedError(Refusal(one_line(error), exit_code_of(error))) from error
            elif opening.done() and self.link.was_heard:
                return opening.result()
            self.channel.wait(_TURN_S)

    def attach(self, store: AgreedStore, backend: WatchedBackend, info: BackendInfo) -> None:
        """Tell rank 0 that steps may come."""
        self._send(self.link.attach(store, backend, info))

    def turn(self) -> None:
        """See ``Companions``: all that comes is the link's."""

    def leave(self) -> None:
        """See ``Companions``."""

    def give_up(self, reason: str, exit_code: int) -> None:
        """See ``Companions``: the cycle has told rank 0."""
        del reason, exit_code
        self.channel.close(linger_s=_LAST_FRAMES_S)

    def end(self, close: Callable[[], None]) -> None:
        """See ``Companions``."""
        close()
        self._send(self.link.leave("it has ended" if self.link.has_ended else "it was told to end"))

    def _send(self, frames: list[bytes]) -> None:
        for frame in frames:
            self.channel.send(frame)
