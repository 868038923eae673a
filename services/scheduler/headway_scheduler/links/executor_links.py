"""The links of all executors: which of them a frame belongs to, and which cell a new executor gets.

Owns: that choice. Must not know: what events mean to a core, or what carries frames.

With one cell, a second executor is a spare: it joins when the first is gone. With more, it joins beside the first, up to
``most``; then it is a spare as well. One that asks for a number gets that cell if it is free, so that its process and
its cell have one name. One that has the host pool of an executor that is gone gets the cell with the books of that pool.
All executors must run the same model.
"""

from headway_proto.framing import FramingError
from headway_proto.step import (
    BackendInfo,
    ExecutorHello,
    SchedulerHeartbeat,
    scheduler_frame_reader,
    scheduler_frame_writer,
)
from headway_proto.wording import shown
from headway_scheduler.links.executor_link import EpochNumbers, ExecutorLink, ExecutorRefused, StepEvent

_MUST_AGREE = ("model_fingerprint", "vocab_size", "max_model_len")


class ExecutorLinks:
    """One link per cell; the first always exists. ``outgoing`` has the frames of all, as (peer, frame)."""

    def __init__(self, incarnation: int, most: int) -> None:
        self.outgoing: list[tuple[bytes, bytes]] = []
        self._incarnation = incarnation
        self._most = most
        self._epochs = EpochNumbers(incarnation)
        self._links = [ExecutorLink(incarnation, 0, self.outgoing, self._epochs)]
        self._by_peer: dict[bytes, ExecutorLink] = {}
        self._reader = scheduler_frame_reader()
        self._writer = scheduler_frame_writer()
        """For executors without a link; the frames of each link are numbered."""
        self._refused = 0
        """The executor that was refused last."""
        self._model: BackendInfo | None = None
        self._tick_at = float("-inf")
        """The time of the next heartbeat of any link."""

    def __getitem__(self, number: int) -> ExecutorLink:
        return self._links[number]

    @property
    def num_damaged_frames(self) -> int:
        """Frames that could not be read."""
        return sum(link.num_damaged_frames for link in self._links)

    @property
    def next_deadline(self) -> float:
        """The time of the next call of ``tick``."""
        return self._links[0].next_deadline if len(self._links) == 1 else self._tick_at

    def receive(self, peer: bytes, data: bytes, now: float) -> tuple[int, list[StepEvent]]:
        """Take one frame in. Return the number of its cell, and what follows for it."""
        link = self._by_peer.get(peer)
        if link is not None and link.peer == peer:
            return link.number, link.receive(peer, data, now)
        found = self._links[0] if self._most == 1 else self._link_for(peer, data, now)
        if not isinstance(found, ExecutorLink):
            return 0, found
        events = found.receive(peer, data, now)
        if found.peer == peer:
            self._by_peer = {link.peer: link for link in self._links if link.peer is not None}
        return found.number, events

    def unreachable(self, peer: bytes) -> tuple[int, list[StepEvent]]:
        """The transport could not reach ``peer``."""
        link = self._by_peer.get(peer, self._links[0])
        return link.number, link.unreachable(peer)

    def tick(self, now: float) -> list[tuple[int, list[StepEvent]]]:
        """Send the heartbeats that are due, and detect silence. Return the links' numbers, and what follows for them."""
        if len(self._links) == 1:
            events = self._links[0].tick(now)
            return [(0, events)] if events else []
        if now < self._tick_at:
            return []
        found = [(link.number, events) for link in self._links if (events := link.tick(now))]
        self._tick_at = min([link.next_deadline for link in self._links])
        return found

    def executors_run(self, info: BackendInfo) -> None:
        """An executor has joined: others that join must run the same model."""
        self._model = info

    def _link_for(self, peer: bytes, data: bytes, now: float) -> ExecutorLink | list[StepEvent]:
        """The link for a frame of a peer that no link uses, or the events instead if its executor gets none now."""
        try:
            body = self._reader.decode(data).body
        except FramingError:
            return self._links[0]  # which counts it
        if not isinstance(body, ExecutorHello):
            if self._spare(now) is not None or len(self._links) < self._most:
                self._ask_for_hello(peer)
            return []
        for link in self._links:
            if link.executor == body.incarnation:
                return link
        others = [link for link in self._links if link.is_open and not link.may_be_taken_over(now)]
        if others and self._differs(body.info):
            return self._refuse(body)
        wanted = self._numbered(body.number, now) or self._with_pool(body.info.host_pool)
        if wanted is not None and wanted.may_be_taken_over(now):
            return wanted
        spare = self._spare(now)
        if (spare is None or spare.is_open) and len(self._links) < self._most:
            # Rather than the link of an executor that is silent: it may only be slow.
            spare = self._add_link(now)
        return spare or self._links[0]

    def _numbered(self, number: int, now: float) -> ExecutorLink | None:
        """The link of the cell that an executor asks for, if there may be such a cell."""
        if not 0 <= number < self._most:
            return None
        while len(self._links) <= number:
            self._add_link(now)
        return self._links[number]

    def _with_pool(self, host_pool: str) -> ExecutorLink | None:
        """The link of the executor that had this host pool."""
        return next((link for link in self._links if host_pool and link.host_pool == host_pool), None)

    def _add_link(self, now: float) -> ExecutorLink:
        self._tick_at = now
        self._links.append(ExecutorLink(self._incarnation, len(self._links), self.outgoing, self._epochs))
        return self._links[-1]

    def _spare(self, now: float) -> ExecutorLink | None:
        """A link without an executor, else one whose executor is silent."""
        free = [link for link in self._links if link.may_be_taken_over(now)]
        return min(free, key=lambda link: link.is_open, default=None)

    def _differs(self, info: BackendInfo) -> bool:
        model = self._model
        return model is not None and any(getattr(info, name) != getattr(model, name) for name in _MUST_AGREE)

    def _ask_for_hello(self, peer: bytes) -> None:
        """This executor served an earlier life of ours, or was given up. A heartbeat of a later epoch makes it say hello."""
        self._writer.begin_epoch(self._epochs.next())
        self.outgoing.append((peer, self._writer.encode(SchedulerHeartbeat(self._incarnation))))

    def _refuse(self, hello: ExecutorHello) -> list[StepEvent]:
        if hello.incarnation == self._refused:
            return []
        self._refused = hello.incarnation
        assert self._model is not None
        it, ours = hello.info.model_name, self._model.model_name
        return [ExecutorRefused(f"it runs {shown(it)}, another model than {shown(ours)}")]
