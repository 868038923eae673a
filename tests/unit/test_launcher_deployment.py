"""What ships around the code agrees with the code: compose file, images, locks, README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headway.__main__ import COMMANDS, parser_of
from headway.services import SERVICES, load

REPOSITORY = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())


def lock(name: str) -> set[str]:
    lines = (REPOSITORY / "requirements" / f"{name}.lock").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_the_compose_file_starts_every_service_with_a_valid_configuration(service):
    name = service.partition("-")[0]
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in COMPOSE["services"][service]["command"]]
    config = load(SERVICES[name], parser_of(name).parse(words), {})
    assert type(config) is SERVICES[name].struct


def test_containers_are_closed_up():
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "mem_limit" in service
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published == ["127.0.0.1:50051:50051"]


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_runs_its_service_as_an_ordinary_user(service):
    lines = (REPOSITORY / "services" / service / "Dockerfile").read_text().splitlines()
    assert f'ENTRYPOINT ["headway", "{service}"]' in lines
    assert "USER headway" in lines
    assert "ARG BASE_IMAGE=python:3.11-slim" in lines
    assert not any(line.startswith("# syntax") for line in lines)


def test_only_the_image_of_the_executor_gets_compiled_kernels_and_no_image_the_compiler():
    for service in SERVICES:
        dockerfile = (REPOSITORY / "services" / service / "Dockerfile").read_text()
        assert re.findall(r"HEADWAY_BUILD_CPU_KERNELS=(\d)", dockerfile) == ["1" if service == "executor" else "0"]
        assert ("ziglang" in dockerfile) == (service == "executor")
        assert not any(line.startswith("ziglang==") for line in lock(service))
    assert any(line.startswith("ziglang==") for line in lock("dev"))


def test_locks_pin_every_version_once_and_only_the_executor_has_torch():
    development = lock("dev")
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.]+", line) for line in development)
    for service in SERVICES:
        assert lock(service) <= development
    with_torch = [service for service in SERVICES if any(line.startswith("torch==") for line in lock(service))]
    assert with_torch == ["executor"]
    assert not any(line.startswith("grpcio") for line in lock("scheduler") | lock("executor"))


def test_the_readme_has_the_settings_as_they_are():
    check = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "document_flags.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def test_the_readme_names_no_flag_that_does_not_exist():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    blocks = "\n".join(re.findall(r"^```sh\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)).replace("\\\n", " ")
    commands = [line for line in blocks.splitlines() if re.match(r"(\.venv/bin/)?headway ", line)]
    known = {flag for name in COMMANDS for flag in re.findall(r"--[a-z][a-z-]+", parser_of(name).format_help())}
    used = {flag for line in commands for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert used
    assert used - known == set()
