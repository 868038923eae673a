"""``serve --openai-address``: which smg is started, and what is refused before anything is."""

import argparse
import importlib.util

import pytest

pytest.importorskip("smg", reason="needs smg: the extra smg")
pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine: the extra smg")

from headway.__main__ import parser_of
from headway.flags.settings import ConfigurationError
from headway.planning.plan import make_plan


def plan(tmp_path, *words):
    arguments: argparse.Namespace = parser_of("serve").parse([*words, "--grpc-address", "127.0.0.1:50999"])
    return make_plan(arguments, {}, tmp_path)


def test_smg_starts_last_stops_first_and_listens_on_loopback_only(tmp_path) -> None:
    made = plan(tmp_path, "--openai-address", "127.0.0.1:30000", "--smg-flags=--tool-call-parser,qwen")
    assert made.start_order == ["executor", "scheduler", "gateway", "smg"]
    assert [list(stage) for stage in made.stop_stages] == [["smg"], ["gateway"], ["scheduler"], ["executor"]]
    assert made.openai_address == "127.0.0.1:30000"
    # Without -P, a file of the current directory, such as random.py, would be imported in place of Python's own.
    assert all(words[1:3] == ["-P", "-m"] for words in made.commands.values())
    words = made.commands["smg"]
    assert words[1:5] == ["-P", "-m", "headway.planning.openai_front", "127.0.0.1:50999"]
    flags = dict(zip(words[5::2], words[6::2], strict=True))
    assert (flags["--host"], flags["--port"]) == ("127.0.0.1", "30000")
    assert flags["--worker-urls"] == "grpc://127.0.0.1:50999"
    assert flags["--prometheus-host"] == "127.0.0.1"
    assert flags["--tool-call-parser"] == "qwen"


def test_without_an_address_there_is_no_smg(tmp_path) -> None:
    made = plan(tmp_path)
    assert made.start_order == ["executor", "scheduler", "gateway"]
    assert "smg" not in made.commands
    assert [list(stage) for stage in made.stop_stages] == [["gateway"], ["scheduler"], ["executor"]]


@pytest.mark.parametrize("address", ["0.0.0.0:30000", "10.1.2.3:30000", "127.0.0.1", "127.0.0.1:0", ":30000", "x:y"])
def test_an_address_that_others_reach_is_refused(tmp_path, address) -> None:
    with pytest.raises(ConfigurationError, match=r"^--openai-address: .* allowed: HOST:PORT of a loopback address"):
        plan(tmp_path, "--openai-address", address)


def test_a_gateway_that_smg_cannot_call_is_refused(tmp_path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token\n")
    address = ("--openai-address", "127.0.0.1:30000")
    with pytest.raises(ConfigurationError, match=r"^--openai-address: not allowed together with --auth-token-file"):
        plan(tmp_path, *address, "--auth-token-file", str(tokens))
    with pytest.raises(
        ConfigurationError, match=r"^--vllm-engine: 'off' is not allowed; .* because --openai-address is given"
    ):
        plan(tmp_path, *address, "--vllm-engine", "off")
    with pytest.raises(ConfigurationError, match=r"^--smg-flags: not allowed without openai_address"):
        plan(tmp_path, "--smg-flags=--parser,legacy")


def test_what_is_not_installed_is_named(tmp_path, monkeypatch) -> None:
    found = importlib.util.find_spec
    absent = {"smg", "smg_grpc_proto"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    with pytest.raises(
        ConfigurationError, match=r"^--openai-address: .* needs smg, which is not installed; .*install the extra smg: "
    ):
        plan(tmp_path, "--openai-address", "127.0.0.1:30000")
    with pytest.raises(
        ConfigurationError, match=r"^--vllm-engine: 'on' .* smg-grpc-proto is missing; install the extra vllm-engine: "
    ):
        plan(tmp_path, "--vllm-engine", "on")
    with pytest.raises(ConfigurationError, match=r"^--kv-events: 'true' .* VllmEngine is not served"):
        plan(tmp_path, "--kv-events")
    assert plan(tmp_path).start_order == ["executor", "scheduler", "gateway"]
