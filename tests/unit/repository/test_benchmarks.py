"""Every benchmark still runs, with the smallest load there is, and writes what a result consists of.

Those that take long even so run in ``make deep``; of each kind, one runs here.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import headway
from headway.__main__ import main as headway_main
from headway_kernels.cpu.library import installed_variants, runs_here
from headway_scheduler.core.admission.orders import ORDERS

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
_ONLY_IN_DEEP = (
    "bench_truth compare executors_or_replicas flight_recorder goodput gpu_stack gpu_steps load_generators smg_overhead "
    "speculation"
)
_OF_SMG = "executors_or_replicas smg_overhead"
PROVENANCE = {"commit", "seed", "hardware"}


def run(name, *arguments, cwd):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.deep
def test_torch_cpu(tmp_path):
    result = tmp_path / "result.json"
    load = ("--concurrency", "1,2", "--prompt", "8", "--output", "4", "--repetitions", "1", "--num-kv-blocks", "128")
    printed = run(
        *("torch_cpu.py", "--model", str(DEMO_MODEL), "--quantization", "none,int8", *load, "--json", str(result)),
        cwd=tmp_path,
    )
    record = json.loads(result.read_text())
    assert PROVENANCE | {"torch", "load", "limits", "startup_s"} <= record.keys()
    assert [(row["quantization"], row["concurrency"]) for row in record["results"]] == [
        ("none", 1),
        ("none", 2),
        ("int8", 1),
        ("int8", 2),
    ]
    for row in record["results"]:
        assert min(row["output_rate"], row["prefill_rate"], row["floor_step_ms"]) > 0
        assert str(row["output_rate"]) in printed


def test_loss_of_codes(tmp_path):
    result = tmp_path / "result.json"
    load = ("--tokens", "40", "--window", "20", "--chunk", "8", "--dtypes", "float32")
    printed = run("loss_of_codes.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert PROVENANCE | {"backend", "tokens", "results"} <= record.keys()
    exact, coded = record["results"]
    assert 1 < exact["nats_per_token"] < 8
    assert 0 < abs(coded["relative_difference"]) < 0.05
    assert f"{coded['nats_per_token']:.5f}" in printed


@pytest.mark.deep
def test_adapters(tmp_path):
    result = tmp_path / "result.json"
    load = ("--rank", "2", "--requests", "2", "--output", "4", "--rounds", "1", "--model", str(DEMO_MODEL))
    run("adapters.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert PROVENANCE | {"load", "results"} <= record.keys()
    assert list(record["results"]) == ["none", "one for all", "one each"]
    assert all(row["step_ms"] > 0 for row in record["results"].values())
    run("adapters.py", "--loading", *load, "--json", str(result), cwd=tmp_path)
    rows = json.loads(result.read_text())["results"]
    assert list(rows) == ["no loading", "between steps", "beside them"]
    assert all(0 < row["gap_ms"] <= row["longest_gap_ms"] for row in rows.values())


def test_prompt_work(tmp_path):
    result = tmp_path / "result.json"
    load = ("--prompt", "200", "--requests", "3", "--rounds", "1", "--model", str(DEMO_MODEL))
    run("prompt_work.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert PROVENANCE | {"load", "results"} <= record.keys()
    computed = [row["prompt_tokens_computed"] for row in record["results"].values()]
    # Of 200 tokens, twelve blocks of sixteen are shared by those who waited for them.
    assert computed == [200, 200, 200, 200 + 2 * 8, 3 * 200]


def test_cpu_products(tmp_path):
    variants = [path for path in installed_variants() if runs_here(path)]
    if not variants:
        pytest.skip("no CPU kernels that run here")
    result = tmp_path / "result.json"
    load = ("--shapes", "output,gate_up", "--rows", "1,3", "--repetitions", "1", "--bytes-of-weights", "1")
    forms = ("float32", "int8", "int4", "q8_0-exact", "iq4_xs-exact")
    printed = run("cpu_products.py", *load, "--forms", ",".join(forms), "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [(row["form"], row["name"], row["rows"]) for row in record["results"]] == [
        (form, name, rows) for name in ("output", "gate_up") for rows in (1, 3) for form in forms
    ]
    for row in record["results"]:
        assert len(row["giga_operations_per_s"]) == len(row["of_float32"]) == len(variants)
        assert row["form"] != "float32" or set(row["of_float32"].values()) == {1.0}
        assert all(rate > 0 and str(rate) in printed for rate in row["giga_operations_per_s"].values())


@pytest.mark.deep
def test_ranks(tmp_path):
    if not any(runs_here(path) for path in installed_variants()):
        pytest.skip("no CPU kernels that run here")
    result = tmp_path / "result.json"
    load = ("--layers", "2", "--hidden", "128", "--vocab", "256", "--steps", "2", "--rounds", "1", "--rows", "2")
    printed = run("ranks.py", *load, "--ways", "one rank,TP over shared memory", "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE | {"load", "results", "gathers"}
    alone, group = record["results"]
    assert min(alone["decode_ms"], group["decode_ms"], group["waiting_ms"], record["gathers"][0]["gather_us"]) > 0
    # Two before the first layer, four in each, one more for the rows that draw and one for the logits.
    assert group["meetings"] == 2 + 4 * 2 + 2
    assert "TP over shared memory" in printed


def test_experts(tmp_path):
    result = tmp_path / "result.json"
    sizes = ("--layers", "2", "--hidden", "64", "--inner", "32", "--experts", "4", "--chosen", "2", "--vocab", "256")
    printed = run(
        "experts.py", *sizes, "--steps", "2", "--rounds", "1", "--rows", "1,2", "--json", str(result), cwd=tmp_path
    )
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE | {"load", "results"}
    for row in record["results"]:
        assert min(row["mixture_decode_rate"], row["dense_decode_rate"], row["prompt_ratio"]) > 0
        assert str(row["mixture_prompt_rate"]) in printed


def test_latent(tmp_path):
    result = tmp_path / "result.json"
    sizes = ("--layers", "1", "--vocab", "256", "--tokens", "64", "--rows", "1,2", "--steps", "2", "--rounds", "1")
    printed = run("latent.py", *sizes, "--shape", "deepseek-v2-lite", "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE | {"load", "results", "kv_bytes_of_token"}
    # 512 compressed channels and 64 shared ones, as key and as value; beside a key and a value of 16 heads.
    assert record["kv_bytes_of_token"] == {"latent": 2 * 2 * (512 + 64), "plain": 2 * 2 * 16 * 192}
    for row in record["results"]:
        assert min(row["latent_decode_rate"], row["plain_decode_rate"], row["prompt_ratio"]) > 0
        assert str(row["latent_prompt_rate"]) in printed


def test_scheduler_step(tmp_path):
    result, profile = tmp_path / "result.json", tmp_path / "profile.txt"
    printed = run(
        "scheduler_step.py",
        "--running",
        "4,8",
        "--steps",
        "40",
        "--waiting",
        "100",
        "--rounds",
        "1",
        "--output",
        str(result),
        "--profile",
        str(profile),
        cwd=tmp_path,
    )
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [(row["policies"], row["running"]) for row in record["rows"]] == [
        ("default", 4),
        ("default", 8),
        ("everything", 4),
        ("everything", 8),
    ]
    orders = record["waiting"]["orders"]
    assert set(orders) == set(ORDERS)
    assert all(orders[order]["arrival"]["median_us"] > 0 for order in ORDERS)
    assert "schedule" in profile.read_text()
    for row in record["rows"]:
        assert row["decode"]["median_us"] > 0
        assert row["decode"]["message_bytes_min"] > 0
        assert row["churn"]["median_us"] > 0
        assert str(row["decode"]["median_us"]) in printed


@pytest.mark.parametrize(("num_waiting", "cancelled"), [("0", None), ("1", dict)])
def test_scheduler_step_with_next_to_nothing(tmp_path, num_waiting, cancelled):
    result = tmp_path / "result.json"
    load = ("--running", "1", "--steps", "1", "--rounds", "1", "--waiting", num_waiting, "--output", str(result))
    run("scheduler_step.py", *load, cwd=tmp_path)
    for figures in json.loads(result.read_text())["waiting"]["orders"].values():
        assert figures["arrival"]["median_us"] > 0
        assert figures["cancelled"] is None if cancelled is None else figures["cancelled"]["median_us"] > 0


@pytest.mark.deep
@pytest.mark.parametrize(("name", "load"), [("flight_recorder.py", ("--running", "1", "--rounds", "1"))])
def test_a_single_step_is_enough(tmp_path, name, load):
    run(name, *load, "--steps", "1", cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "flags"), [("scheduler_step.py", ("--running", "4,0")), ("gateway.py", ("--rounds", "0"))]
)
def test_nothing_at_all_is_refused_in_words(tmp_path, name, flags):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *flags], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last == f"{name}: error: argument {flags[0]}: '0' is not allowed; allowed: a whole number, 1 or more"


def test_step_time_fit_writes_a_device_that_can_be_simulated(tmp_path):
    result = tmp_path / "result.json"
    grid = ("--decodes", "1,4,8", "--contexts", "16,64", "--chunks", "16,64", "--rounds", "1", "--repetitions", "2")
    load = (*grid, "--run", "4,32,8")
    printed = run("step_time_fit.py", "--model", str(DEMO_MODEL), *load, "--output", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert record["fitted"]["num_steps"] + record["held_out"]["num_steps"] == len(record["steps"]) == 12
    assert sum(step["held_out"] for step in record["steps"]) == record["held_out"]["num_steps"] == 4
    assert 0 < record["held_out"]["relative_error"]["median"] <= record["held_out"]["relative_error"]["max"]
    assert str(record["held_out"]["relative_error"]) in printed
    assert record["whole_run"]["simulated_over_measured"] > 0
    options = ("--num-requests", "4", "--prompt-tokens", "64", "--output-tokens", "4")
    device = ("--hardware-file", str(result), "--model", "measured")
    assert headway_main(["simulate", *device, *options]) == 0


def test_gateway(tmp_path, unused_tcp_port):
    result = tmp_path / "result.json"
    load = ("--streams", "4", "--tokens", "20", "--rounds", "1", "--requests", "5", "--gap-ms", "1")
    printed = run(
        *("gateway.py", *load, "--grpc-address", f"127.0.0.1:{unused_tcp_port}", "--output", str(result)), cwd=tmp_path
    )
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    (row,) = record["throughput"]
    assert row["tokens_per_s"] > 0
    assert {"scheduler_cpu_s", "executor_cpu_s", "gateway_cpu_s", "client_cpu_s"} <= row.keys()
    assert {"added to the first token", "gap between tokens over gRPC"} <= record["latency"].keys()
    assert "added to the first token" in printed


@pytest.mark.deep
def test_http_or_grpc(tmp_path):
    pytest.importorskip("aiohttp", reason="needs a client over HTTP (extra bench)")
    result = tmp_path / "result.json"
    load = ("--streams", "2", "--tokens", "8", "--rounds", "1", "--requests", "2", "--latency-tokens", "4")
    printed = run("http_or_grpc.py", *load, "--gap-ms", "1", "--output", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert list(record["rows"]) == ["grpc", "completions", "chat"]
    for name, row in record["rows"].items():
        assert row["tokens_per_s"] > 0
        assert row["ttft_ms"] > 0
        assert name in printed


@pytest.mark.deep
def test_smg_overhead(tmp_path):
    for module in ("smg", "smg_grpc_proto", "aiohttp"):
        pytest.importorskip(module, reason="needs smg and a client of its API (extras smg and dev)")
    result = tmp_path / "result.json"
    load = ("--streams", "2", "--tokens", "8", "--rounds", "1", "--requests", "2", "--latency-tokens", "4")
    printed = run("smg_overhead.py", *load, "--gap-ms", "1", "--output", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert list(record["rows"]) == ["native", "vllm_engine", "openai_through_smg"]
    for name, row in record["rows"].items():
        assert row["tokens_per_s"] > 0
        assert row["ttft_ms"] > 0
        assert {"gateway_cpu_us_per_token", "smg_cpu_us_per_token"} <= row.keys()
        assert name in printed


def test_policies_memory(tmp_path):
    result = tmp_path / "result.json"
    sweep = ("--models", "llama-3-8b", "--contexts", "0.5k", "--bandwidths", "1,100", "--workloads", "pareto, cut")
    load = ("--share", "0.01", "--seeds", "1", "--running", "16", "--periods", "2")
    printed = run("policies_memory.py", *sweep, *load, "--output", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [(row["bandwidth_gb_s"], row["policy"]) for row in record["preemption"]] == [
        (bandwidth, policy) for bandwidth in (1.0, 100.0) for policy in ("recompute", "swap", "auto")
    ]
    assert [row["policy"] for row in record["reservation"]] == ["none", "prompt", "predicted", "full"]
    assert [row["policy"] for row in record["cost"]] == ["prompt", "predicted", "predicted, all on"]
    for row in (*record["preemption"], *record["reservation"]):
        assert row["throughput"] > 0
        assert row["preemptions"] > 0 or row["policy"] == "full"
        assert str(row["relative"]) in printed
    for row in record["cost"]:
        assert row["running"] > 0
        assert row["median_us"] > 0


def test_policies_objectives(tmp_path):
    result = tmp_path / "result.json"
    printed = run("policies_objectives.py", "--scale", "0.02", "--output", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert all(row["throughput_ratio"] > 0 for row in record["slo"])
    for table in ("priority", "fair"):
        for row in record[table]:
            assert row["alone_ttft_ms"]["p99"] > 0
            assert f"ratio {row['ratio_p50']}/{row['ratio_p99']}" in printed
    assert {row["order"] for row in record["backlog"]} == {"fair", "fcfs"}


def test_prefix_offload(tmp_path):
    result = tmp_path / "result.json"
    printed = run("prefix_offload.py", "--requests", "80", "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    rates = {row["offload"]: row["restore_rate"] for row in record["rows"]}
    assert rates["off"] == 0 < rates["always"]
    assert f"{rates['auto']:.1%}" in printed


def test_fleet_cost(tmp_path):
    result = tmp_path / "result.json"
    load = ("--executors", "1,3", "--rows", "8", "--rounds", "3")
    printed = run("fleet_cost.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE | {"is_core_compiled"}
    assert [row["executors"] for row in record["results"]] == [1, 3]
    for row in record["results"]:
        assert min(row["one_by_one_us"], row["together_churn_us"]) > 0
        assert f"{row['executors']} executors of 8 rows" in printed


def test_block_transports(tmp_path):
    result = tmp_path / "result.json"
    printed = run(
        "block_transports.py", "--blocks", "1,3", "--pulls", "2", "--pool", "4", "--json", str(result), cwd=tmp_path
    )
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert {(row["model"], row["blocks"]) for row in record["rows"] if row["transport"] == "tcp, keys"} == {
        (model, blocks) for model in ("demo model, float32", "135M model, float32") for blocks in (1, 3)
    }
    assert all(row["gb_per_s"] > 0 and row["p50_ms"] <= row["p99_ms"] for row in record["rows"])
    assert all(row["transport"] in printed for row in record["rows"])


def test_placement(tmp_path):
    result = tmp_path / "result.json"
    printed = run("placement.py", "--requests", "10", "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert {row["workload"] for row in record["results"]} == {"skewed", "prefixes"}
    for row in record["results"]:
        assert row["replicas"]["share_of_requests"] == [0.5, 0.5]
        assert row["one_queue"]["ttft_ms"]["p99"] > 0
        assert f"ratio {row['ttft_p99_ratio']}" in printed


@pytest.mark.deep
def test_goodput(tmp_path):
    result, picture = tmp_path / "result.json", tmp_path / "picture.png"
    load = ("--workloads", "llama-3-8b", "--most-requests", "12")
    printed = run("goodput.py", *load, "--json", str(result), "--png", str(picture), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE | {"ways"}
    points = record["results"]["llama-3-8b"]["by_gap"]
    assert [point["gap_ms"] for point in points] == sorted(point["gap_ms"] for point in points)
    assert all(str(point["hybrid_over_better"]) in printed for point in points)
    assert picture.stat().st_size > 0
    run("goodput.py", *load, "--gap-scales", "1.5", "--seeds", "2", "--json", str(result), cwd=tmp_path)
    (point,) = json.loads(result.read_text())["llama-3-8b"]
    assert point["gap_ms"] == points[2]["gap_ms"]


@pytest.mark.deep
def test_reliability_overhead(tmp_path):
    result = tmp_path / "result.json"
    sizes = ("--running", "4", "--steps", "20", "--round-trips", "50", "--rounds", "1")
    load = (*sizes, "--streams", "2", "--tokens", "8", "--step-us", "100")
    printed = run("reliability_overhead.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert min(record["link"][f"{kind}_us"] for kind in ("ipc", "tcp", "tcp+curve")) > 0
    assert record["chain"].keys() == {"100"}
    for chain in record["chain"].values():
        assert min(chain[f"{way}_tokens_per_s"] for way in ("tcp_with_all", "tcp_without_any", "ipc_with_all")) > 0
    assert str(record["step"]["with_all_us"]) in printed


@pytest.mark.deep
def test_compare(tmp_path):
    result, picture = tmp_path / "result.json", tmp_path / "result.png"
    load = ("--users", "4", "--num-requests", "12", "--warmup-requests", "2", "--prompt-tokens", "uniform:8,40")
    server = ("--model", "demo", "--max-model-len", "256", "--num-kv-blocks", "128", "--threads", "1")
    cases = ("--output-tokens", "12", "--cases", "prefill first, chunk 128")
    printed = run("compare.py", *load, *server, *cases, "--json", str(result), "--png", str(picture), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert list(record["measured"]) == ["prefill first", "chunk 128"]
    assert record["published"]["orca"]["output_tokens_per_s"] == 2800
    for label, figures in record["measured"].items():
        assert min(figures["output_tokens_per_s"], figures["itl_p99_ms"], figures["ttft_p99_ms"]) > 0
        (totals,) = record["cases"][label]["rounds"]
        assert totals["num_ok"] == totals["num_requests"] == 10
        assert f"{figures['output_tokens_per_s']:.0f}" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", _ONLY_IN_DEEP.split())
def test_what_runs_only_in_make_deep_can_be_imported(name):
    if name in _OF_SMG.split():
        for module in ("smg_grpc_proto", "aiohttp"):
            pytest.importorskip(module, reason="needs smg and a client of its API (extras smg and dev)")
    assert importlib.import_module(name).main


def test_compare_knows_its_cases(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--cases", "orca,chunk 7"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "'chunk 7' is not allowed; allowed: static, orca" in done.stderr


@pytest.mark.deep
def test_bench_truth(tmp_path):
    result = tmp_path / "result.json"
    load = ("--requests", "60", "--tokens", "3", "--step-ms", "10", "--rate", "30", "--within", "1000")
    printed = run("bench_truth.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [(row["figure"], row["at"]) for row in record["rows"]] == [
        (figure, share) for figure in ("ITL", "TTFT", "TPOT") for share in ("p50", "p90", "p99")
    ]
    assert all(row["ratio"] > 0 for row in record["rows"])
    assert "was not reached" in record["overload"][0]
    assert f"worst: {100 * record['worst_off']:.2f}% off" in printed


def test_bench_streams(tmp_path):
    result = tmp_path / "result.json"
    load = ("--users", "8", "--tokens", "12", "--step-ms", "30", "--ramp-s", "0.1", "--processes", "1,2")
    printed = run("bench_streams.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [(row["processes"], row["answered"], row["most_open"]) for row in record["rows"]] == [(1, 8, 8), (2, 8, 8)]
    assert all(row["busiest_process_us_per_token"] > 0 for row in record["rows"])
    assert f"tokens_per_s {record['rows'][0]['tokens_per_s']}" in printed


@pytest.mark.deep
def test_flight_recorder(tmp_path):
    result = tmp_path / "result.json"
    load = ("--running", "4", "--steps", "40", "--rounds", "1")
    printed = run("flight_recorder.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert record["step_ratio"] > 0
    assert record["bytes_per_step"] > 0
    assert record["checkpoint_stall_ms"] > 0
    assert f"{record['with_us']} us with" in printed


def test_flight_run(tmp_path):
    result = tmp_path / "result.json"
    load = ("--requests", "6", "--seconds", "1", "--log", str(tmp_path / "log"))
    printed = run("flight_run.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert record["answered"] == 6
    assert record["byte_identical"]
    assert record["num_steps"] > 0
    assert "6 requests of" in printed


def test_slo_on_cpu(tmp_path):
    result = tmp_path / "result.json"
    load = (
        "--chats",
        "2",
        "--prompt",
        "8",
        "--output",
        "16",
        "--long-prompts",
        "1",
        "--long",
        "128",
        "--budget",
        "128",
    )
    times = ("--seconds", "1", "--warm-up", "0.2", "--rounds", "1", "--threads", "1")
    printed = run("slo_on_cpu.py", "--model", str(DEMO_MODEL), *load, *times, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    for row in record["results"].values():
        assert row["num_gaps"] > 0
        assert 0 < row["itl"]["p50_ms"] <= row["itl"]["p99_ms"]
    assert f"{record['p99_ratio']}x" in printed


@pytest.mark.deep
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; `make gpu-check` runs it on a device")
@pytest.mark.parametrize("shape", ["tiny", "tiny-mixture", "tiny-states", "tiny-latent"])
def test_gpu_steps_without_a_gpu(tmp_path, shape):
    steps = tmp_path / "steps.json"
    sections = ("--sections", "decode,mixed,adapters,attention")
    run("gpu_steps.py", "--shape", shape, "--device", "cpu", *sections, "--json", str(steps), cwd=tmp_path)
    record = json.loads(steps.read_text())
    assert record.keys() >= PROVENANCE
    is_latent = shape == "tiny-latent"
    adapted = [] if is_latent or shape == "tiny-mixture" else ["decode"] * 2  # Of experts, they have no floor.
    kinds = ["attention", "attention", "decode", "decode", "mixed", *adapted]
    assert [line["name"].split(",")[0] for line in record["lines"]] == kinds
    assert record["failures"] == []
    for line in record["lines"]:
        assert 0 < line["floor_ms"] < line["measured_ms"] or "torch's" in line["name"]
    assert [parts["name"] for parts in record["parts"]] == [line["name"] for line in record["lines"][2:4]]
    for parts in record["parts"]:
        products = {"compress", "query", "multiply_heads"} if is_latent else {"qkv"}
        assert products | {"paged_attention", "feed_forward", "head", "sampling"} <= parts["parts_ms"].keys()
        assert parts["expected_ms"] == pytest.approx(sum(parts["parts_ms"].values()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; `make gpu-check` runs it on a device")
def test_triton_host_cost_without_a_gpu(tmp_path):
    host = tmp_path / "host.json"
    run("triton_host_cost.py", "--rows", "16", "--steps", "1", "--json", str(host), cwd=tmp_path)
    (line,) = json.loads(host.read_text())["lines"]
    assert 0 < line["best_us"] <= line["median_us"]


@pytest.mark.deep
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; `make gpu-check` runs it on a device")
def test_gpu_stack_without_a_gpu(tmp_path, unused_tcp_port):
    result = tmp_path / "result.json"
    load = ("--concurrency", "2", "--requests", "3", "--prompt", "5", "--output", "4")
    address = ("--grpc-address", f"127.0.0.1:{unused_tcp_port}")
    printed = run(
        *("gpu_stack.py", "--shape", "tiny", "--device", "cpu", "--no-peer", *load, *address, "--json", str(result)),
        cwd=tmp_path,
    )
    record = json.loads(result.read_text())
    assert record["tokens_per_s"] > 0
    assert "device idle between steps" in printed


def test_metrics_overhead(tmp_path):
    result = tmp_path / "result.json"
    load = ("--running", "4", "--steps", "10", "--turns", "2", "--pace-ms", "1")
    run("metrics_overhead.py", *load, "--output", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [(row["load"], row["running"]) for row in record["rows"]] == [("decode", 4), ("churn", 4)]
    for row in record["rows"]:
        assert min(row[kind]["median_us"] for kind in ("without", "counted", "unread", "read")) > 0
        assert min(row["count_us"], record["gateway_count_us"]) > 0


def test_executor_loss(tmp_path):
    pytest.importorskip("psutil", reason="needs processes to kill (extra dev)")
    result = tmp_path / "result.json"
    load = ("--moments", "1", "--streams", "4", "--prompt", "8", "--tokens", "16", "--step-ms", "10")
    printed = run("executor_loss.py", *load, "--serve-flags=--order,fair", "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert record["num_equal"] == record["num_streams"] == 4
    (row,) = record["rows"]
    assert 0 <= row["moved"] <= 4
    assert row["alone_gap_p99_ms"] > 0
    assert "4 of 4 streams equal" in printed


def test_rank_loss(tmp_path):
    pytest.importorskip("psutil", reason="needs processes to kill (extra dev)")
    result = tmp_path / "result.json"
    load = ("--moments", "1", "--signals", "kill", "--streams", "4", "--prompt", "8", "--tokens", "16")
    printed = run("rank_loss.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert (record["num_losses"], record["num_equal"], record["num_streams"], record["left"]) == (2, 8, 8, [])
    assert [(row["rank"], row["signal"]) for row in record["rows"]] == [(0, "SIGKILL"), (1, "SIGKILL")]
    assert "8 of 8 streams equal after 2 losses; left: []" in printed


@pytest.mark.deep
def test_executors_or_replicas(tmp_path):
    for module in ("smg", "smg_grpc_proto", "aiohttp", "psutil", "matplotlib"):
        pytest.importorskip(module, reason="needs smg, a client of its API and pictures (extras smg and dev)")
    result = tmp_path / "result.json"
    load = ("--policies", "round_robin", "--workloads", "both", "--seeds", "1", "--requests", "6", "--tokens", "4")
    small = ("--long-share", "0.3", "--long-tokens", "200", "--families", "2", "--shared-tokens", "64")
    fast = ("--short-tokens", "16", "--rate-share", "5", "--step-ms", "1", "--token-us", "1")
    printed = run("executors_or_replicas.py", *load, *small, *fast, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [(row["workload"], row["way"]) for row in record["rows"]] == [
        ("both", "one scheduler"),
        ("both", "round_robin"),
    ]
    for row in record["rows"]:
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert row["ttft_p99_ratio"] > 0
        assert str(row["ttft_ms_p99"]) in printed


def test_fleet(tmp_path):
    for module in ("smg", "smg_grpc_proto", "aiohttp", "psutil", "matplotlib"):
        pytest.importorskip(module, reason="needs smg, a client of its API and pictures (extras smg and dev)")
    result, picture = tmp_path / "result.json", tmp_path / "picture.png"
    load = ("--replicas", "1", "--groups", "2", "--shared-tokens", "64", "--own-tokens", "16", "--tokens", "4")
    few = ("--requests", "6", "--rate", "50", "--rounds", "1", "--step-ms", "1", "--token-us", "1")
    files = ("--json", str(result), "--png", str(picture))
    printed = run("fleet.py", *load, *few, "--no-kills", *files, cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert [row["policy"] for row in record["rounds"]] == list(record["routing"]) == ["cache_aware", "round_robin"]
    for row in record["rounds"]:
        assert 0 < row["hit_rate"] <= 1
        assert 0 < row["ttft_ms_p50"] <= row["ttft_ms_p99"]
        assert row["policy"] in printed
    assert picture.stat().st_size > 0


@pytest.mark.deep
def test_load_generators_with_the_one_that_is_always_there(tmp_path):
    for module in ("smg", "smg_grpc_proto", "aiohttp"):
        pytest.importorskip(module, reason="needs smg and a client of its API (extras smg and dev)")
    result = tmp_path / "result.json"
    load = ("--requests", "8", "--rate", "50", "--prompt", "8", "--tokens", "8")
    printed = run("load_generators.py", *load, "--serve-flags=--backend,simulated", "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert list(record["rows"]) == ["headway bench"]
    row = record["rows"]["headway bench"]
    assert row["reports"]["requests"] == row["recorded"]["requests"] == 8
    assert row["reports"]["ttft_ms_p50"] >= row["recorded"]["ttft_ms_p50"] > 0
    assert "headway bench, recorded" in printed


def test_a_random_tokenizer_is_as_wide_as_asked_and_loses_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    random_tokenizer = importlib.import_module("random_tokenizer").random_tokenizer
    text = random_tokenizer(2000, seed=3)
    assert text == random_tokenizer(2000, seed=3) != random_tokenizer(2000, seed=4)
    tokenizer = Tokenizer.from_str(text)
    assert tokenizer.get_vocab_size() == 2000
    ids = tokenizer.encode("thee {1: é\n}").ids
    assert tokenizer.decode(ids) == "thee {1: é\n}"
    assert len(ids) < 13


def test_constraints(tmp_path):
    result = tmp_path / "result.json"
    load = ("--outputs", "14", "--models", "demo", "--batch", "4", "--steps", "4", "--rounds", "1")
    run("constraints.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record["provenance"].keys() >= PROVENANCE
    assert record["conformance"]["valid"] == record["conformance"]["outputs"] == 14
    assert [row["temperature"] for row in record["cost"]["demo"]] == [1.0, 0.0]
    assert all(row["ratio"] > 0 and row["constrained"] == 2 for row in record["cost"]["demo"])


def test_constraint_libraries(tmp_path):
    result = tmp_path / "result.json"
    load = ("--libraries", "llguidance", "--vocabularies", "demo, 4k", "--masks", "5", "--hostile-inputs", "0")
    run("constraint_libraries.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record["provenance"].keys() >= PROVENANCE
    measured = record["libraries"]["llguidance"]["vocabularies"]["demo, 4k"]
    assert all(schema["same_masks_twice"] for schema in measured["schemas"].values())
    assert measured["mask_us_mean"] > 0


@pytest.mark.deep
def test_speculation(tmp_path):
    result = tmp_path / "result.json"
    load = ("--prompts", "4", "--exact-output", "6", "--output", "6", "--rounds", "1", "--alone", "1", "--skip-135m")
    run("speculation.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert {entry["equal"] for entries in record["exactness"].values() for entry in entries} == {4}
    assert [(row["proposer"], row["load"], row["batch"]) for row in record["speeds"]] == [
        (proposer, load, batch)
        for proposer in ("ngram", "draft")
        for load in ("repetitive", "random")
        for batch in (1, 16)
    ]
    assert min(row["speed_up"] for row in record["speeds"]) > 0


def test_by_turns_compares_within_a_round_and_changes_who_begins(monkeypatch, tmp_path):
    import by_turns

    begun = []

    def measure(root, work):
        begun.append(root)
        return [10.0 if root == tmp_path else 12.0] * len(work.figures)

    monkeypatch.setattr(by_turns, "measure", measure)
    rows = by_turns.compare(tmp_path, ["scheduler", "gateway"], 2)
    ratios = {row["figure"]: row["time_ratio"] for row in rows}
    assert ratios["step, 256 rows, default, us"] == pytest.approx(1.2)
    assert ratios["gateway tokens/s"] == pytest.approx(10 / 12)
    assert begun == [tmp_path, by_turns.HERE, by_turns.HERE, tmp_path] * 2


def test_by_turns_refuses_unknown_work(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "by_turns.py"), "--before", str(tmp_path), "--works", "gpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--works: 'gpu' is not allowed; allowed: scheduler, gateway, cpu" in done.stderr


@pytest.mark.deep
def test_cpu_peers_without_peers_says_so_and_scores_the_forms_that_headway_reads(tmp_path):
    pytest.importorskip("gguf", reason="needs the extra gguf")
    if not any(runs_here(path) for path in installed_variants()):
        pytest.skip("no CPU kernels that run here")
    result = tmp_path / "result.json"
    load = ("--kinds", "loss", "--precisions", "int8", "--loss-tokens", "300", "--directory", str(tmp_path / "work"))
    run("cpu_peers.py", *load, "--json", str(result), cwd=tmp_path)
    record = json.loads(result.read_text())
    assert record.keys() >= PROVENANCE
    assert list(record["left_out"]) == ["vllm", "openvino", "llama.cpp"]
    assert len(record["losses"]) == 5
    assert all(line["contender"].startswith("Headway, ") for line in record["losses"])
    losses = [line["nats_per_token"] for line in record["losses"]]
    assert max(losses) / min(losses) < 1.01


@pytest.mark.deep
def test_cpu_peers_starts_engines_alone(tmp_path):
    if not any(runs_here(path) for path in installed_variants()):
        pytest.skip("no CPU kernels that run here")
    result = tmp_path / "result.json"
    load = ("--kinds", "start", "--precisions", "float32", "--rounds", "1", "--directory", str(tmp_path / "work"))
    run("cpu_peers.py", *load, "--json", str(result), cwd=tmp_path)
    starts = json.loads(result.read_text())["engines"]
    assert [one["load"] for one in starts] == ["start", "server start"]
    assert all(one["peak_memory_mib"] > 500 for one in starts)


def test_the_matrix_of_cpu_peers_compares_within_a_row_of_turns(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    matrix = importlib.import_module("matrix")

    def row(number, ours, theirs, foreign=0.0):
        rates = {"Headway": ours, "peer": theirs}
        cells = {
            name: {matrix.RATE: rate, "prefill_tokens_per_s": 1.0, "decode_step_ms": 2.0}
            for name, rate in rates.items()
        }
        return {
            "kind": "offline",
            "precision": "int8",
            "requests": 8,
            "round": number,
            "foreign_share": foreign,
            "cells": cells,
        }

    ends = [
        {"kind": "engine", "load": "offline", "precision": "int8", "contender": name, "version": "1"}
        | {"ready_s": ready, "foreign_share": 0.0, "peak_memory_mib": 2048}
        for name, ready in (("Headway", 1.0), ("peer", 9.0), ("peer", 4.0))
    ]
    # The machine was half as fast in the second round: rates vary twofold, ratios hardly.
    disturbed = row(0, 10.0, 50.0, foreign=0.4)
    lines = [disturbed, row(0, 100.0, 50.0), row(1, 50.0, 26.0), row(2, 90.0, 40.0), *ends]
    ours, theirs = matrix.summary(lines, 0.05, lambda precision, name: "Headway")
    assert ours["headway_is"] is None
    assert theirs["headway_is"] == {"median": 2.0, "least": 50 / 26, "most": 2.25}
    assert theirs["figures"][matrix.RATE] == {"median": 40.0, "least": 26.0, "most": 50.0}
    losses = [{"precision": "int8", "contender": "peer", "nats_per_token": 3.25}]
    last = matrix.table([ours, theirs], matrix.engines(lines, 0.05), losses).splitlines()[-1]
    assert last == "| int8 | peer | 40 (26 to 50), 2.00x | 1 | 2 | 3 | 9.0, later 4.0 | 2.0 | 3.2500 |"
    alone = [line | {"load": "start"} for line in ends]
    assert matrix.table([], matrix.engines(alone, 0.05), []).splitlines()[-1] == (
        "| int8 | peer | start | 9.0, later 4.0 | 2.0 |"
    )
