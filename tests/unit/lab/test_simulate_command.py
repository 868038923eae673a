"""``headway simulate`` as a user meets it: what it prints and writes, and what a mistake is answered with."""

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from headway.__main__ import main
from headway.flags.settings import ConfigurationError
from headway.terminal.progress import ProgressLine
from headway_lab.published_comparison import ORDERINGS, PUBLISHED
from headway_lab.simulate.cases import Case, limit_settings, make_cases
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.simulate.options import SimulationOptions
from headway_lab.simulate.report import knee_of
from headway_lab.simulate.world import make_world, simulate
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import SchedulerLimits

SMALL = (
    "simulate",
    "--num-requests",
    "24",
    "--users",
    "6",
    "--prompt-tokens",
    "uniform:40,200",
    "--output-tokens",
    "12",
)


def run(capsys, *flags):
    exit_code = main([*SMALL, *flags])
    output = capsys.readouterr()
    assert exit_code == 0, output.err
    return output.out


def test_a_line_per_case_and_what_was_simulated_above(capsys):
    lines = run(capsys, "--compare", "max_num_batched_tokens=512,128", "--seed", "3").splitlines()
    assert re.fullmatch(r"llama-3-8b on 1 x h100, \d+ KV blocks of 16; 24 requests, 6 users; seed 3", lines[0]), lines[
        0
    ]
    assert lines[2].split()[:3] == ["case", "output", "tok/s"]
    assert [line.split()[0] for line in lines[3:]] == ["max_num_batched_tokens=512", "max_num_batched_tokens=128"]
    assert "inf" not in "".join(lines)
    assert "nan" not in "".join(lines)


def test_the_same_seed_writes_the_same_bytes(capsys, tmp_path):
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path, seed in zip(paths, ("7", "7", "8"), strict=True):
        run(capsys, "--arrivals", "poisson", "--rate", "50", "--seed", seed, "--json", str(path))
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again
    assert first != other
    document = json.loads(first)
    assert document["schema"] == 1
    assert document["options"]["seed"] == 7
    assert document["capacity"]["num_blocks"] > 1000
    (case,) = document["cases"]
    assert case["limits"] == msgspec.to_builtins(SchedulerLimits())
    assert len(case["requests"]) == case["totals"]["num_finished"] == 24
    assert len(case["steps"]["start_s"]) == len(case["steps"]["step_ms"]) == case["totals"]["num_steps"]
    assert "wall_s" not in case


@pytest.mark.parametrize("flags", [("--compare",), ("--compare", "sources")])
def test_the_published_comparison_is_run_again(capsys, tmp_path, flags):
    pytest.importorskip("matplotlib")
    result, picture = tmp_path / "result.json", tmp_path / "result.png"
    printed = run(capsys, *flags, "--users", "8", "--json", str(result), "--png", str(picture))
    assert printed.startswith("llama-3-70b on 1 x compute-bound")
    assert "24 requests, 8 users" in printed
    lines = printed.splitlines()
    assert [line.split("  ")[0] for line in lines[3:8]] == list(PUBLISHED)
    assert "2800 / " in printed
    verdicts = [line for line in lines if line.startswith(("holds ", "does not hold "))]
    comparison = json.loads(result.read_bytes())["comparison"]
    assert [finding["text"] for finding in comparison["orderings"]] == [ordering.text for ordering in ORDERINGS]
    for verdict, finding in zip(verdicts, comparison["orderings"], strict=True):
        assert finding["text"] in verdict
        assert verdict.startswith("holds" if finding["holds"] else "does not hold")
    assert comparison["simulated"].keys() == comparison["published"].keys() == PUBLISHED.keys()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_pipeline_is_named_and_holds_a_larger_model(capsys):
    flags = (
        "--model",
        "llama-3-70b",
        "--tensor-parallel",
        "2",
        "--pipeline-parallel",
        "2",
        "--max-steps-in-flight",
        "3",
    )
    assert run(capsys, *flags).startswith("llama-3-70b on 2 stages of 2 x h100")


