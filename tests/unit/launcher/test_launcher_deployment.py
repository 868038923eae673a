"""What ships around the code agrees with the code: compose file, images, locks, documentation."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from headway.__main__ import parser_of
from headway.planning.plan import make_plan
from headway.planning.services import SERVICES, load

REPOSITORY = Path(__file__).resolve().parents[3]
COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
OF_ONE_SERVER = [name for name in COMPOSE["services"] if name.partition("-")[0] in SERVICES]
IMAGES = [*SERVICES, "launcher", "smg"]
ENTRYPOINTS = {"launcher": '["headway", "serve"]', "smg": '["smg", "launch"]'}


def lock(name: str) -> set[str]:
    lines = (REPOSITORY / "requirements" / f"{name}.lock").read_text().splitlines()
    return {line for line in lines if not line.startswith("#")}


def command_of(service: str) -> list[str]:
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in COMPOSE["services"][service]["command"]]


@pytest.mark.parametrize("service", OF_ONE_SERVER)
def test_the_compose_file_starts_every_service_with_a_valid_configuration(service):
    name = service.partition("-")[0]
    words = command_of(service)
    config = load(SERVICES[name], parser_of(name).parse(words), {})
    assert type(config) is SERVICES[name].struct


def test_the_profile_openai_has_whole_headways_that_only_smg_reaches():
    replica, smg = COMPOSE["services"]["replica"], COMPOSE["services"]["smg"]
    profiles = {name: service["profiles"] for name, service in COMPOSE["services"].items()}
    assert [name for name, of in profiles.items() if "openai" in of] == ["replica", "smg"]
    pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine (extra smg)")
    plan = make_plan(parser_of("serve").parse(command_of("replica")), {}, Path("/run/x"))
    assert plan.targets[0].address == "0.0.0.0:50051"
    assert "--kv-events" in plan.commands["gateway"]
    assert replica["networks"] == ["replicas"]
    assert COMPOSE["networks"]["replicas"] == {"internal": True}
    assert "ports" not in replica
    assert set(smg["networks"]) == {"replicas", "default"}
    assert "-replica-%g:50051" in smg["entrypoint"][2]
    assert "${REPLICAS:-2}" in smg["entrypoint"][2]
    assert replica["scale"] == "${REPLICAS:-2}"


def test_as_many_executors_start_on_the_cpu_as_the_scheduler_gives_work_to():
    executor, scheduler = COMPOSE["services"]["executor"], COMPOSE["services"]["scheduler"]
    assert executor["scale"] == "${EXECUTORS:-1}"
    assert f"--max-executors={executor['scale']}" in scheduler["command"]
    assert "--num-threads=${EXECUTOR_THREADS:-0}" in executor["command"]
    assert "ports" not in executor


def test_executors_in_containers_have_shared_memory_in_common_with_room_for_two_pools():
    executor, blocks = COMPOSE["services"]["executor"], COMPOSE["volumes"]["blocks"]["driver_opts"]
    assert "blocks:/dev/shm" in executor["volumes"]
    (of_each,) = [word.partition("=")[2] for word in command_of("executor") if word.startswith("--swap-space-mib=")]
    assert (blocks["type"], blocks["o"]) == ("tmpfs", "mode=1777,size=${BLOCKS_MEMORY:-1g}")
    assert 2 * int(of_each) < 1024


def test_smg_knows_every_flag_that_it_is_given_here():
    smg_arguments = pytest.importorskip("smg.router_args", reason="needs smg (extra smg)").RouterArgs
    parser = argparse.ArgumentParser(exit_on_error=False)
    smg_arguments.add_cli_args(parser)
    deployments = yaml.safe_load_all((REPOSITORY / "deploy" / "kubernetes" / "smg.yaml").read_text())
    (container,) = (
        container
        for one in deployments
        if one["kind"] == "Deployment"
        for container in one["spec"]["template"]["spec"]["containers"]
    )
    for words in (command_of("smg"), container["args"]):
        given, unknown = parser.parse_known_args(words)
        assert unknown == []
        assert (given.policy, given.worker_startup_check_interval, given.cb_timeout_duration_secs) == (
            "cache_aware",
            1,
            5,
        )


def test_containers_are_closed_up():
    for service in COMPOSE["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "mem_limit" in service
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", ())]
    assert published == ["127.0.0.1:50051:50051", "127.0.0.1:30000:30000"]


# Compose's ``!reset`` takes a key of the file before away.
OBSERVE = yaml.safe_load((REPOSITORY / "compose.observe.yaml").read_text().replace("!reset null", "null"))


@pytest.mark.parametrize("service", OF_ONE_SERVER)
def test_observed_services_have_metrics_behind_a_token_and_a_network_that_leads_nowhere_else(service, tmp_path):
    name = service.partition("-")[0]
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123")
    observed = OBSERVE["services"][service]
    environment = {
        key: value.replace("/run/metrics/token", str(token)) for key, value in observed["environment"].items()
    }
    config = load(SERVICES[name], parser_of(name).parse(command_of(service)), environment)
    config.validate()
    assert config.metrics_address == "0.0.0.0:9464"
    assert config.metrics_token_file == str(token)
    assert "metrics-token:/run/metrics:ro" in observed["volumes"]
    assert set(COMPOSE["services"][service]["volumes"]) <= set(observed["volumes"])
    assert set(observed["networks"]) - {"default"} == {"metrics"}
    assert ("default" in observed["networks"]) == (name == "gateway")
    assert OBSERVE["networks"]["metrics"] == {"internal": True}


def test_prometheus_reads_every_process_with_the_token_and_only_grafana_is_published_on_loopback():
    prometheus = yaml.safe_load((REPOSITORY / "observability" / "prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": "/run/metrics/token"}
    # By name, since a name of several executors has an address for each.
    (found,) = job["dns_sd_configs"]
    assert (set(found["names"]), found["type"], found["port"]) == (set(SERVICES), "A", 9464)
    published = {name: service["ports"] for name, service in OBSERVE["services"].items() if "ports" in service}
    assert published == {"grafana": ["127.0.0.1:3000:3000"]}
    for name in ("prometheus", "grafana"):
        service = OBSERVE["services"][name]
        assert service["profiles"] == ["observe"]
        assert service["cap_drop"] == ["ALL"]
        sources = [volume.split(":")[0] for volume in service["volumes"]]
        assert all((REPOSITORY / source).exists() for source in sources if source.startswith("."))


def test_the_token_is_made_once(tmp_path):
    script = OBSERVE["services"]["metrics-token"]["entrypoint"][2].replace("/run/headway", str(tmp_path))
    tokens = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", script], check=True)
        tokens.append((tmp_path / "token").read_text())
    assert tokens[0] == tokens[1]
    assert len(tokens[0].strip()) >= 32


@pytest.mark.parametrize("service", IMAGES)
def test_an_image_runs_its_service_as_an_ordinary_user(service):
    lines = (REPOSITORY / "services" / service / "Dockerfile").read_text().splitlines()
    assert "ENTRYPOINT " + ENTRYPOINTS.get(service, f'["headway", "{service}"]') in lines
    assert f"USER {'smg' if service == 'smg' else 'headway'}" in lines
    assert "ARG BASE_IMAGE=python:3.11-slim" in lines
    assert not any(line.startswith("# syntax") for line in lines)


def test_images_get_what_is_compiled_for_their_services_and_no_image_a_compiler():
    for image in (*SERVICES, "launcher"):
        dockerfile = (REPOSITORY / "services" / image / "Dockerfile").read_text()
        has_executor = image in {"executor", "launcher"}
        assert re.findall(r"HEADWAY_BUILD_CPU_KERNELS=(\d)", dockerfile) == ["1" if has_executor else "0"]
        has_scheduler = image in {"scheduler", "launcher"}
        assert re.findall(r"HEADWAY_BUILD_CORE=(\d)", dockerfile) == ([] if has_scheduler else ["0"])
        assert ("dev.lock mypy setuptools ziglang" in dockerfile) == has_scheduler
        assert ("ziglang" in dockerfile) == (has_executor or has_scheduler)
        assert "/opt/compiler" not in dockerfile.rpartition("FROM ")[2]
    for service in SERVICES:
        assert not any(line.startswith("ziglang==") for line in lock(service))
    assert any(line.startswith("ziglang==") for line in lock("dev"))


def test_locks_pin_every_version_once_and_only_the_executor_has_torch():
    development = lock("dev")
    assert all(re.fullmatch(r"[a-z0-9.-]+==[\w.]+", line) for line in development)
    for name in (*SERVICES, "serve", "smg"):
        assert lock(name) <= development
    with_torch = [service for service in SERVICES if any(line.startswith("torch==") for line in lock(service))]
    assert with_torch == ["executor"]
    assert not any(line.startswith("grpcio") for line in lock("scheduler") | lock("executor"))


def names_in(name: str) -> set[str]:
    return {line.partition("==")[0] for line in lock(name)}


def test_the_lock_of_the_demonstration_has_three_services_and_nothing_for_development():
    assert lock("scheduler") | lock("executor") <= lock("serve")
    assert {"grpcio", "tokenizers", "torch"} <= names_in("serve")
    for absent in ("triton", "cupy-cuda12x", "mypy", "kubernetes-validate", "ziglang", "transformers", "smg", "pytest"):
        assert absent in names_in("dev") - names_in("serve")


def test_the_demonstration_installs_its_lock_and_what_is_for_development_only_where_that_is(tmp_path):
    def steps() -> str:
        words = ["make", "--dry-run", "-C", str(REPOSITORY), "demo", f"VENV={tmp_path}/environment"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    from_nothing = steps()
    assert "-r requirements/serve.lock" in from_nothing
    assert "-r requirements/dev.lock" not in from_nothing
    (compilers,) = re.findall(r"--target (\S+)", from_nothing)
    assert f"rm -rf {compilers}" in from_nothing
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment" / ".ready").touch()
    with_everything = steps()
    assert "serve.lock" not in with_everything
    assert "headway_kernels/cpu/build.py" in with_everything


def test_the_documentation_has_the_settings_as_they_are():
    check = subprocess.run(
        [sys.executable, str(REPOSITORY / "tools" / "document_flags.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stderr
