"""The requests without a row.

Owns: the queue and its totals, which change together. Must not know: why a request waits.
"""

from headway_scheduler.core.admission.waiting_queue import WaitingQueue
from headway_scheduler.core.admission.waiting_room import WaitingRoom
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.core.state.request import Request, RequestStatus


class WaitingRequests:
    """``num_preempted`` of the requests lost their row."""

    def __init__(self, limits: SchedulerLimits, queue: WaitingQueue) -> None:
        self.queue = queue
        self.room = WaitingRoom(limits)
        self.num_preempted = 0

    def __len__(self) -> int:
        return len(self.queue)

    def enter(self, request: Request) -> None:
        """Add a request."""
        self.room.enter(request)
        self.num_preempted += request.status is RequestStatus.PREEMPTED
        self.queue.push(request)

    def leave(self, request: Request) -> None:
        """Remove a request."""
        self.room.leave(request)
        self.num_preempted -= request.status is RequestStatus.PREEMPTED
        self.queue.remove(request)
