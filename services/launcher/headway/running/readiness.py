"""Waiting until a new server serves."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headway.running.health import Target, listens, model_of, serves_within, why_not_asked

if TYPE_CHECKING:
    from headway_proto import generation_pb2

POLL_INTERVAL_S = 0.1
_WATCH_S = 0.5
PROGRESS_INTERVAL_S = 5.0


async def wait_until_serving(
    targets: Sequence[Target],
    executors: Sequence[str],
    *,
    started: float,
    report: Callable[[str], None],
    has_begun: Callable[[str], bool],
) -> str:
    """Return the readiness line; report now and then until then.

    It waits for all ``targets``, then for all ``executors``: a target serves with one of them.
    """
    next_word = started + PROGRESS_INTERVAL_S
    waiting = list(targets)
    model = None

    def late() -> list[str]:
        return [name for name in executors if not has_begun(name)]

    while waiting or late():
        asked = time.monotonic()
        answer = await asyncio.to_thread(_model_if_serving, waiting[0]) if waiting else None
        if answer is not None:
            model = answer
            del waiting[0]
            continue
        now = time.monotonic()
        if now >= next_word:
            reason = await asyncio.to_thread(_why, waiting, late(), names_target=len(targets) > 1)
            report(f"not ready after {now - started:.0f} s{reason}")
            next_word = now + PROGRESS_INTERVAL_S
        await asyncio.sleep(max(0.0, asked + POLL_INTERVAL_S - now))  # asking may have been the wait
    assert model is not None
    took_s = time.monotonic() - started
    return readiness_line([target.address for target in targets], model, took_s, num_executors=len(executors))


def _why(waiting: Sequence[Target], late: Sequence[str], *, names_target: bool) -> str:
    if waiting:
        # A gateway that cannot be asked will not be ready by itself.
        if reason := why_not_asked(waiting[0]):
            return f": {reason}"
        if names_target:
            return f": {waiting[0].address} does not serve"
    return f": no sign of {', '.join(late)}" if late else ""


def _model_if_serving(target: Target) -> "generation_pb2.GetModelResponse | None":
    """What imports gRPC waits for a gateway that listens: until then, processes that start need the cores."""
    return model_of(target) if listens(target) and serves_within(target, _WATCH_S) else None


def readiness_line(
    addresses: Sequence[str], model: "generation_pb2.GetModelResponse", took_s: float, *, num_executors: int = 0
) -> str:
    """Return the line with model and addresses."""
    runs_on = f"{model.backend}/{model.device}/{model.dtype}"
    several = f"{num_executors} executors, " if num_executors else ""
    return f"headway is ready on {','.join(addresses)} (model {model.name}, {runs_on}, {several}{took_s:.1f} s)"
