"""What a deployment's file makes of each process of a cluster, and what is refused."""

import stat
from pathlib import Path

import pytest

from headway.__main__ import main, parser_of
from headway.cluster.command import _plan
from headway.cluster.description import ClusterPlan, command_words, stop_stages
from headway.cluster.engine import ENGINES
from headway.cluster.local_ray import LocalRay
from headway.cluster.member import Member, _write_keys
from headway.flags.configuration import build
from headway.flags.settings import ConfigurationError
from headway.planning.cluster_config import ClusterConfig
from headway.planning.deployment import read_deployment
from headway.planning.services import SERVICES, load
from headway_process.fleet_numbers import EXECUTOR_VARIABLE

TEXT = """
[serve]
grpc_address = "127.0.0.1:50931"
[executor]
backend = "simulated"
[[executors]]
role = "prefill"
device = "cuda"
[[executors]]
role = "decode"
num_threads = 3
min = 1
max = 2
"""
LINKS = {"step_address": "tcp://10.0.0.1:7001", "ingress_address": "tcp://10.0.0.1:7002"}


def plan_of(tmp_path: Path, text: str = TEXT, **settings: object) -> ClusterPlan:
    file = tmp_path / "deployment.toml"
    file.write_text(text)
    deployment = read_deployment(parser_of("serve").parse(["--config", str(file)]), {})
    return _plan(deployment, ClusterConfig(**settings))


def test_every_process_that_there_may_be_is_described(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert [order.name for order in plan.orders] == ["scheduler", "gateway", "executor-0", "executor-1", "executor-2"]
    assert [(order.cpus, order.gpus) for order in plan.orders[2:]] == [(1, 1), (3, 0), (3, 0)]
    assert [order.environment for order in plan.orders[2:]] == [{EXECUTOR_VARIABLE: str(n)} for n in range(3)]
    assert [(pool.count, pool.least, pool.most, pool.role) for pool in plan.pools] == [
        (1, 1, 1, "prefill"),
        (1, 1, 2, "decode"),
    ]
    assert "--roles=prefill,decode,decode" in plan.orders[0].words
    assert "--max-executors=3" in plan.orders[0].words
    assert [[order.service for order in stage] for stage in stop_stages(plan.orders)] == [
        ["gateway"],
        ["scheduler"],
        ["executor"] * 3,
    ]


def test_a_command_with_its_links_is_a_valid_configuration(tmp_path: Path) -> None:
    for order in plan_of(tmp_path).orders:
        keys = tmp_path / order.name
        _write_keys(keys, order.keys)
        words = command_words(order, {**LINKS, "curve_keys": str(keys), "metrics_address": "127.0.0.1:9000"})
        assert load(SERVICES[order.service], parser_of(order.service).parse(words), {})
        secret = next(keys.glob("*.key_secret"))
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        assert stat.S_IMODE(keys.stat().st_mode) == 0o700
        assert not [word for word in words if secret.read_text() in word]


def test_each_side_has_its_own_secret_and_the_others_public_keys(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    names = {order.service: set(order.keys) for order in plan.orders}
    assert names["executor"] == {"executor.key", "executor.key_secret", "scheduler.key"}
    assert names["gateway"] == {"gateway.key", "gateway.key_secret", "scheduler.key"}
    assert names["scheduler"] >= {"scheduler.key_secret", "executors/executor.key", "gateways/gateway.key"}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("[serve]\nreplicas = 2", {}, "replicas: 2 is not allowed; allowed: 1 in a cluster, with [[executors]]"),
        ("[gateway]\ngrpc_address = '127.0.0.1:0'", {}, "grpc_address: '127.0.0.1:0' is not allowed; allowed: a port above 0 in a cluster"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        plan_of(tmp_path, text, **settings)
    assert str(refused.value) == message


def test_scaling_behind_tokens_needs_a_token_of_its_own(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ops generate,admin word\n")
    tokens.chmod(0o600)
    text = f"[gateway]\nauth_token_file = '{tokens}'\n[[executors]]\nmin = 1\nmax = 2"
    with pytest.raises(ConfigurationError, match="token_file: '' is not allowed"):
        plan_of(tmp_path, text)
    own = tmp_path / "own"
    own.write_text("word\n")
    plan = plan_of(tmp_path, text, token_file=str(own))
    assert plan.probe.admin_token == "word"
    assert any(word.startswith("--launcher-token-digest=") for word in plan.orders[1].words)


@pytest.mark.parametrize(
    ("settings", "field"), [({"name": "a/b"}, "name"), ({"nodes_here": 1, "address": "x:1"}, "address")]
)
def test_settings_of_a_cluster_are_checked(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: .* is not allowed; allowed: "):
        ClusterConfig(**settings).validate()


def test_an_engine_is_a_module_with_the_two_commands() -> None:
    assert build(ClusterConfig, {}, ClusterConfig.validate).engine in ENGINES


def test_without_ray_the_command_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["cluster", "status"]) == 2
    assert "this host lacks ray; install the extra ray" in capfd.readouterr().err


def test_a_local_ray_is_in_a_directory_of_this_user_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    short = Path("/tmp/hwt")
    short.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(short))
    try:
        local = LocalRay("x")
        local._make_directory()
        assert stat.S_IMODE((local._directory / "token").stat().st_mode) == 0o600
        assert stat.S_IMODE(local._user_directory.stat().st_mode) == 0o700
        with pytest.raises(ConfigurationError, match="name: 'x' is not allowed"):
            local._make_directory()
        local.stop()
        assert list(short.iterdir()) == []
        assert not local.is_there
    finally:
        short.rmdir()


def test_a_member_knows_the_version_that_all_nodes_must_have() -> None:
    assert Member("127.0.0.1").version()
