"""The load of gateway and scheduler, for clients that balance by it (ORCA, gRFC A51).

``application_utilization``: the larger share of rows or KV blocks in use, plus waiting requests per row.
``cpu_utilization``: share of one core. ``rps_fractional``, ``eps``: generations and failures per second.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import grpc

from headway_gateway.figures.statistics import GatewayStatistics
from headway_gateway.grpc_server.call import Call
from headway_gateway.grpc_server.server import GrpcServer
from headway_gateway.link.ingress_link import IngressLink
from headway_proto import orca_pb2 as api

SERVICE = "xds.service.orca.v3.OpenRcaService"
TRAILER_KEY = "endpoint-load-metrics-bin"
LEAST_INTERVAL_S = 0.25
"""The scheduler reports this often."""
DEFAULT_INTERVAL_S = 1.0
_SAMPLE_INTERVAL_S = 1.0
_GENERATE = "headway.v1.Generation/Generate"
_OK = grpc.StatusCode.OK.name


class _Sample(NamedTuple):
    time: float
    cpu_s: float
    num_calls: int
    num_errors: int


class LoadMonitor:
    """Measures this process's load."""

    def __init__(self, link: IngressLink, statistics: GatewayStatistics) -> None:
        self._link = link
        self._statistics = statistics
        self._before = self._newest = self._sample()
        self._mem_utilization = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Measure regularly."""
        self._task = asyncio.create_task(self._keep_sampling(), name="load")

    async def close(self) -> None:
        """Stop measuring."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def report(self) -> api.OrcaLoadReport:
        """Return the load of this moment."""
        before, newest = self._before, self._newest
        elapsed_s = max(newest.time - before.time, 1e-9)
        load = self._link.load
        waiting_per_row = load.num_waiting / load.max_running if load.max_running else 0.0
        rows = load.num_running / load.max_running if load.max_running else 0.0
        return api.OrcaLoadReport(
            cpu_utilization=(newest.cpu_s - before.cpu_s) / elapsed_s,
            mem_utilization=self._mem_utilization,
            rps_fractional=(newest.num_calls - before.num_calls) / elapsed_s,
            eps=(newest.num_errors - before.num_errors) / elapsed_s,
            application_utilization=max(rows, load.kv_cache_usage) + waiting_per_row,
            utilization={"kv_cache": load.kv_cache_usage, "rows": rows},
            named_metrics={
                "num_requests_running": load.num_running,
                "num_requests_waiting": load.num_waiting,
                "kv_cache_usage_perc": load.kv_cache_usage,
            },
        )

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(_SAMPLE_INTERVAL_S)
            self._before, self._newest = self._newest, self._sample()
            self._mem_utilization = _mem_utilization()

    def _sample(self) -> _Sample:
        ends = {code: count for (method, code), count in self._statistics.calls.items() if method == _GENERATE}
        num_calls = sum(ends.values())
        return _Sample(time.monotonic(), time.process_time(), num_calls, num_calls - ends.get(_OK, 0))


def trailer_of(report: api.OrcaLoadReport, **request_cost: float) -> tuple[str, bytes]:
    """Return the cost as trailing metadata."""
    report.request_cost.update(request_cost)
    return TRAILER_KEY, report.SerializeToString()


def add_load_reports(server: GrpcServer, report: Callable[[], api.OrcaLoadReport]) -> None:
    """Serve reports at the client's interval."""

    async def stream_core_metrics(
        request: api.OrcaLoadReportRequest,
        context: Call,  # noqa: ARG001
    ) -> AsyncIterator[api.OrcaLoadReport]:
        asked_s = request.report_interval.ToNanoseconds() / 1e9
        interval_s = max(asked_s, LEAST_INTERVAL_S) if asked_s > 0 else DEFAULT_INTERVAL_S
        while True:
            yield report()
            await asyncio.sleep(interval_s)

    method = grpc.unary_stream_rpc_method_handler(
        stream_core_metrics,
        request_deserializer=api.OrcaLoadReportRequest.FromString,
        response_serializer=api.OrcaLoadReport.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICE, {"StreamCoreMetrics": method})


def _mem_utilization() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    total, available = kib.get("MemTotal", 0), kib.get("MemAvailable", 0)
    return 1.0 - available / total if total else 0.0
