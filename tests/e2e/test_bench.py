"""``headway bench`` against real processes: what it reports is what the server says of itself."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from e2e.running_server import command, finished

STEP_MS = 25.0
SIMULATED = (
    *("serve", "--backend", "simulated", "--model", "demo", "--grpc-address", "127.0.0.1:0", "--log-level", "warning"),
    *("--backend-option", f"step_base_us={STEP_MS * 1000:g}", "--backend-option", "verify_kv=false"),
)

HEARS_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Whoever is started in the background of a shell ignores Ctrl-C, and so would its children. ``preexec_fn`` would fork this
process as a whole, with threads of gRPC that do not bear it.
"""


@pytest.fixture(scope="module")
def address():
    with command(*SIMULATED, "--max-num-seqs", "16", "--max-num-waiting", "4") as server:
        yield server.wait_for_ready()


def bench(address, *flags):
    done = finished("bench", "--address", address, *flags, timeout_s=240.0)
    assert done.process.returncode == 0, "".join(done.err)
    return "".join(done.out)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_its_percentiles_are_those_of_the_server(address, processes, tmp_path):
    result = tmp_path / "result.json"
    load = ("--num-requests", "24", "--users", "4", "--prompt-tokens", "uniform:8,64", "--output-tokens", "16")
    printed = bench(address, *load, "--processes", processes, "--json", str(result), "--csv", str(tmp_path / "a.csv"))
    document = json.loads(result.read_text())
    totals, requests = document["totals"], document["requests"]
    assert "24 of 24" in printed
    assert [request["number"] for request in requests] == list(range(24))
    assert all(len(request["itl_ms"]) == 15 for request in requests)
    # Timing decides nothing here but gross mistakes: a machine that is busy is late by as much as it likes.
    gaps = np.concatenate([request["itl_ms"] for request in requests])
    assert totals["itl_ms"]["p50"] == pytest.approx(np.percentile(gaps, 50))
    assert totals["itl_ms"]["p50"] >= 0.8 * STEP_MS
    for request in requests:
        assert 1e3 * request["ttft_s"] >= request["server"]["ttft_ms"] - 1.0
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 25


def test_refusals_are_counted_and_a_picture_is_drawn(address, tmp_path):
    result, picture = tmp_path / "result.json", tmp_path / "result.png"
    load = ("--num-requests", "60", "--arrivals", "poisson", "--rate", "2000", "--output-tokens", "8")
    printed = bench(
        address,
        *(*load, "--prompt-tokens", "8", "--json", str(result), "--png", str(picture)),
        *("--tenant", "a=1:high", "--tenant", "b=1:low:1"),
    )
    totals = json.loads(result.read_text())["totals"]
    assert totals["statuses"]["RESOURCE_EXHAUSTED"] > 0
    assert sum(totals["statuses"].values()) == 60
    assert "WARNING" in printed
    assert "RESOURCE_EXHAUSTED" in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("processes", [1, 2])
def test_ctrl_c_leaves_what_was_measured(address, processes, tmp_path):
    result = tmp_path / "result.json"
    load = ("--num-requests", "2000", "--users", "4", "--prompt-tokens", "8", "--output-tokens", "2")
    words = ("--address", address, *load, "--processes", str(processes), "--json", str(result))
    process = subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C, "-m", "headway", "bench", *words], stdout=subprocess.PIPE, text=True
    )
    time.sleep(4.0)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    totals = json.loads(result.read_text())["totals"]
    assert 0 < totals["num_ok"] == totals["num_requests"] < 2000
    assert totals["num_unmeasured"] == 2000 - totals["num_ok"]
    assert (
        f"WARNING: cancelled: the figures are of what had ended; {totals['num_unmeasured']} requests are missing"
        in printed
    )


def test_a_failed_request_is_exit_1(address):
    flags = ("--num-requests", "4", "--users", "4", "--prompt-tokens", "8", "--output-tokens", "uniform:1,400")
    done = finished("bench", "--address", address, *flags, "--timeout-s", "2", timeout_s=60.0)
    assert done.process.returncode == 1
    assert "TIMEOUT" in "".join(done.out)


def test_a_capacity_is_found(address, tmp_path):
    result = tmp_path / "result.json"
    load = ("--prompt-tokens", "8", "--output-tokens", "4", "--ttft-slo-ms", "1000", "--itl-slo-ms", "500")
    # So many requests that one look can tell; where the machine is too slow for the rate, the next that it keeps will do.
    probe = ("--probe-requests", "120", "--probe-s", "0", "--tolerance", "1")
    search = ("--rate", "50", "--most-rate", "50", *probe, "--attainment", "0.5")
    printed = bench(address, "capacity", *load, *search, "--json", str(result))
    document = json.loads(result.read_text())
    assert len(document["trials"]) >= 1
    assert "requests/s" in printed
