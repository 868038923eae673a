"""The compose file for several hosts says what the services accept, and gives nobody more than it needs."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from headway.__main__ import parser_of
from headway.commands.keys import make_keys
from headway.planning.services import SERVICES, load

REPOSITORY = Path(__file__).resolve().parents[3]
FILE = REPOSITORY / "compose.hosts.yaml"
COMPOSE = yaml.safe_load(FILE.read_text())
NAMES = sorted(COMPOSE["services"])


def test_every_service_accepts_its_flags_and_its_keys(tmp_path):
    make_keys(tmp_path / "keys")
    for name, service in COMPOSE["services"].items():
        (mount,) = service["volumes"]
        assert mount == f"${{KEYS:-./keys}}/{name}:/keys:ro"
        words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in service["command"]]
        words = [word.replace("=/keys", f"={tmp_path / 'keys' / name}") for word in words]
        config = load(SERVICES[name], parser_of(name).parse(words), {})
        assert type(config) is SERVICES[name].struct
        config.validate()


def test_executor_and_gateway_share_no_network_and_only_the_gateway_has_a_way_out():
    networks = {name: set(COMPOSE["services"][name]["networks"]) for name in NAMES}
    assert not networks["executor"] & networks["gateway"]
    assert networks["scheduler"] & networks["executor"]
    assert networks["scheduler"] & networks["gateway"]
    open_ones = {name for name, network in COMPOSE["networks"].items() if not (network or {}).get("internal")}
    assert [name for name in NAMES if networks[name] & open_ones] == ["gateway"]
    assert [service.get("ports") for service in COMPOSE["services"].values() if "ports" in service] == [
        ["127.0.0.1:50051:50051"]
    ]


def test_containers_are_closed_up():
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "mem_limit" in service


def test_docker_compose_takes_the_file():
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command")
    words = ["docker", "compose", "-f", str(FILE), "config", "--quiet"]
    if subprocess.run([*words[:2], "version"], capture_output=True, check=False).returncode:
        pytest.skip("this docker command has no compose")
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
