"""A peer of another version is told of, once for each link, and not again at once."""

from types import SimpleNamespace
from typing import Any

from headway_proto.framing import HEADER_BYTES, MAGIC, PROTOCOL_VERSION
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.process import _log_other_versions


def test_a_peer_of_another_version_is_told_of_once_for_each_link() -> None:
    engine = SchedulerEngine(SchedulerLimits(), incarnation=1)
    lines: list[dict[str, Any]] = []
    log: Any = SimpleNamespace(error=lambda event, **details: lines.append({"event": event, **details}))
    frame = MAGIC + bytes([PROTOCOL_VERSION + 1]) + bytes(HEADER_BYTES)
    told: dict[str, float] = {}
    for now in (1.0, 2.0, 30.0, 40.0):
        engine.executor_frame(b"executor", frame, now)
        engine.gateway_frame(b"gateway", frame, now)
        _log_other_versions(engine, now, told, log)
    reason = f"protocol version {PROTOCOL_VERSION + 1} is not allowed; allowed: {PROTOCOL_VERSION}"
    event = "a peer of another version of Headway is refused"
    assert lines == [{"event": event, "link": link, "reason": reason} for link in ("step", "ingress")] * 2
