"""``headway plan`` as a user meets it: what it prints and writes, and what a mistake is answered with."""

import json
import re

import pytest

from headway.__main__ import main
from headway_lab.plan import command

SMALL = ("plan", "--num-requests", "50", "--output-tokens", "12", "--devices", "8", "--max-num-seqs", "32")
ASKED = ("--rate", "40", "--ttft-slo-ms", "150", "--itl-slo-ms", "30")
LARGE = ("--model", "llama-3-70b", "--prompt-tokens", "1000", "--ttft-slo-ms", "2000", "--itl-slo-ms", "30")


def run(capsys, *flags, exit_code=0):
    found = main([*SMALL, *flags])
    output = capsys.readouterr()
    assert found == exit_code, output.err
    return output.out


def line_of(printed, name):
    (line,) = [line for line in printed.splitlines() if line.startswith(f"{name} ")]
    return line


def test_both_systems_the_hand_off_and_the_verdict_are_told(capsys):
    printed = run(capsys, *ASKED)
    assert printed.startswith(
        "llama-3-8b on h100, 8 a node, fast interconnect; 40 requests/s, 90% within 150 ms to the first token and gaps of "
        "30 ms; seed 0\n"
    )
    system = r": \d+ devices?, [\d.]+ requests/s per device at most; at 40 requests/s [\d.]+% keep both objectives"
    executors = r"\d executors? for (prefill|decode) tp \d"
    assert re.fullmatch(rf"split +{executors} \+ {executors}{system}", line_of(printed, "split"))
    assert re.fullmatch(rf"together +\d executors? tp \d{system}", line_of(printed, "together"))
    # 32 layers, 8 KV heads of 128, keys and values of 2 bytes: 128 KiB a token.
    assert line_of(printed, "hand-off").startswith(
        "hand-off   64 MiB for a prompt of 512 tokens, the mean: 1.3 ms at 50 GB/s, 0."
    )
    assert re.fullmatch(r"better +(split|together): \d+ devices? (each|instead of \d+), .*", line_of(printed, "better"))


