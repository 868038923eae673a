"""What a gateway counts of its calls, and where its workers tell it."""

import asyncio

import grpc
import pytest

from headway_gateway.access.interceptors import counting
from headway_gateway.config import GatewayConfig
from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.statuses import CallRefusedError
from headway_gateway.worker_group import _with_own_metrics

METHOD = "package.Service/Method"


async def outcome_of(behaviour) -> GatewayStatistics:
    """What is counted of one call with this behaviour; one that does not end is cancelled."""
    statistics = GatewayStatistics()
    task = asyncio.ensure_future(counting(statistics)(behaviour, f"/{METHOD}")(None))
    await asyncio.wait([task], timeout=0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return statistics


async def test_calls_count_by_the_status_that_they_end_with():
    async def well(_call):
        pass

    async def refused(_call):
        raise CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, "no", reason="bad")

    async def failing(_call):
        raise ValueError

    async def never(_call):
        await asyncio.Event().wait()

    for behaviour, code in (
        (well, "OK"), (refused, "INVALID_ARGUMENT"), (failing, "INTERNAL"), (never, "CANCELLED")
    ):  # fmt: skip
        statistics = await outcome_of(behaviour)
        assert statistics.calls == {(METHOD, code): 1}
        assert statistics.refusals == ({("bad",): 1} if behaviour is refused else {})


def test_tokens_of_one_delta_follow_each_other_at_once():
    statistics = GatewayStatistics()
    statistics.count_delta(1, None, 0.5)
    statistics.count_delta(3, 0.02, 0.6)
    statistics.count_delta(0, 0.02, 0.7)  # text that was held back, and no token
    assert statistics.first_token_s.snapshot().num_values == 1
    gaps = statistics.gap_s.snapshot()
    assert (gaps.num_values, gaps.cumulative[0]) == (3, 2)
    assert gaps.total == pytest.approx(0.02)
    assert (statistics.num_tokens, statistics.num_joined_tokens, statistics.num_deltas) == (4, 2, 3)


@pytest.mark.parametrize(
    ("address", "third"),
    [("127.0.0.1:9464", "127.0.0.1:9466"), ("[::1]:9464", "[::1]:9466"), ("127.0.0.1:0", "127.0.0.1:0"), ("", "")],
)
def test_each_worker_has_a_port_of_its_own(address, third):
    config = GatewayConfig(model="x", metrics_address=address, workers=3)
    assert _with_own_metrics(config, 2).metrics_address == third
