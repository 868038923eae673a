"""ORCA: what a gRPC client that balances by load reads, per call and out of band, with the standard's own names."""

import asyncio
import time
from base64 import b64decode
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

import headway
from headway import AsyncClient
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_proto import generation_pb2 as api
from headway_proto.orca_pb2 import OrcaLoadReport, OrcaLoadReportRequest
from headway_scheduler.core.state.limits import SchedulerLimits
from plain_h2 import PlainH2
from threaded_headway import running

DEMO = Path(headway.__file__).parent / "demo_model"
TRAILER = "endpoint-load-metrics-bin"
METHOD = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"
CONFIG = BackendConfig(
    model=str(DEMO), block_size=16, num_kv_blocks=64, max_num_seqs=4, options={"step_base_us": "5000"}
)
LIMITS = SchedulerLimits(max_num_seqs=4)
REQUEST = api.GenerateRequest(
    token_ids=api.TokenIds(ids=[5, 6, 7]), sampling=api.SamplingParams(max_tokens=9, ignore_eos=True)
)


async def trailers_of_a_call(address: str) -> dict[str, str]:
    """What the server sends behind a generation. gRPC's core shows it to balancers, and to no application."""
    async with PlainH2(address) as client:
        return (await client.call("/headway.v1.Generation/Generate", REQUEST.SerializeToString())).trailers


def stream_reports(channel: grpc.aio.Channel, interval_s: float):
    ask = channel.unary_stream(
        METHOD,
        request_serializer=OrcaLoadReportRequest.SerializeToString,
        response_deserializer=OrcaLoadReport.FromString,
    )
    return ask(OrcaLoadReportRequest(report_interval=Duration(nanos=round(interval_s * 1e9))))


async def test_a_client_reads_the_load_with_each_call_and_out_of_band(tmp_path: Path) -> None:
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, LIMITS, load_reports=True) as served:
        async with AsyncClient(served.address) as client, grpc.aio.insecure_channel(served.address) as channel:
            await client.wait_ready(20)
            report = OrcaLoadReport.FromString(b64decode((await trailers_of_a_call(served.address))[TRAILER] + "=="))
            assert dict(report.request_cost) == {"prompt_tokens": 3, "output_tokens": 9}

            reports = stream_reports(channel, 0.25)
            deadline = time.monotonic() + 10
            # The first report may still be of the call that has just ended: the gateway hears of it with the next heartbeat.
            while (await reports.read()).application_utilization:
                assert time.monotonic() < deadline
            # Six requests for four rows: two wait.
            busy = [
                asyncio.ensure_future(client.generate([n], max_tokens=900, ignore_eos=True).result()) for n in range(6)
            ]
            deadline = time.monotonic() + 10
            while (report := await reports.read()).named_metrics[
                "num_requests_waiting"
            ] != 2 or not report.cpu_utilization:
                assert time.monotonic() < deadline
            assert report.named_metrics["num_requests_running"] == 4
            assert report.cpu_utilization > 0
            assert 0 < report.mem_utilization < 1
            assert report.utilization["rows"] == 1
            assert 0 < report.utilization["kv_cache"] <= 1
            assert report.application_utilization == pytest.approx(1.5)
            reports.cancel()
            for request in busy:
                request.cancel()
            await asyncio.gather(*busy, return_exceptions=True)


async def test_nothing_is_told_unless_it_is_asked_for(tmp_path: Path) -> None:
    with running(tmp_path, DEMO, SimulatedBackend(), CONFIG, LIMITS) as served:
        async with AsyncClient(served.address) as client, grpc.aio.insecure_channel(served.address) as channel:
            await client.wait_ready(20)
            assert TRAILER not in await trailers_of_a_call(served.address)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stream_reports(channel, 1.0).read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_bytes_are_those_of_the_standard_messages():
    """What xds.data.orca.v3 and xds.service.orca.v3, as generated for xds-protos, encode these as."""
    report = OrcaLoadReport(
        cpu_utilization=0.25,
        mem_utilization=0.5,
        rps_fractional=3,
        eps=1,
        application_utilization=1.5,
        utilization={"a": 0.5},
        named_metrics={"b": 2},
        request_cost={"c": 7},
    )
    assert report.SerializeToString(deterministic=True).hex() == (
        "09000000000000d03f11000000000000e03f220c0a0163110000000000001c402a0c0a016111000000000000e03f"
        "31000000000000084039000000000000f03f420c0a016211000000000000004049000000000000f83f"
    )
    request = OrcaLoadReportRequest(report_interval=Duration(seconds=2), request_cost_names=["c"])
    assert request.SerializeToString().hex() == "0a020802120163"