def test_the_same_seed_writes_the_same_bytes(capsys, tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, seed in zip(paths, ("7", "7", "8"), strict=True):
        run(capsys, *ASKED, "--prompt-tokens", "uniform:100,900", "--seed", seed, "--json", str(path))
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again
    assert first != other
    document = json.loads(first)
    assert document["schema"] == 1
    assert document["algorithm"] == 1
    assert document["better"] in {"split", "together"}
    assert document["options"]["seed"] == 7
    assert document["hand_off"]["bytes"] == document["hand_off"]["prompt_tokens"] * 128 * 1024
    chosen = {(role["phase"], *role["degrees"].values()): role for role in document["split"]["roles"]}
    for executor in document["executors"]:
        role = chosen.get((executor["phase"], *executor["degrees"].values()))
        if role is not None:
            assert executor["goodput"] == role["goodput"]
            assert any(trial["rate"] == pytest.approx(role["goodput"]) for trial in executor["trials"])
    assert document["split"]["check"]["share"] >= 0.9


@pytest.mark.deep
def test_executors_reach_the_rate_by_their_goodput(capsys, tmp_path):
    path = tmp_path / "plan.json"
    run(capsys, *ASKED, "--rate", "400", "--json", str(path))
    document = json.loads(path.read_bytes())
    for system in ("split", "together"):
        for role in document[system]["roles"]:
            assert role["num_executors"] * role["goodput"] >= 400
        devices = [role["num_executors"] * role["degrees"]["tensor_parallel"] for role in document[system]["roles"]]
        assert document[system]["num_devices"] == sum(devices) <= 8


@pytest.mark.deep
def test_a_large_model_with_short_gaps_is_better_split(capsys):
    """Its prompts and decodes want different degrees; at a rate that fills both, a split needs fewer devices."""
    printed = run(capsys, *LARGE, "--rate", "18", "--gaps", "mean", "--devices", "32", "--output-tokens", "30")
    assert line_of(printed, "better").startswith("better     split: ")


@pytest.mark.deep
def test_on_a_slow_interconnect_each_stage_of_both_is_on_one_node(capsys, tmp_path):
    path = tmp_path / "plan.json"
    flags = (*LARGE, "--rate", "4", "--gaps", "mean", "--interconnect", "slow", "--json", str(path))
    printed = run(capsys, *flags)
    document = json.loads(path.read_bytes())
    assert document["algorithm"] == 2
    assert document["pairs"]
    for pair in document["pairs"]:
        for phase in ("prefill", "decode"):
            assert pair[phase]["pipeline_parallel"] % pair["num_nodes"] == 0
        assert pair["num_devices"] <= 8 * pair["num_nodes"]
    first, second = document["split"]["roles"]
    assert first["num_executors"] == second["num_executors"]
    assert "at 360 GB/s" in line_of(printed, "hand-off")  # 0.8 of the link inside a node


def test_too_few_devices_carry_a_part_of_the_rate(capsys):
    printed = run(capsys, *ASKED, "--rate", "150", "--devices", "1", exit_code=command.NOT_ENOUGH_EXIT_CODE)
    assert re.search(r"1 executor tp 1: 1 device, .* at only [\d.]+ requests/s", line_of(printed, "together"))
    assert line_of(printed, "better").endswith("--devices 1 is not enough for this rate and these objectives")


def test_a_hand_off_that_takes_too_long_leaves_the_executors_together(capsys):
    printed = run(capsys, *ASKED, "--transfer-bandwidth-gb-s", "1")
    # 64 MiB at 1 GB/s take 67 ms, more than a gap may.
    assert re.search(
        r"^split +no executor for decode keeps the objective on the gaps: a request alone needs 69\.\d ms at best, "
        r"hand-off included$",
        printed,
        re.MULTILINE,
    )
    assert line_of(printed, "better") == "better     together, since nothing else keeps the objectives"


def test_the_plan_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    run(capsys, *ASKED, "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_answers_of_one_token_need_no_decode(capsys, tmp_path):
    path = tmp_path / "plan.json"
    printed = run(capsys, *ASKED, "--output-tokens", "1", "--json", str(path))
    assert line_of(printed, "better").startswith("better     together: 1 device instead of 2")
    decode = json.loads(path.read_bytes())["split"]["roles"][1]
    assert (decode["phase"], decode["num_executors"]) == ("decode", 1)


def test_one_executor_cannot_be_split(capsys):
    printed = run(capsys, *ASKED, "--devices", "1", "--interconnect", "slow")
    assert line_of(printed, "split") == "split      no such system of at most 1 x h100 keeps both objectives"


def test_a_search_can_be_cancelled(capsys, monkeypatch):
    def interrupted(options, on_trial):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "make_plan", interrupted)
    assert main([*SMALL, *ASKED]) == 130
    assert capsys.readouterr().err == "headway plan: cancelled\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rate", "0"), "--rate: '0' is not allowed"),
        (("--attainment", "1"), "--attainment: '1' is not allowed"),
        (("--prompt-tokens", "many"), "--prompt-tokens: 'many' is not allowed; allowed: N, uniform"),
        (("--block-size", "12"), "--block-size: 12 is not allowed; allowed: a power of two"),
        (("--model", "measured"), "--model: measured is not allowed without --hardware-file; allowed: another model"),
        (
            ("--model", "llama-3-70b", "--devices", "1"),
            "--model: llama-3-70b is not allowed, since it fits into no executor of at most 1 x h100",
        ),
        (
            ("--ttft-slo-ms", "4"),
            "--ttft-slo-ms: 4 is not allowed, since no executor keeps it even with one request at a time; allowed: at least 5",
        ),
        (
            ("--itl-slo-ms", "1"),
            "--itl-slo-ms: 1 is not allowed, since no executor keeps it even with one request at a time; allowed: at least 3",
        ),
        (
            ("--rate", "9000", "--devices", "1"),
            "--rate: 9000 is not allowed, since no system of at most 1 x h100 keeps both",
        ),
        (("--json", "/nowhere/plan.json"), "--json: '/nowhere/plan.json' is not allowed"),
    ],
)
def test_a_mistake_is_answered_in_one_line(capsys, flags, message):
    assert main([*SMALL, *ASKED, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"headway plan: {message}")
    assert error.count("\n") == 1
