"""Metrics, logs and the dashboard against a whole running Headway: what an operator sets up finds what it looks for."""

import asyncio
import json
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from e2e.running_server import Command, command, wait_until
from headway.client import AsyncClient
from headway_proto import generation_pb2 as api
from headway_proto import generation_pb2_grpc as api_grpc
from served import row_of_free_ports

REPOSITORY = Path(__file__).resolve().parents[2]
OBSERVABILITY = REPOSITORY / "observability"
DASHBOARD = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "headway.json").read_text())
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
# Added by Prometheus itself, or by prometheus.yml.
SCRAPE_LABELS = {"job", "instance", "process"}

Series = dict[str, set[str]]
"""The labels of each series, by name."""


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def selectors_in(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric of an expression with the labels that are selected by."""
    for name, matchers in re.findall(r"\b((?:headway|process)_\w+)(?:\{([^}]*)\})?", expression):
        yield name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))


def grouped_by(expression: str) -> set[str]:
    return {label.strip() for labels in re.findall(r"\bby \(([^)]*)\)", expression) for label in labels.split(",")}


def scrape(port: int) -> Series:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        text = response.read().decode()
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series.setdefault(sample.name, set()).update(sample.labels)
    return series


async def load(address: str) -> None:
    """A little of everything: tenants, a refusal, and a request under a trace."""
    async with AsyncClient(address) as client, grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(
            *(client.generate(f"prompt {n}", max_tokens=30, tenant=f"tenant {n % 2}").result() for n in range(6))
        )
        stub = api_grpc.GenerationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [one async for one in stub.Generate(api.GenerateRequest(text="x", sampling={"top_p": 7.0}))]
        call = stub.Generate(
            api.GenerateRequest(text="x", request_id="traced", sampling={"max_tokens": 5}),
            metadata=(("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01"),),
        )
        assert [one async for one in call]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Command, int]]:
    port = row_of_free_ports(3)
    with (
        socket.create_server(("127.0.0.1", 0)) as nowhere,  # spans go nowhere; only their ids matter here
        command(
            *("serve", "--grpc-address", "127.0.0.1:0", "--backend", "simulated", "--metrics-port", str(port)),
            *("--log-format", "json", "--log-level", "debug", "--order", "fair"),
            *("--otel-endpoint", f"http://127.0.0.1:{nowhere.getsockname()[1]}"),
        ) as running,
    ):
        asyncio.run(load(running.wait_for_ready()))
        yield running, port


@pytest.fixture(scope="module")
def series(served: tuple[Command, int]) -> Series:
    found: Series = {}
    for port in range(served[1], served[1] + 3):
        for name, labels in scrape(port).items():
            found.setdefault(name, set()).update(labels)
    return found


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_asks_for_what_there_is(series: Series, expression: str) -> None:
    selectors = list(selectors_in(expression))
    assert selectors
    for name, labels in selectors:
        if name in EMPTY_UNTIL_THEY_HAPPEN:
            continue
        assert name in series
        assert labels <= series[name] | SCRAPE_LABELS
        assert grouped_by(expression) <= series[name] | SCRAPE_LABELS


EMPTY_UNTIL_THEY_HAPPEN = {"headway_executor_step_failures_total"}
"""Its label is not known before: the names of errors."""


def test_figures_agree_between_the_processes(served: tuple[Command, int]) -> None:
    def values(port: int) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        found: dict[str, float] = {}
        for family in families:
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    scheduler, executor, gateway = (values(served[1] + offset) for offset in range(3))
    assert scheduler["headway_generation_tokens_total"] == gateway["headway_gateway_tokens_total"] > 0
    assert scheduler["headway_steps_total"] == executor["headway_executor_step_tokens_count"] > 0
    assert scheduler["headway_time_to_first_token_seconds_count"] == 7
    assert gateway["headway_gateway_time_to_first_token_seconds_count"] == 7
    assert scheduler["headway_request_success_total"] == gateway["headway_gateway_outputs_total"] == 7
    assert gateway["headway_gateway_refusals_total"] == 1
    assert scheduler["headway_num_requests_running"] == gateway["headway_gateway_streams"] == 0
    assert scheduler["headway_tenant_generation_tokens_total"] > 0


def test_lines_about_a_request_carry_its_ids_in_gateway_and_scheduler(served: tuple[Command, int]) -> None:
    def lines() -> list[dict[str, object]]:
        return [json.loads(line) for line in served[0].err if line.startswith("{")]

    def traced() -> set[tuple[object, object]]:
        return {
            (line["process"], line["event"])
            for line in lines()
            if line.get("request_id") == "traced" and line.get("trace_id") == TRACE_ID
        }

    expected = {
        ("gateway", "generation accepted"),
        ("gateway", "generation finished"),
        ("scheduler", "request accepted"),
        ("scheduler", "request finished"),
    }
    wait_until(lambda: traced() >= expected, 10, "the lines about the request")
    refused = [line for line in lines() if line["event"] == "call refused"]
    assert [line["code"] for line in refused] == ["INVALID_ARGUMENT"]


def test_the_dashboard_is_whole():
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["targets"] and panel["title"] for panel in panels)
    (source,) = yaml.safe_load(
        (OBSERVABILITY / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
