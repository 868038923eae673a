"""The launcher's view of the three services: what they share agrees, and how ``serve`` settles all of them."""

import argparse
import tempfile
from pathlib import Path

import msgspec
import pytest

from headway.__main__ import COMMANDS, main, overview, parser_of
from headway.flags.settings import ConfigurationError, ModelDirectoryError
from headway.planning.model_source import DEMO_MODEL_DIRECTORY
from headway.planning.plan import make_plan, without_settings
from headway.planning.services import SERVICES, SETTLED_BY_SERVE
from headway.running.socket_directory import remove_abandoned, socket_directory

# Lifetimes are each service's own; everything else that is spelt the same means the same.
MAY_DIFFER = {"grace_s", "model"}

ISSUE_FLAGS = (
    *("--model", "--backend", "--device", "--dtype", "--quantization", "--grpc-address", "--max-num-batched-tokens"),
    *("--max-num-seqs", "--num-kv-blocks", "--block-size", "--max-model-len", "--max-steps-in-flight", "--seed"),
    *("--workers", "--backend-option", "--num-threads"),
)


def serve_arguments(*words: str) -> argparse.Namespace:
    return parser_of("serve").parse(words)


def plan_of(*words: str, **environment: str):
    return make_plan(serve_arguments(*words), environment, Path("/run/x"))


def child_flags(plan, name: str) -> list[str]:
    return plan.commands[name][5:]


def test_settings_of_one_name_agree_between_services():
    seen: dict = {}
    for service in SERVICES.values():
        for name, setting in service.settings.items():
            if name in MAY_DIFFER | SETTLED_BY_SERVE:
                continue
            first = seen.setdefault(name, setting)
            assert (first.shape, first.default) == (setting.shape, setting.default), name


def test_every_setting_says_what_it_is():
    for service in SERVICES.values():
        assert [name for name, setting in service.settings.items() if not setting.description] == []


def test_serve_takes_every_promised_flag():
    known = parser_of("serve").format_full_help()
    assert [flag for flag in ISSUE_FLAGS if flag not in known] == []


def test_a_shared_setting_reaches_every_service_that_has_it():
    plan = plan_of("--max-num-seqs", "9", "--log-level", "error", "--backend-option", "a=b")
    assert "--max-num-seqs=9" in child_flags(plan, "scheduler")
    assert "--max-num-seqs=9" in child_flags(plan, "executor")
    assert all("--log-level=error" in child_flags(plan, name) for name in SERVICES)
    assert "--backend-option=a=b" in child_flags(plan, "executor")


def test_the_links_are_sockets_in_the_private_directory_and_children_end_with_the_launcher():
    plan = plan_of()
    assert "--ingress-address=ipc:///run/x/ingress" in child_flags(plan, "scheduler")
    assert "--ingress-address=ipc:///run/x/ingress" in child_flags(plan, "gateway")
    assert "--step-address=ipc:///run/x/step" in child_flags(plan, "scheduler")
    assert "--step-address=ipc:///run/x/step" in child_flags(plan, "executor")
    assert all("--exit-with-parent" in child_flags(plan, name) for name in SERVICES)


def test_each_service_has_a_port_for_its_metrics_if_there_are_any():
    plan = plan_of("--metrics-port", "9464")
    for name, port in (("scheduler", 9464), ("executor", 9465), ("gateway", 9466)):
        assert f"--metrics-address=127.0.0.1:{port}" in child_flags(plan, name)
    assert not [flag for name in SERVICES for flag in child_flags(plan_of(), name) if flag.startswith("--metrics")]


def test_the_demo_model_is_the_default_and_has_a_name():
    for plan in (plan_of(), plan_of("--model", "demo"), plan_of(HEADWAY_GATEWAY_MODEL="demo")):
        assert f"--model={DEMO_MODEL_DIRECTORY}" in child_flags(plan, "executor")
        assert f"--model={DEMO_MODEL_DIRECTORY}" in child_flags(plan, "gateway")


def test_what_serve_is_given_wins_over_what_a_service_is_given(tmp_path):
    file = tmp_path / "h.toml"
    file.write_text("[serve]\nmax_num_seqs = 3\n[scheduler]\nmax_num_seqs = 4\nmax_steps_in_flight = 5\n")
    plan = plan_of("--config", str(file), HEADWAY_SCHEDULER_MAX_NUM_SEQS="6", HEADWAY_SCHEDULER_MAX_STEPS_IN_FLIGHT="7")
    assert "--max-num-seqs=3" in child_flags(plan, "scheduler")
    assert "--max-steps-in-flight=7" in child_flags(plan, "scheduler")


def test_port_0_becomes_a_free_port_that_holds():
    plan = plan_of("--grpc-address", "127.0.0.1:0")
    assert f"--grpc-address={plan.targets[0].address}" in child_flags(plan, "gateway")
    assert not plan.targets[0].address.endswith(":0")


def test_a_mistake_in_any_service_stops_the_plan():
    with pytest.raises(ConfigurationError, match=r"^--block-size: 12 is not allowed"):
        plan_of("--block-size", "12")
    with pytest.raises(ConfigurationError, match=r"^HEADWAY_GATEWAY_WORKERS: .*0.* is not allowed"):
        plan_of(HEADWAY_GATEWAY_WORKERS="0")
    with pytest.raises(ModelDirectoryError, match=r"^HEADWAY_EXECUTOR_MODEL: 'nowhere' is not allowed"):
        plan_of(HEADWAY_EXECUTOR_MODEL="nowhere")


def test_children_inherit_no_settings():
    assert without_settings({"HEADWAY_SERVE_MODEL": "x", "PATH": "y"}) == {"PATH": "y"}


def test_without_a_temporary_directory_the_error_is_one_line(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(ConfigurationError, match=r"^TMPDIR: no temporary directory can be written to; allowed: "):
        socket_directory().__enter__()


def test_the_socket_directory_is_private_short_and_removed(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with socket_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        assert len(str(directory / "ingress").encode()) <= 107
    assert not directory.exists()


def test_help_of_a_command_is_its_help(capsys):
    told = []
    for words in (["help", "health"], ["health", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(words)
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert main(["help", "nothing"]) == 2
    assert main(["help"]) == 0


def test_the_overview_lists_every_command_and_every_command_has_help():
    for name in COMMANDS:
        assert f"headway {name} " in overview()
        assert parser_of(name).format_help().startswith(f"usage: headway {name}")


def test_every_service_configuration_is_frozen():
    for service in SERVICES.values():
        assert service.struct.__struct_config__.frozen
        assert issubclass(service.struct, msgspec.Struct)


def test_the_directory_of_a_killed_launcher_is_removed_by_the_next_and_no_other_is(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    foreign = tmp_path / "headway-results"
    foreign.mkdir()
    with socket_directory() as living:
        abandoned = tmp_path / "headway-abandoned"
        abandoned.mkdir()
        (abandoned / "lock").touch()
        (abandoned / "step").touch()
        assert remove_abandoned(tmp_path) == [abandoned]
        assert living.is_dir()
        with socket_directory() as another:
            assert another != living
        assert living.is_dir()
    assert list(tmp_path.iterdir()) == [foreign]
