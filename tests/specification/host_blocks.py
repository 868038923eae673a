"""Blocks of the host: which are free, and what is moved to and from them in this step."""

from specification.requests import SpecRequest
from specification.state import SpecState


class HostBlocks:
    def __init__(self, state: SpecState) -> None:
        self._state = state
        self.free = list(range(state.capacity.num_host_blocks))
        self.to_come: list[list[int]] = []
        self.swap_out: list[tuple[SpecRequest, list[tuple[int, int]]]] = []
        self.swap_in: list[tuple[int, int]] = []

    def give_up(self, request: SpecRequest) -> None:
        if request.host_blocks:
            self.to_come.append(request.host_blocks)
        request.host_blocks, request.swapped = [], 0
