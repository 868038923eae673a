"""A peer of another version is told of, once for each link, and not again at once; and the peer is told, too."""

from types import SimpleNamespace
from typing import Any

from headway_executor.links.step_link import OtherVersion, StepLink
from headway_gateway.link.ingress_link import IngressLink
from headway_proto.framing import HEADER_BYTES, MAGIC, PROTOCOL_VERSION, VERSION_INTERVAL_S, VERSION_NOTICE
from headway_scheduler.core.state.limits import SchedulerLimits
from headway_scheduler.engine import SchedulerEngine
from headway_scheduler.process import _log_other_versions
from simulation.fault_model import backend_info
from simulation.fault_schedule import draw

REASON = f"protocol version {PROTOCOL_VERSION + 1} is not allowed; allowed: {PROTOCOL_VERSION}"
OTHER_NOTICE = VERSION_NOTICE.replace(MAGIC + bytes([PROTOCOL_VERSION]), MAGIC + bytes([PROTOCOL_VERSION + 1]))


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
    event = "a peer of another version of Headway is refused"
    assert lines == [{"event": event, "link": link, "reason": REASON} for link in ("step", "ingress")] * 2


def test_the_scheduler_answers_with_its_version_and_with_nothing_else() -> None:
    engine = SchedulerEngine(SchedulerLimits(), incarnation=1)
    for frame in (OTHER_NOTICE, VERSION_NOTICE, b"", b"HW"):
        engine.executor_frame(b"executor", frame, 1.0)
        engine.gateway_frame(b"gateway", frame, 1.0)
    assert engine.fleet.links[0].outgoing == [(b"executor", VERSION_NOTICE)]
    assert engine.gateways.outgoing == [(b"gateway", VERSION_NOTICE)]


def test_an_executor_says_it_now_and_then_and_goes_on_saying_hello() -> None:
    link = StepLink(incarnation=1, info=backend_info(draw(0).settings))
    told = [link.receive(OTHER_NOTICE, now).events for now in (1.0, 2.0, 1.0 + VERSION_INTERVAL_S)]
    assert told == [[OtherVersion(REASON)], [], [OtherVersion(REASON)]]
    assert link.tick(40.0).frames
    assert link.receive(VERSION_NOTICE[:-1] + b"x", 80.0).events == [], "damaged, but of our version"


def test_a_gateway_knows_it_until_a_link_is_open() -> None:
    link = IngressLink(incarnation=1, now=0.0)
    link.receive(b"damaged", 1.0)
    assert link.other_version == ""
    link.receive(OTHER_NOTICE, 1.0)
    assert link.other_version == REASON
