"""New tokens of requests, and their ends."""

from headway_scheduler.core.state.arrival import Origin
from specification.host_blocks import HostBlocks
from specification.losses import Losses
from specification.queue import Queue
from specification.requests import SpecRequest
from specification.room import Room
from specification.state import SpecState


class Endings:
    def __init__(self, state: SpecState, host_blocks: HostBlocks, losses: Losses, queue: Queue, room: Room) -> None:
        self._state = state
        self._host_blocks = host_blocks
        self._losses = losses
        self._queue = queue
        self._room = room
        self.stopped: SpecRequest | None = None
        """The last one that ended by itself."""

    def deliver(self, request: SpecRequest, token: int, delivered: list[tuple[Origin, int, int]]) -> None:
        if self._state.limits.order == "fair":
            self._queue.served[request.tenant] += 2.0
        delivered.append((request.origin, len(request.tokens) - request.num_prompt_tokens, token))
        request.tokens.append(token)

    def end_if_done(self, request: SpecRequest, token: int, ended: list[tuple[Origin, str, int]]) -> None:
        num_output = len(request.tokens) - request.num_prompt_tokens
        if token in request.stops and num_output >= request.min_tokens:
            ended.append((request.origin, "stop", token))
            self.stopped = request
        elif len(request.tokens) == request.limit:
            ended.append((request.origin, "length", -1))
        else:
            return
        self.end(request)

    def end(self, request: SpecRequest) -> None:
        if request is self._losses.alone:
            self._losses.alone = None
        self._losses.unproven = [(r, goal) for r, goal in self._losses.unproven if r is not request]
        num_output = len(request.tokens) - request.num_prompt_tokens
        if self._state.predicts and num_output:
            self._state.lengths.observe(request.curve, num_output, is_censored=request is not self.stopped)
        if request.row is None:
            self._queue.leave_queue(request)
            self._host_blocks.swap_out = [entry for entry in self._host_blocks.swap_out if entry[0] is not request]
            self._host_blocks.give_up(request)
        else:
            self._room.leave(request, cache=True)