def test_limits_given_beside_the_published_comparison_hold_for_all_its_cases(capsys, tmp_path):
    result = tmp_path / "result.json"
    run(capsys, "--compare", "--max-num-seqs", "4", "--model", "llama-3-8b", "--json", str(result))
    document = json.loads(result.read_bytes())
    assert document["model"]["name"] == "llama-3-8b"
    assert {case["limits"]["max_num_seqs"] for case in document["cases"]} == {4}


def test_a_sweep_marks_the_knee_and_draws_it(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture, result = tmp_path / "sweep.png", tmp_path / "sweep.json"
    flags = ("--prompt-tokens", "1500", "--sweep-budget", "64,256,1024,4096")
    printed = run(capsys, *flags, "--png", str(picture), "--json", str(result))
    assert picture.read_bytes().startswith(b"\x89PNG")
    knee = json.loads(result.read_bytes())["knee"]
    assert knee is not None
    assert f"{knee} *" in printed


def test_one_case_is_drawn_over_time(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    run(capsys, "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_trace_is_run_as_it_is(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            json.dumps({"arrival_s": number / 4, "prompt_tokens": 50, "output_tokens": 5}) + "\n" for number in range(9)
        )
    )
    printed = run(capsys, "--trace", str(path))
    assert "9 requests, trace" in printed
    assert "/4.00 " in printed


def test_a_tenant_of_a_trace_cannot_steer_the_terminal(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    line = {"arrival_s": 0, "prompt_tokens": 50, "output_tokens": 5}
    path.write_text("".join(json.dumps({**line, "tenant": name}) + "\n" for name in ("a\x1b[31mb", "c\nd")))
    printed = run(capsys, "--trace", str(path))
    assert "\x1b" not in printed
    assert "a?[31mb " in printed
    assert "c?d " in printed


def test_there_are_dashes_where_there_is_nothing_to_measure(capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 1, "prompt_tokens": 9000, "output_tokens": 3}')
    printed = run(capsys, "--trace", str(path), "--compare", "order=fcfs,priority", "--png", str(tmp_path / "x.png"))
    assert printed.count("-/-/-") == 4
    assert "order=fcfs: 1 of 1 requests were refused" in printed


def test_each_tenant_has_a_line_of_its_own(capsys, tmp_path):
    path = tmp_path / "result.json"
    flags = ("--num-requests", "60", "--users", "20", "--max-num-seqs", "4", "--order", "priority")
    printed = run(capsys, *flags, "--tenant", "chat=1:realtime", "--tenant", "batch=3:low", "--json", str(path))
    assert [line.split()[0] for line in printed.splitlines()[3:]] == ["as", "batch", "chat"]
    totals = json.loads(path.read_bytes())["cases"][0]["totals"]
    batch, chat = totals["tenants"]["batch"], totals["tenants"]["chat"]
    assert batch["num_finished"] + chat["num_finished"] == 60
    assert batch["output_tokens_per_s"] + chat["output_tokens_per_s"] == pytest.approx(totals["output_tokens_per_s"])
    assert chat["ttft_ms"]["p99"] < batch["ttft_ms"]["p50"]


def test_goodput_counts_who_got_what_was_promised(capsys, tmp_path):
    path = tmp_path / "result.json"
    flags = ("--num-requests", "60", "--users", "20", "--max-num-seqs", "4", "--order", "priority")
    tenants = ("--tenant", "chat=1:realtime:200:100", "--tenant", "batch=3:low", "--tenant", "other=1:low:1:0")
    printed = run(capsys, *flags, *tenants, "--itl-slo-ms", "50", "--json", str(path))
    assert "goodput req/s" in printed
    names = [line.split("  ")[1].strip() for line in printed.splitlines() if line.startswith("  ")]
    assert names == ["batch", "chat", "other", "priority realtime", "priority low"]
    (case,) = json.loads(path.read_bytes())["cases"]
    totals = case["totals"]
    assert totals["tenants"]["other"]["goodput_requests_per_s"] == 0.0
    assert totals["tenants"]["chat"]["goodput_requests_per_s"] > 0.0
    assert totals["priorities"]["low"]["num_finished"] == sum(
        totals["tenants"][name]["num_finished"] for name in ("batch", "other")
    )
    assert totals["goodput_requests_per_s"] == pytest.approx(
        totals["requests_per_s"] * sum(request["meets_objectives"] for request in case["requests"]) / 60
    )
    for request in case["requests"]:
        if request["tenant"] == "batch":
            assert request["meets_objectives"] == (max(request["itl_ms"]) <= 50)


def test_a_device_from_a_file(capsys, tmp_path):
    path = tmp_path / "device.json"
    accelerator = msgspec.structs.replace(ACCELERATORS["h100"], name="this-machine", peak_flops=1e12)
    model = msgspec.structs.replace(MODEL_SHAPES["llama-3-8b"], name="small", num_layers=2, bytes_per_value=4)
    path.write_bytes(msgspec.json.encode({"accelerator": accelerator, "model": model, "commit": "abc"}))
    assert run(capsys, "--hardware-file", str(path)).startswith("llama-3-8b on 1 x this-machine")
    assert run(capsys, "--hardware-file", str(path), "--model", "measured").startswith("small on 1 x this-machine")
    path.write_bytes(msgspec.json.encode({"accelerator": accelerator}))
    assert main([*SMALL, "--hardware-file", str(path), "--model", "measured"]) == 2
    assert "holds no model" in capsys.readouterr().err
    path.write_text('{"accelerator": {"name": "x", "peak_flops": -1}}')
    assert main([*SMALL, "--hardware-file", str(path)]) == 2
    assert "peak_flops" in capsys.readouterr().err


def test_every_limit_of_the_scheduler_is_a_flag_and_can_be_compared(capsys):
    assert list(limit_settings()) == list(SchedulerLimits.__struct_fields__)
    run(capsys, "--order", "priority", "--no-enable-prefix-caching", "--max-num-seqs", "3")
    assert "enable_prefix_caching=false" in run(capsys, "--compare", "enable_prefix_caching=true,false")


def test_placements_are_compared_and_moves_reported(capsys, tmp_path):
    path = tmp_path / "result.json"
    flags = ("--executors", "2", "--roles", "prefill,decode", "--compare", "placement=aggregated,disaggregated")
    text = run(capsys, *flags, "--json", str(path))
    assert "on 2 executors (prefill,decode) of 1 x h100 each" in text
    assert "placement=disaggregated: 24 moves between executors with " in text
    assert "placement=aggregated: 24 moves" not in text
    apart, by_role = msgspec.json.decode(path.read_bytes())["cases"]
    assert (apart["placement"], by_role["placement"]) == ("aggregated", "disaggregated")
    assert (apart["totals"]["num_moved"], by_role["totals"]["num_moved"]) == (0, 24)
    assert by_role["totals"]["num_pulled_tokens"] > 0


def test_cases_are_combined_or_listed():
    combined = make_cases({}, {"order": "fcfs,priority", "max_num_seqs": "8,16"}, (), ())
    assert [case.label for case in combined] == [
        "order=fcfs, max_num_seqs=8",
        "order=fcfs, max_num_seqs=16",
        "order=priority, max_num_seqs=8",
        "order=priority, max_num_seqs=16",
    ]
    assert combined[3].limits == SchedulerLimits(order="priority", max_num_seqs=16)
    listed = make_cases({}, {}, (), ("order=priority,max_num_seqs=8", "max_num_batched_tokens=99"))
    assert [case.limits for case in listed] == [
        SchedulerLimits(order="priority", max_num_seqs=8),
        SchedulerLimits(max_num_batched_tokens=99),
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "gpt-9"), "--model: 'gpt-9' is not allowed"),
        (("--hardware", "abacus"), "--hardware: 'abacus' is not allowed"),
        (("--tensor-parallel", "3"), "--tensor-parallel: 3 is not allowed; allowed: a power of two"),
        (
            ("--pipeline-parallel", "3"),
            "--pipeline-parallel: 3 is not allowed; allowed: a divisor of 32, the layers of llama-3-8b",
        ),
        (("--block-size", "12"), "--block-size: 12 is not allowed; allowed: a power of two"),
        (("--model", "llama-3-70b"), "llama-3-70b does not fit into 1 x h100"),
        (("--prompt-tokens", "many"), "--prompt-tokens: 'many' is not allowed; allowed: N, uniform"),
        (("--tenant", "a=none"), "--tenant: 'a=none' is not allowed"),
        (("--tenant", "a=1:high:fast"), "--tenant: 'a=1:high:fast' is not allowed; allowed: NAME=SHARE[:PRIORITY"),
        (("--ttft-slo-ms", "-1"), "--ttft-slo-ms: '-1' is not allowed"),
        (("--slowdown", "3"), "--slowdown: '3' is not allowed; allowed: AT_S:FACTOR"),
        (("--noise", "-1"), "--noise: '-1' is not allowed"),
        (("--host-bandwidth-gb-s", "-1"), "--host-bandwidth-gb-s: '-1' is not allowed"),
        (
            ("--roles", "prefill,decode"),
            "--roles: 'prefill,decode' is not allowed with one executor; allowed: --executors",
        ),
        (
            ("--executors", "2", "--roles", "prefill,decode", "--replicas"),
            "--roles: 'prefill,decode' is not allowed beside --replicas",
        ),
        (("--executors", "2", "--roles", "prefill,prefill"), "allowed: at least one executor for decoding"),
        (("--executors", "2", "--roles", "cook"), "--roles: 'cook' is not allowed; allowed: prefill, decode, both"),
        (("--executors", "2", "--placement", "best"), "--placement: 'best' is not allowed; allowed: "),
        (("--executors", "2", "--compare", "placement=best"), "--compare placement: 'best' is not allowed"),
        (("--transfer-latency-us", "-1"), "--transfer-latency-us: '-1' is not allowed"),
        (("--model", "measured"), "--model: measured is not allowed without --hardware-file"),
        (("--hardware-file", "nowhere.json"), "--hardware-file: cannot read 'nowhere.json'"),
        (("--compare", "--case", "order=fcfs"), "allowed: alone"),
        (("--compare", "--compare", "order=fcfs"), "allowed: alone"),
        (("--rate", "0"), "--rate: '0' is not allowed"),
        (("--rate", "9"), "--rate: is not allowed with closed arrivals"),
        (("--arrivals", "poisson", "--variation", "9"), "--variation: is not allowed with poisson arrivals"),
        (("--trace", "a.jsonl", "--rate", "9"), "--rate: is not allowed beside --trace"),
        (("--case", "order=fcfs,order=fair"), "--case: 'order=fcfs,order=fair' has order twice"),
        (("--compare", "xyzzy=1"), "unknown limit 'xyzzy'; allowed: aging_s, batching, "),
        (("--warmup-requests", "24"), "--warmup-requests: 24 is not allowed"),
        (("--max-model-len", "1"), "--max-model-len: 1 is not allowed; allowed: 2 to 8192"),
        (("--max-model-len", "8193"), "--max-model-len: 8193 is not allowed"),
        (("--prefix-tokens", "9000"), "--prefix-tokens: 9000 is not allowed"),
        (("--trace", "nowhere.jsonl"), "--trace: cannot read 'nowhere.jsonl'"),
        (("--max-num-seqs", "0"), "--max-num-seqs: 0 is not allowed"),
        (("--order", "random"), "--order: 'random' is not allowed; allowed: "),
        (("--compare", "max_num_seq=1"), "unknown limit 'max_num_seq'; did you mean max_num_seqs?"),
        (("--compare", "max_num_seqs="), "allowed: FIELD=VALUE"),
        (("--compare", "max_num_seqs=8,x"), "--compare max_num_seqs: 'x' is not allowed"),
        (("--case", "max_num_seqs"), "--case: 'max_num_seqs' is not allowed"),
        (("--sweep-budget", "128,0"), "0 is not allowed"),
        (("--sweep-budget", "8", "--case", "order=fcfs"), "do not go together"),
        (("--json", "no/such/directory/x.json"), "--json: 'no/such/directory/x.json' is not allowed"),
    ],
)
def test_a_mistake_is_answered_with_one_line_and_exit_code_2(capsys, flags, message):
    assert main([*SMALL, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("headway simulate: ")
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_flag_is_answered_with_the_nearest(capsys):
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, "--hardwear", "h100"])
    assert ended.value.code == 2
    assert "did you mean --hardware?" in capsys.readouterr().err


