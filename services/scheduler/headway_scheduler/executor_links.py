"""The links of all executors: which of them a frame belongs to, and which cell a new executor gets.

Owns: that choice. Must not know: what events mean to a core, or what carries frames.

With one cell, a second executor is a spare: it joins when the first is gone. With more, it joins beside the first, up to
``most``; then it is a spare as well. All executors must run the same model.
"""

from headway_proto.framing import FramingError
from headway_proto.step import BackendInfo, ExecutorHello, scheduler_frame_reader
from headway_scheduler.executor_link import ExecutorLink, ExecutorRefused, StepEvent

_MUST_AGREE = ("model_fingerprint", "vocab_size", "max_model_len")


class ExecutorLinks:
    """One link per cell; the first always exists. ``outgoing`` has the frames of all, as (peer, frame)."""

    def __init__(self, incarnation: int, most: int) -> None:
        self.outgoing: list[tuple[bytes, bytes]] = []
        self._incarnation = incarnation
        self._most = most
        self._links = [ExecutorLink(incarnation, 0, self.outgoing)]
        self._by_peer: dict[bytes, ExecutorLink] = {}
        self._reader = scheduler_frame_reader()
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
        if link is None or link.peer != peer:
            link = self._links[0] if self._most == 1 else self._link_for(peer, data, now)
            if link is None:
                return 0, self._refuse(data)
        events = link.receive(peer, data, now)
        if link.peer == peer and peer not in self._by_peer:
            self._by_peer = {link.peer: link for link in self._links if link.peer is not None}
        return link.number, events

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

    def _link_for(self, peer: bytes, data: bytes, now: float) -> ExecutorLink | None:
        """The link for a frame of a peer that no link uses; None if its executor is refused."""
        try:
            body = self._reader.decode(data).body
        except FramingError:
            return self._links[0]  # which counts it
        if not isinstance(body, ExecutorHello):
            spare = self._spare(now)
            if spare is None and len(self._links) < self._most:
                self._links[0].announce_to(peer)  # it comes from an earlier life of ours, and says hello then
            return spare or self._links[0]
        for link in self._links:
            if link.executor == body.incarnation:
                return link
        others = [link for link in self._links if link.is_open and not link.may_be_taken_over(now)]
        if others and self._differs(body.info):
            return None
        spare = self._spare(now)
        if spare is None and len(self._links) < self._most:
            spare = ExecutorLink(self._incarnation, len(self._links), self.outgoing)
            self._links.append(spare)
            self._tick_at = now
        return spare or self._links[0]

    def _spare(self, now: float) -> ExecutorLink | None:
        return next((link for link in self._links if link.may_be_taken_over(now)), None)

    def _differs(self, info: BackendInfo) -> bool:
        model = self._model
        return model is not None and any(getattr(info, name) != getattr(model, name) for name in _MUST_AGREE)

    def _refuse(self, data: bytes) -> list[StepEvent]:
        hello = self._reader.decode(data).body
        assert isinstance(hello, ExecutorHello)
        if hello.incarnation == self._refused:
            return []
        self._refused = hello.incarnation
        assert self._model is not None
        return [
            ExecutorRefused(f"it runs {hello.info.model_name!r:.64}, another model than {self._model.model_name!r:.64}")
        ]
