"""``headway plan --deployment``: a file that ``headway serve`` takes as it is."""

import tomllib
from pathlib import Path

import pytest

from headway.__main__ import main, parser_of
from headway.planning.deployment import read_deployment, roles_in_order
from headway.planning.plan import make_plan
from headway_lab.plan.algorithms import Role
from headway_lab.plan.cluster import Degrees
from headway_lab.plan.deployment_file import _table
from headway_lab.plan.instance import Phase

ASKED = ("plan", "--model", "llama-3-8b", "--hardware", "h100", "--rate", "6", "--ttft-slo-ms", "400")
LOAD = ("--itl-slo-ms", "40", "--prompt-tokens", "500", "--output-tokens", "40", "--num-requests", "50")


def test_a_plan_can_be_served(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deployment.toml"
    one_device = ("--devices-per-node", "1", "--most-stages", "1", "--devices", "16")
    assert main([*ASKED, *LOAD, *one_device, "--deployment", str(path)]) == 0
    capfd.readouterr()
    parsed = parser_of("serve").parse(["--config", str(path)])
    deployment = read_deployment(parsed, {})
    counts = [table["count"] for table in tomllib.loads(path.read_text())["executors"]]
    assert len(deployment.starting()) == sum(counts) >= 1
    plan = make_plan(parsed, {}, Path("/run/x"))
    assert "--default-ttft-slo-ms=400" in plan.commands["scheduler"]
    assert "--default-itl-slo-ms=40" in plan.commands["scheduler"]
    roles = roles_in_order(deployment.starting())
    assert not roles or f"--roles={roles}" in plan.commands["scheduler"]


def test_degrees_are_in_the_file() -> None:
    role = Role(phase=Phase.DECODE, degrees=Degrees(4, 2), goodput=3.0, num_executors=2)
    (table,) = tomllib.loads("\n".join(_table(role)))["executors"]
    assert table == {"role": "decode", "count": 2, "tensor_parallel": 4, "pipeline_parallel": 2}
