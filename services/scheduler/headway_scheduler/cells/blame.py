"""Decides which request is guilty of lost steps, and which one runs alone.

Owns: the core's requests by the brake's names. Must not know: frames, the clock. It only reads the core.
"""

from typing import NamedTuple

from headway_scheduler.cells.brake import Brake
from headway_scheduler.cells.live_sequences import LiveSequences
from headway_scheduler.cells.notices import Notices
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import Origin


class Trial(NamedTuple):
    """This sequence runs alone until it has ``num_tokens`` tokens; None: all run."""

    origin: Origin | None
    num_tokens: int


class Verdict(NamedTuple):
    """The sequences of lost steps; the guilty one ends with ``error``."""

    in_flight: tuple[Origin, ...]
    guilty: Origin | None
    error: str


class Blame:
    """Asks the brake about the core's sequences."""

    def __init__(self, brake: Brake, live: LiveSequences, notices: Notices) -> None:
        self._brake = brake
        self._live = live
        self._notices = notices
        self._judged_epoch = -1

    def next_trial(self, core: Scheduler) -> Trial:
        """Return the first suspect that is submitted and not acquitted."""
        for name in self._brake.suspects:
            live = self._live.named(name)
            request = None if live is None else core.find(live.origin)
            if live is None or request is None:
                continue  # its gateway has not submitted it again yet, or another cell has it
            if not self._brake.is_acquitted(name, core.num_tokens_of(request)):
                return Trial(live.origin, self._brake.num_tokens_wanted(name))
            self._notices.add("acquitted", request_id=name.request_id, continuation=name.continuation)
        for name in self._brake.suspects:
            if self._live.named(name) is None:
                self._brake.set_aside(name)
        return Trial(None, 0)

    def judge(self, core: Scheduler, reason: str, step: int | None) -> Verdict | None:
        """Count the loss of ``step``, or of all in flight. None if this epoch was judged."""
        if self._judged_epoch == core.epoch:
            return None
        self._judged_epoch = core.epoch
        in_flight, has_gone = core.requests_in_flight(step)
        found = [(self._live.get(origin), num_tokens) for origin, num_tokens in in_flight]
        guilty = self._brake.count_loss(
            [(live.name, num_tokens) for live, num_tokens in found if live is not None],
            is_alone=len(in_flight) == 1 and not has_gone,
        )
        origins = tuple(origin for origin, _ in in_flight)
        live = None if guilty is None else self._live.named(guilty)
        if live is None:
            return Verdict(origins, None, "")
        name = live.name
        losses = self._brake.suspicion_of(name)
        self._notices.add("guilty", request_id=name.request_id, continuation=name.continuation, reason=reason)
        error = (
            f"the executor was lost {losses.num_losses} times in a row while it ran, {losses.num_alone} times with nothing "
            f"beside it: {reason}"
        )
        self._brake.convict(name, error)
        return Verdict(origins, live.origin, error)
