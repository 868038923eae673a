"""Polling until a new server serves."""

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc

from headway.health import SERVING, Target, health_of, model_of
from headway_proto import generation_pb2

POLL_INTERVAL_S = 0.1
PROGRESS_INTERVAL_S = 5.0


async def wait_until_serving(targets: Sequence[Target], *, started: float, report: Callable[[str], None]) -> str:
    """Return the readiness line; report now and then until then."""
    next_word = started + PROGRESS_INTERVAL_S
    waiting = list(targets)
    while waiting:
        model = await asyncio.to_thread(_model_if_serving, waiting[0])
        if model is not None:
            del waiting[0]
            continue
        now = time.monotonic()
        if now >= next_word:
            of_several = f": {waiting[0].address} does not serve" if len(targets) > 1 else ""
            report(f"not ready after {now - started:.0f} s{of_several}")
            next_word = now + PROGRESS_INTERVAL_S
        await asyncio.sleep(POLL_INTERVAL_S)
    assert model is not None
    return readiness_line([target.address for target in targets], model, time.monotonic() - started)


def _model_if_serving(target: Target) -> generation_pb2.GetModelResponse | None:
    if health_of(target) != SERVING:
        return None
    try:
        return model_of(target)
    except grpc.RpcError:
        return None


def readiness_line(addresses: Sequence[str], model: generation_pb2.GetModelResponse, took_s: float) -> str:
    """Return the line with model and addresses."""
    runs_on = f"{model.backend}/{model.device}/{model.dtype}"
    return f"headway is ready on {','.join(addresses)} (model {model.name}, {runs_on}, {took_s:.1f} s)"
