"""``[[executors]]`` of a deployment's file: what each executor has of its own, and what is refused."""

from pathlib import Path

import pytest

import headway.planning.plan
from headway.__main__ import parser_of
from headway.flags.settings import ConfigurationError
from headway.planning.deployment import read_deployment, roles_in_order
from headway.planning.plan import Plan, make_plan
from headway.planning.replicas import CUDA_DEVICES_VARIABLE, Layout, Member, Share

TWO_KINDS = """
[serve]
grpc_address = "127.0.0.1:50900"
[executor]
backend = "simulated"
num_kv_blocks = 64
[[executors]]
count = 2
role = "prefill"
max_num_batched_tokens = 512
[[executors]]
role = "decode"
num_kv_blocks = 128
min = 1
max = 3
"""


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headway.planning.plan, "_own_cores", lambda: list(range(8)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.toml"
    path.write_text(TWO_KINDS)
    return path


def plan_of(path: Path, *words: str, **environment: str) -> Plan:
    return make_plan(parser_of("serve").parse(["--config", str(path), *words]), environment, Path("/run/x"))


def flags_of(plan: Plan, name: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in plan.commands[name] if word.startswith("--") and "=" in word)


def test_each_executor_has_the_settings_of_its_table_and_the_scheduler_their_roles(file: Path) -> None:
    plan = plan_of(file)
    assert plan.start_order == ["executor-0", "executor-1", "executor-2", "scheduler", "gateway"]
    assert flags_of(plan, "scheduler")["--roles"] == "prefill,prefill,decode"
    assert flags_of(plan, "scheduler")["--max-executors"] == "3"
    found = [flags_of(plan, f"executor-{number}") for number in range(3)]
    assert [each["--num-kv-blocks"] for each in found] == ["64", "64", "128"]
    assert [each.get("--max-num-batched-tokens") for each in found] == ["512", "512", None]
    assert all(each["--backend"] == "simulated" for each in found)


def test_flags_and_environment_win_over_a_table(file: Path) -> None:
    assert flags_of(plan_of(file, "--num-kv-blocks", "7"), "executor-2")["--num-kv-blocks"] == "7"
    by_variable = plan_of(file, HEADWAY_EXECUTOR_NUM_KV_BLOCKS="9")
    assert flags_of(by_variable, "executor-2")["--num-kv-blocks"] == "9"


def test_a_table_says_how_many_there_may_be(file: Path) -> None:
    deployment = read_deployment(parser_of("serve").parse(["--config", str(file)]), {})
    assert [(entry.count, entry.least, entry.most) for entry in deployment.entries] == [(2, 2, 2), (1, 1, 3)]
    assert roles_in_order(deployment.at_most()) == "prefill,prefill,decode,decode,decode"


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (["--executors", "2"], "", "--executors: 2 is not allowed; allowed: without it, because [[executors]] in FILE describe 3"),
        (["--roles", "both"], "", "--roles: 'both' is not allowed; allowed: without it, because [[executors]] give roles"),
        ([], "[[executors]]\nnum_kv_block = 1", "unknown key 'num_kv_block' in [[executors]] number 3 of FILE; did you mean num_kv_blocks?"),
        ([], "[[executors]]\nrole = 'x'", "role in [[executors]] number 3 of FILE: 'x' is not allowed; allowed: both, decode, prefill"),
        ([], "[[executors]]\ncount = 3\nmax = 2", "max in [[executors]] number 3 of FILE: 2 is not allowed; allowed: at least 3"),
        ([], "[[executors]]\ncount = 1\nmin = 2", "min in [[executors]] number 3 of FILE: 2 is not allowed; allowed: at most count, which is 1"),
        ([], "[[executors]]\nmax = 63", "[[executors]] in FILE: 68 executors are not allowed; allowed: 64 in all tables"),
        ([], "[cluster]\nengine = 'x'", "engine in [cluster] of FILE: 'x' is not allowed; allowed: ray"),
    ],
)  # fmt: skip
def test_what_is_refused(file: Path, words: list[str], text: str, message: str) -> None:
    file.write_text(TWO_KINDS + text)
    with pytest.raises(ConfigurationError) as refused:
        plan_of(file, *words)
    assert str(refused.value) == message.replace("FILE", str(file))


def test_a_table_where_a_list_of_tables_belongs_is_refused(file: Path) -> None:
    file.write_text("[executors]\ncount = 2")
    with pytest.raises(ConfigurationError, match=r"executors in .* is not a list of tables; write \[\[executors\]\]"):
        plan_of(file)


def test_each_rank_takes_a_share_of_the_cores_or_a_device() -> None:
    shares = (Share(2), Share(1), Share(4, on_cuda=True), Share(1, on_cuda=True))
    members = [Member("executor", 0, number, Layout(1, 4, shares)) for number in range(4)]
    assert [sorted(member.share_of(range(8))) for member in members[:2]] == [[0, 1, 2, 3], [4, 5]]
    assert [member.environment.get(CUDA_DEVICES_VARIABLE) for member in members] == [None, None, "0,1,2,3", None]
    second = Member("executor", 1, 3, Layout(2, 4, shares))
    assert second.of_its_own({"device": headway.planning.plan.Given("cuda", "--device")})["device"].value == "cuda:9"


def test_roles_that_cannot_work_together_are_said_to_be_the_tables(tmp_path: Path) -> None:
    path = tmp_path / "headway.toml"
    path.write_text('[executor]\nbackend = "simulated"\n[[executors]]\nrole = "prefill"\n')
    with pytest.raises(
        ConfigurationError, match=r"^\[\[executors\]\]: 'prefill' is not allowed; allowed: at least one"
    ):
        plan_of(path)
