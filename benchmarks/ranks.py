"""What an executor of several ranks costs per step on one host, over one rank with all its threads.

Owns: the steps, the turns, the table and the result file. Must not know: how ranks meet, what a layer computes.

A random Llama on the torch backend. Each way runs the same steps in its own processes, by turns in one run, and the best
round counts: a rank alone with as many threads as there are ranks; tensor parallel over shared memory, over gloo and over
zmq with keys, on the CPU kernels, and with torch operators in the exact and in the fast form; pipeline parallel with as
many lanes in flight as there are stages. ``waiting`` is the share of a step that rank 0 spends in meetings; the rest is
its products, its attention and drawing. A gather alone is timed too.

    python benchmarks/ranks.py --rows 1,8 --json result.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq
from safetensors.torch import save_file

from headway_executor.backend import BackendConfig, NewRow, StepBatch
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.link_keys import LinkKeys
from headway_executor.models.families import read_model_config
from headway_executor.models.tensor_shapes import expected_tensors
from headway_executor.rank_place import RankPlace
from headway_executor.ranks.group import RankGroup
from headway_kernels.cpu.library import load_library
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.sampling import SamplingParams
from program import count, counts, parser_of, provenance, write_result
from served import row_of_free_ports

BLOCK_SIZE = 16
PROMPT = 64
BE_A_RANK = "--be-a-rank"
NO_PAIRS = np.empty((2, 0), dtype=np.int32)


@dataclass(frozen=True)
class Way:
    """One way to run the model."""

    name: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    threads: int = 1
    kernels: str = "compiled"
    transport: str = "shared"
    form: str = "exact"

    @property
    def lanes(self) -> int:
        """Groups of rows whose steps are in flight at once."""
        return self.pipeline_parallel


def ways(degree: int) -> list[Way]:
    """Return all ways for ``degree`` ranks."""
    found = [
        Way("one rank", threads=degree),
        Way("TP over shared memory", tensor_parallel=degree),
        Way("TP over gloo", tensor_parallel=degree, transport="gloo"),
        Way("TP over zmq", tensor_parallel=degree, transport="zmq"),
        Way("PP over shared memory", pipeline_parallel=degree),
        Way("PP over gloo", pipeline_parallel=degree, transport="gloo"),
        Way("PP over zmq", pipeline_parallel=degree, transport="zmq"),
        Way("one rank, eager", threads=degree, kernels="eager"),
    ]
    for form in ("exact", "fast"):
        for transport in ("shared", "gloo", "zmq"):
            name = f"TP eager {form} over {transport}"
            found.append(Way(name, tensor_parallel=degree, kernels="eager", transport=transport, form=form))
    return found


def write_model(directory: Path, arguments: argparse.Namespace) -> Path:
    """Write a random Llama whose weights bfloat16 holds."""
    heads = arguments.hidden // 64 or 1
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "intermediate_size": 3 * arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": max(heads, arguments.degree),
        "num_key_value_heads": arguments.degree,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "eos_token_id": 0,
    }
    return write_random(directory, config, arguments.seed)


def write_random(directory: Path, config: dict[str, Any], seed: int) -> Path:
    """Write a model with this config.json and random weights that bfloat16 holds."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    shapes = expected_tensors(read_model_config(directory))
    tensors = {name: (torch.randn(shape) * shape[-1] ** -0.5).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    return directory


def int32(values: Any) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


class Steps:
    """The steps of ``num_rows`` rows in each of ``num_lanes`` lanes: a prompt of so many tokens each, then decodes."""

    def __init__(self, num_rows: int, num_lanes: int, num_decodes: int, prompt: int = PROMPT) -> None:
        self._num_rows, self._num_lanes, self._prompt = num_rows, num_lanes, prompt
        width = -(-(prompt + num_decodes + 1) // BLOCK_SIZE)
        self.num_blocks = num_rows * num_lanes * width
        self._table = np.arange(self.num_blocks, dtype=np.int32).reshape(-1, width)
        self._number = 0

    def prompts(self) -> Iterator[StepBatch]:
        """One step a lane."""
        for lane in range(self._num_lanes):
            rows = self._rows(lane)
            tokens = int32(1 + np.arange(self._prompt) % 7)
            sampling = SamplingParams(temperature=0.0)
            new = [
                NewRow(
                    row=row,
                    token_ids=tokens,
                    num_prompt_tokens=self._prompt,
                    num_computed_tokens=0,
                    sampling=sampling,
                )
                for row in rows.tolist()
            ]
            yield self._step(rows, tuple(new), 0, self._prompt)

    def decodes(self, first: int, how_many: int) -> Iterator[StepBatch]:
        """Steps of one token a row, the lanes by turns."""
        for number in range(first, first + how_many):
            for lane in range(self._num_lanes):
                yield self._step(self._rows(lane), (), self._prompt + number, 1)

    def _rows(self, lane: int) -> Int32Array:
        return int32(np.arange(self._num_rows) + lane * self._num_rows)

    def _step(self, rows: Int32Array, new: tuple[NewRow, ...], computed: int, tokens: int) -> StepBatch:
        self._number += 1
        return StepBatch(
            step=self._number,
            finished_rows=EMPTY_COLUMN if not new else rows,
            new_rows=new,
            new_blocks=NO_PAIRS,
            rows=rows,
            num_scheduled_tokens=np.full_like(rows, tokens),
            num_computed_tokens=np.full_like(rows, computed),
            samples=np.ones_like(rows),
            block_table=self._table,
        )


def time_steps(
    backend: TorchBackend, num_rows: int, lanes: int, num_steps: int, prompt: int = PROMPT
) -> dict[str, float]:
    """Prompts, then decodes; milliseconds a step, and what of a decode step was waiting."""
    steps = Steps(num_rows, lanes, num_steps, prompt)
    started = time.perf_counter()
    for batch in steps.prompts():
        backend.execute(batch)
    prompt_ms = 1e3 * (time.perf_counter() - started) / lanes
    place = None if backend.group is None else backend.group.meeting_place
    meetings, waited = (0, 0) if place is None else (place.num_meetings, place.waited_ns)
    started = time.perf_counter()
    for batch in steps.decodes(0, num_steps):
        backend.execute(batch)
    elapsed = time.perf_counter() - started
    found = {"prompt_ms": prompt_ms, "decode_ms": 1e3 * elapsed / (num_steps * lanes)}
    if place is not None:
        found["meetings"] = (place.num_meetings - meetings) / num_steps
        found["waiting_ms"] = (place.waited_ns - waited) / 1e6 / num_steps
    return found


def time_gathers(group: RankGroup, num_rows: int, columns: int, how_many: int) -> float:
    """Microseconds to gather rows of float32."""
    degree = group.place.tensor_parallel
    cut = tuple(range(columns * i // degree, columns * (i + 1) // degree) for i in range(degree))
    own = torch.zeros(num_rows, len(cut[group.place.tensor_rank]))
    started = time.perf_counter()
    for _ in range(how_many):
        group.columns.gather(own, cut)
    return 1e6 * (time.perf_counter() - started) / how_many


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is told first."""

    model: str
    way: Way
    place: RankPlace
    keys: LinkKeys
    most_rows: int
    num_steps: int


def be_a_rank() -> None:
    """Do what standard input asks for, line by line, and answer each."""
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    way, place, most_rows, num_steps = job.way, job.place, job.most_rows, job.num_steps
    width = -(-(PROMPT + num_steps + 1) // BLOCK_SIZE)
    options = {"kernels": way.kernels}
    if place.size > 1:
        options |= {"rank_transport": way.transport, "tensor_parallel_form": way.form}
    backend = TorchBackend()
    backend.open(
        BackendConfig(
            model=job.model,
            num_threads=way.threads,
            options=options,
            place=place,
            rank_keys=job.keys,
            block_size=BLOCK_SIZE,
            max_model_len=width * BLOCK_SIZE,
            max_num_seqs=most_rows * way.lanes,
            max_num_batched_tokens=most_rows * PROMPT,
            num_kv_blocks=most_rows * way.lanes * width,
            swap_space_mib=0,
        )
    )
    print(json.dumps("open"), flush=True)
    for line in sys.stdin:
        kind, num_rows, size = json.loads(line)
        answer: Any = None
        if kind == "steps":
            answer = time_steps(backend, num_rows, way.lanes, num_steps)
        else:
            assert backend.group is not None
            answer = time_gathers(backend.group, num_rows, size, 10 * num_steps)
        print(json.dumps(answer), flush=True)


class Group:
    """The processes of one way."""

    def __init__(self, model: Path, way: Way, most_rows: int, num_steps: int) -> None:
        self.way, size = way, way.tensor_parallel * way.pipeline_parallel
        rendezvous, own, theirs = f"127.0.0.1:{row_of_free_ports(1)}", zmq.curve_keypair(), zmq.curve_keypair()
        command = [sys.executable, __file__, BE_A_RANK]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(size)
        ]
        for rank, process in enumerate(self._processes):
            job = Job(
                model=str(model),
                way=way,
                place=RankPlace(
                    rank=rank,
                    tensor_parallel=way.tensor_parallel,
                    pipeline_parallel=way.pipeline_parallel,
                    rendezvous=rendezvous,
                ),
                keys=LinkKeys(own[0], *theirs) if rank else LinkKeys(theirs[0], *own),
                most_rows=most_rows,
                num_steps=num_steps,
            )
            _tell(process, msgspec.json.encode(job).decode())
        for process in self._processes:
            _answer_of(process)

    def ask(self, kind: str, num_rows: int, size: int = 0) -> Any:
        """Let all ranks do it; return what rank 0 measured."""
        for process in self._processes:
            _tell(process, json.dumps((kind, num_rows, size)))
        return [_answer_of(process) for process in self._processes][0]  # noqa: RUF015 - all must have answered

    def end(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(20)


def _tell(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _answer_of(process: "subprocess.Popen[str]") -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a rank has ended; the lines above say why")
    return json.loads(line)


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the round with the fastest decode step, rounded."""
    return {name: float(f"{value:.4g}") for name, value in min(rounds, key=lambda one: one["decode_ms"]).items()}


def measure(groups: list[Group], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record for each way and number of rows."""
    records: list[dict[str, Any]] = []
    for num_rows in arguments.rows:
        rounds: dict[str, list[dict[str, float]]] = {group.way.name: [] for group in groups}
        for _ in range(arguments.rounds):
            for group in groups:
                rounds[group.way.name].append(group.ask("steps", num_rows))
        for group in groups:
            record = {"way": group.way.name, "rows": num_rows, **best(rounds[group.way.name])}
            records.append(record)
            print(
                f"{record['way']:>27} {num_rows:>5} {record['prompt_ms']:>10} {record['decode_ms']:>10}"
                f" {record.get('meetings', '-'):>9} {record.get('waiting_ms', '-'):>10}"
            )
    return records


def measure_gathers(groups: list[Group], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return microseconds of a gather by way and rows, with as many columns as the hidden state."""
    found = []
    chosen = [group for group in groups if group.way.tensor_parallel > 1 and group.way.kernels == "compiled"]
    for num_rows in (*arguments.rows, PROMPT):
        for group in chosen:
            microseconds = min(group.ask("gathers", num_rows, arguments.hidden) for _ in range(arguments.rounds))
            found.append({"way": group.way.name, "rows": num_rows, "gather_us": float(f"{microseconds:.3g}")})
            print(f"{group.way.name:>27} {num_rows:>5} rows: a gather takes {found[-1]['gather_us']} us")
    return found


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--degree", type=count, default=2, help="ranks")
    parser.add_argument("--ways", help="those to measure, with commas between them (default: all)")
    parser.add_argument("--rows", type=counts, default="1,8")
    parser.add_argument("--layers", type=count, default=12)
    parser.add_argument("--hidden", type=count, default=768)
    parser.add_argument("--vocab", type=count, default=8192)
    parser.add_argument("--steps", type=count, default=40, help="decode steps of a round")
    parser.add_argument("--rounds", type=count, default=5)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    named = [way for way in ways(arguments.degree) if not arguments.ways or way.name in arguments.ways.split(",")]
    if load_library() is None:
        raise SystemExit("the CPU kernels do not run here; allowed: a host where they do")
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", arguments)
        groups = [Group(model, way, max(arguments.rows), arguments.steps) for way in named]
        print(f"{'milliseconds a step':>27}  rows    prompts     decode  meetings    waiting")
        results = measure(groups, arguments)
        gathers = measure_gathers(groups, arguments)
        for group in groups:
            group.end()
    load = {name: getattr(arguments, name) for name in ("degree", "layers", "hidden", "vocab", "steps", "rounds")}
    record = {"benchmark": "ranks", **provenance(arguments.seed), "load": load | {"prompt": PROMPT}}
    write_result(arguments.json, record | {"results": results, "gathers": gathers})


if __name__ == "__main__":
    be_a_rank() if sys.argv[1:] == [BE_A_RANK] else main()