def test_limits_that_only_the_scheduler_can_judge_are_refused_in_one_line():
    world = make_world(SimulationOptions(num_requests=1))
    with pytest.raises(ConfigurationError, match=r"^order=random: the scheduler refuses 'random'$"):
        simulate(world, Case(label="order=random", limits=SchedulerLimits(order="random")))


def test_a_scheduler_that_stops_is_reported_in_one_line(capsys, monkeypatch):
    class Stopped:
        def __init__(self, limits, capacity, epoch):
            self.core = Scheduler(limits, capacity, epoch)

        def __getattr__(self, name):
            return getattr(self.core, name)

        def schedule(self, now):
            return None

    monkeypatch.setattr("headway_lab.simulate.world.Scheduler", Stopped)
    assert main([*SMALL]) == 1
    assert capsys.readouterr().err == (
        "headway simulate: the scheduler has stopped for ever: 6 requests wait and nothing runs\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_result_that_cannot_be_written_is_answered_with_one_line(capsys):
    assert main([*SMALL, "--json", "/dev/full"]) == 2
    assert capsys.readouterr().err == "headway simulate: --json: cannot write '/dev/full': No space left on device\n"


def test_a_picture_without_matplotlib_is_refused_before_the_run(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*SMALL, "--png", "x.png"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_simulator_needs_no_torch_grpc_or_matplotlib():
    program = (
        "import sys; from headway.__main__ import main; "
        "code = main(['simulate', '--num-requests', '2', '--output-tokens', '2']); "
        "sys.exit(code or str({'torch', 'grpc', 'matplotlib'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    assert "output tok/s" in done.stdout


def test_the_knee_is_where_the_curve_bends_away():
    world = make_world(SimulationOptions(num_requests=4, output_tokens="4"))
    result = simulate(world, make_cases({}, {}, (), ())[0])

    def at(itl_ms, throughput):
        latency = msgspec.structs.replace(result.totals.itl_ms, p99=itl_ms)
        totals = msgspec.structs.replace(result.totals, itl_ms=latency, output_tokens_per_s=throughput)
        return msgspec.structs.replace(result, totals=totals)

    curve = [at(10.0, 100.0), at(90.0, 205.0), at(20.0, 190.0), at(50.0, 200.0)]
    assert knee_of(curve) is curve[2]
    assert knee_of(curve[:2]) is None
    assert knee_of([at(10.0, 100.0)] * 3) is None


class Terminal:
    def __init__(self, is_terminal):
        self.is_terminal = is_terminal
        self.text = ""

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_is_drawn_now_and_then_on_a_terminal_and_nowhere_else():
    now = [0.0]
    terminal, file = Terminal(True), Terminal(False)
    for out in (terminal, file):
        line = ProgressLine(out, clock=lambda: now[0])
        line.show(1, 10, "requests")
        now[0] += 1.0
        line.show(5, 10, "requests, 3 s simulated")
        line.show(6, 10, "requests, 4 s simulated")
        line.erase()
    assert terminal.text.count("5 of 10 requests, 3 s simulated") == 1
    assert "6 of 10" not in terminal.text
    assert terminal.text.endswith("\r\x1b[K")
    assert not file.text


def test_proposals_that_are_often_right_make_more_of_a_step(capsys, tmp_path):
    rates = []
    for flags in ((), ("--num-speculative-tokens", "4", "--speculative-acceptance", "0.8")):
        path = tmp_path / f"{len(flags)}.json"
        run(capsys, "--output-tokens", "100", *flags, "--json", str(path))
        totals = json.loads(path.read_bytes())["cases"][0]["totals"]
        assert totals["num_finished"] == 24
        rates.append(totals["output_tokens_per_s"])
    assert rates[1] > 1.3 * rates[0]


EXECUTORS = ("--executors", "3", "--replicas", "--arrivals", "poisson", "--rate", "40", "--num-requests", "90")


def test_several_executors_and_replicas(tmp_path, capsys):
    documents = []
    for name in "ab":
        path = tmp_path / name
        assert main(["simulate", *EXECUTORS, "--prefixes", "3", "--prefix-tokens", "500", "--json", str(path)]) == 0
        documents.append(path.read_bytes())
    assert documents[0] == documents[1]
    one_queue, replicas = json.loads(documents[0])["cases"]
    assert replicas["label"] == "replicas"
    for case in (one_queue, replicas):
        assert case["totals"]["num_finished"] == 90
        assert len(case["executors"]) == 3
        assert sum(one["share_of_requests"] for one in case["executors"]) == pytest.approx(1.0)
        assert 0 < case["totals"]["device_busy_share"] <= 1
    assert [round(one["share_of_requests"], 3) for one in replicas["executors"]] == [0.333] * 3
    assert one_queue["totals"]["prefix_hit_rate"] > replicas["totals"]["prefix_hit_rate"]
    printed = capsys.readouterr().out
    assert "3 executors of 1 x h100 each" in printed
    assert "replicas: by executor: 33/33/33% of the requests" in printed


def test_one_executor_has_no_figures_of_its_own(tmp_path):
    assert main(["simulate", "--num-requests", "20", "--json", str(tmp_path / "one")]) == 0
    assert "executors" not in json.loads((tmp_path / "one").read_bytes())["cases"][0]


def test_replicas_need_executors(capsys):
    assert main(["simulate", "--replicas", "--num-requests", "20"]) == 2
    assert "replicas" in capsys.readouterr().err


def test_late_requests_are_shed_from_the_one_queue(tmp_path):
    arguments = [*EXECUTORS, "--ttft-slo-ms", "300", "--order", "deadline", "--shed-late", "--prompt-tokens", "6000"]
    assert main(["simulate", *arguments, "--json", str(tmp_path / "shed")]) == 0
    for case in json.loads((tmp_path / "shed").read_bytes())["cases"]:
        totals = case["totals"]
        assert totals["num_rejected"] > 0
        assert totals["num_finished"] + totals["num_rejected"] == totals["num_requests"] == 90


def test_requests_that_were_cut_or_refused_are_told_with_the_reason(capsys, tmp_path):
    flags = ("--num-requests", "2", "--output-tokens", "2")
    assert main(["simulate", *flags, "--prompt-tokens", "9000"]) == 0
    assert "; 2 requests, 2 of them cut to the context of 8192 tokens, 32 users; " in capsys.readouterr().out
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 9000, "output_tokens": 2}\n')
    assert main(["simulate", "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "; 1 request, trace " in printed
    assert "1 of 1 requests were refused (the first: prompt: 9000 tokens leave no room for another; " in printed


@pytest.mark.parametrize(("given", "missing"), [('"prefix": "a"', "prefix_tokens"), ('"prefix_tokens": 4', "prefix")])
def test_half_a_prefix_in_a_trace_is_refused(capsys, tmp_path, given, missing):
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 2, {given}}}\n')
    assert main(["simulate", "--trace", str(path)]) == 2
    assert f"without {missing} is not allowed; allowed: both or neither" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model", "num_layers", 0),
        ("model", "num_heads", -1),
        ("model", "bytes_per_value", 0),
        ("model", "context_length", 1),
        ("accelerator", "peak_flops", 1e-300),
    ],
)
def test_a_device_file_with_impossible_dimensions_is_refused(capsys, tmp_path, part, field, value):
    described = {
        "accelerator": msgspec.to_builtins(ACCELERATORS["h100"]),
        "model": msgspec.to_builtins(MODEL_SHAPES["llama-3-8b"]),
    }
    described[part][field] = value
    path = tmp_path / "device.json"
    path.write_bytes(msgspec.json.encode(described))
    assert main([*SMALL, "--hardware-file", str(path), "--model", "measured"]) == 2
    assert f"at `$.{part}.{field}`" in capsys.readouterr().err
