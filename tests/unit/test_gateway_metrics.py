"""What a gateway counts of its calls, and where its workers tell it."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from headway_gateway.config import GatewayConfig
from headway_gateway.interceptors import CallCountingInterceptor
from headway_gateway.statistics import GatewayStatistics
from headway_gateway.worker_group import _with_own_metrics

DETAILS = SimpleNamespace(method="/package.Service/Method", invocation_metadata=())


async def outcome_of(behaviour, code) -> dict[tuple[str, str], int]:
    """What is counted of one call with this handler that ends with this code."""
    statistics = GatewayStatistics()
    handler = grpc.unary_unary_rpc_method_handler(behaviour)

    async def continuation(_details):
        return handler

    counted = await CallCountingInterceptor(statistics).intercept_service(continuation, DETAILS)
    assert counted is not None
    context = SimpleNamespace(code=lambda: code)
    task = asyncio.ensure_future(counted.unary_unary(None, context))
    await asyncio.sleep(0)
    if code is None:
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return dict(statistics.calls)


async def test_calls_count_by_the_status_that_they_end_with():
    async def well(_request, _context):
        return "answer"

    async def badly(_request, _context):
        raise grpc.aio.AbortError

    async def never(_request, _context):
        await asyncio.Event().wait()

    method = "package.Service/Method"
    assert await outcome_of(well, 0) == {(method, "OK"): 1}
    assert await outcome_of(badly, 3) == {(method, "INVALID_ARGUMENT"): 1}
    assert await outcome_of(never, None) == {(method, "CANCELLED"): 1}


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
