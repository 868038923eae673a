"""The whole stack on a GPU: whether the device waits for the host, and the speed beside transformers.

Owns: the load, the server's process, reading its step log, the peer, and the result file. Must not know: how any of the
three services works.

``headway serve`` with the triton backend answers ``--concurrency`` clients at a time, over gRPC. Its step log has each
step's time and the idle time before it by the device's clock; in steady decode the idle time is the host's cost. Then
``transformers`` runs the same prompts with its continuous batching, in its own process, with the same random weights. A
server that ends at once ends the run; a peer that fails costs no figure of ours. ``--lines`` gets each figure as soon as
it is there.

    python benchmarks/gpu_stack.py
    python benchmarks/gpu_stack.py --no-peer --concurrency 64 --requests 256 --json result.json
    TRITON_INTERPRET=1 python benchmarks/gpu_stack.py --shape tiny --device cpu --no-peer     # tries the benchmark
"""

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import headway
from gpu_shapes import SHAPES, Shape
from headway.client import AsyncClient
from headway_proto.wording import one_line
from program import add_line, count, parser_of, provenance, write_result

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
READY_S = 900.0
LOOK_S = 0.2
IDLE_ASKED = 0.02
RATIO_ASKED = 3.0
LEAST_STEADY_STEPS = 20


def say(text: str) -> None:
    sys.stderr.write(f"gpu_stack: {text}\n")
    sys.stderr.flush()


def prompts_of(arguments: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    draw = np.random.default_rng(arguments.seed)
    return [draw.integers(0, vocab_size, arguments.prompt).tolist() for _ in range(arguments.requests)]


def make_model(directory: Path, shape: Shape) -> None:
    """Write a model directory without weights: the shape's config.json, and the demo model's tokenizer."""
    (directory / "config.json").write_text(json.dumps(shape.config))
    demo_model = Path(headway.__file__).with_name("demo_model")
    for name in TOKENIZER_FILES:
        if (demo_model / name).exists():
            shutil.copy(demo_model / name, directory / name)


class ServerEnded(RuntimeError):  # noqa: N818 (it says what happened)
    """``headway serve`` ended by itself; one line."""


class Server:
    """``headway serve`` as a user would start it."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, step_log: Path) -> None:
        words = [
            *("serve", "--model", str(directory), "--backend", "triton", "--device", arguments.device),
            *("--backend-option", "weights=random", "--backend-option", f"step_log={step_log}"),
            *(
                "--max-num-seqs",
                str(arguments.concurrency),
                "--grpc-address",
                arguments.grpc_address,
                "--seed",
                str(arguments.seed),
            ),
            *("--max-model-len", str(arguments.prompt + arguments.output), "--swap-space-mib", "0"),
        ]
        self._process = subprocess.Popen([sys.executable, "-m", "headway", *words], stdout=subprocess.DEVNULL)

    async def until_it_ends(self) -> None:
        """Raise ``ServerEnded`` once it has ended by itself."""
        while self._process.poll() is None:  # noqa: ASYNC110 (it is no process of the event loop)
            await asyncio.sleep(LOOK_S)
        raise ServerEnded(f"headway serve ended with exit code {self._process.returncode}; its last line says why")

    def stop(self) -> None:
        """End it, and wait until its device is free."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def run_beside(server: Server, load: Coroutine[Any, Any, float]) -> float:
    """Return what ``load`` returns, unless the server ends first: then raise ``ServerEnded``."""
    working, watching = asyncio.ensure_future(load), asyncio.ensure_future(server.until_it_ends())
    await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    first, other = (working, watching) if working.done() else (watching, working)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    if first is watching:
        watching.result()
    return working.result()


async def run_clients(arguments: argparse.Namespace, prompts: list[list[int]]) -> float:
    """Keep ``--concurrency`` requests open until all prompts are answered; return the seconds."""
    waiting = list(reversed(prompts))

    async def one_client(client: AsyncClient) -> None:
        while waiting:
            stream = client.generate(waiting.pop(), max_tokens=arguments.output, temperature=0.0, ignore_eos=True)
            result = await stream.result()
            assert len(result.token_ids) == arguments.output

    async with AsyncClient(arguments.grpc_address) as client:
        await client.wait_ready(READY_S)
        say("the server is ready; sending the load")
        await client.generate(prompts[0], max_tokens=2, temperature=0.0, ignore_eos=True).result()
        started = time.perf_counter()
        await asyncio.gather(*[one_client(client) for _ in range(arguments.concurrency)])
        return time.perf_counter() - started


def idle_share(step_log: Path, num_rows: int) -> tuple[float, int]:
    """Return the device's idle share in steady steps of ``num_rows`` decodes, and the number of those steps."""
    lines = [json.loads(line) for line in step_log.read_text().splitlines()]
    idle = busy = count = 0
    for before, line in pairwise(lines):
        if all(step["num_rows"] == step["num_tokens"] == num_rows for step in (before, line)):
            idle, busy, count = idle + line["idle_us"], busy + line["device_time_us"], count + 1
    return (idle / (idle + busy) if count else float("nan")), count


def try_peer(arguments: argparse.Namespace) -> tuple[float | None, str]:
    """Return tokens per second of transformers, or None and why."""
    try:
        return run_peer(arguments), ""
    except (OSError, subprocess.CalledProcessError, LookupError, ValueError) as error:
        say(f"transformers has failed: {error}")
        return None, one_line(error)


def run_peer(arguments: argparse.Namespace) -> float:
    """Return tokens per second of transformers, in its own process, because it needs the device's memory."""
    words = [sys.executable, __file__, "--peer-only"]
    for name in ("shape", "device", "concurrency", "requests", "prompt", "output", "seed"):
        words += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["tokens_per_s"])


def peer(arguments: argparse.Namespace) -> None:
    """Print ``{"tokens_per_s": ...}`` as the peer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from headway_executor.checkpoint.random_weights import RandomCheckpoint
    from headway_executor.models.families import read_model_config
    from headway_executor.models.tensor_shapes import expected_tensors

    shape = SHAPES[arguments.shape]
    with tempfile.TemporaryDirectory() as name:
        make_model(Path(name), shape)
        config = AutoConfig.from_pretrained(name)
        expected = expected_tensors(read_model_config(Path(name)))
    dtype = getattr(torch, str(shape.config["torch_dtype"]))
    say("transformers: building the model")
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    weights = RandomCheckpoint(expected, seed=arguments.seed, dtype=dtype, device=torch.device(arguments.device))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(weights.read(parameter_name))
    generation = GenerationConfig(
        max_new_tokens=arguments.output, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=True
    )
    prompts = prompts_of(arguments, int(str(shape.config["vocab_size"])))
    # The first batch compiles and records whatever it does.
    model.generate_batch(inputs=prompts[: arguments.concurrency], generation_config=generation)
    say("transformers: sending the load")
    started = time.perf_counter()
    answers = model.generate_batch(inputs=prompts, generation_config=generation)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    print(json.dumps({"tokens_per_s": num_tokens / seconds}), flush=True)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[arguments.shape]
    prompts = prompts_of(arguments, int(str(shape.config["vocab_size"])))
    settings = {key: str(value) for key, value in vars(arguments).items() if key not in {"json", "lines"}}
    origin = {**provenance(arguments.seed), "settings": settings}
    with tempfile.TemporaryDirectory() as name:
        directory, step_log = Path(name), Path(name) / "steps.jsonl"
        make_model(directory, shape)
        say("starting headway serve")
        server = Server(arguments, directory, step_log)
        try:
            seconds = asyncio.run(run_beside(server, run_clients(arguments, prompts)))
        finally:
            server.stop()
        share, count = idle_share(step_log, arguments.concurrency)
    ours = arguments.requests * arguments.output / seconds
    result = {**origin, "tokens_per_s": ours, "idle_share": share, "steady_steps": count}
    add_line(arguments.lines, {"kind": "stack", **result, "idle_asked": IDLE_ASKED})
    theirs, problem = (None, "") if arguments.no_peer else try_peer(arguments)
    result |= {
        "transformers_tokens_per_s": theirs,
        "transformers_problem": problem,
        "ratio": None if theirs is None else ours / theirs,
    }
    if not arguments.no_peer:
        add_line(arguments.lines, {"kind": "peer", **result, "ratio_asked": RATIO_ASKED})
    return result


def table(result: dict[str, Any]) -> str:
    lines = [f"headway serve:              {result['tokens_per_s']:10.0f} output tokens/s"]
    if result["steady_steps"] >= LEAST_STEADY_STEPS:
        lines.append(
            f"device idle between steps:  {result['idle_share']:10.2%} of {result['steady_steps']} steady decode steps "
            f"(asked: at most {IDLE_ASKED:.0%})"
        )
    else:
        lines.append(f"device idle between steps:  not told by {result['steady_steps']} steady decode steps")
    if result["ratio"] is not None:
        lines += [
            f"transformers:               {result['transformers_tokens_per_s']:10.0f} output tokens/s",
            f"ratio:                      {result['ratio']:10.2f} (asked: at least {RATIO_ASKED:.0f})",
        ]
    if result["transformers_problem"]:
        lines.append(f"transformers:               failed: {result['transformers_problem']}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--lines", type=Path, help="add each figure, as soon as it is measured, to this file")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--concurrency", type=count, default=64)
    parser.add_argument("--requests", type=count, default=256)
    parser.add_argument("--prompt", type=count, default=512)
    parser.add_argument("--output", type=count, default=256)
    parser.add_argument("--grpc-address", default="127.0.0.1:50931")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--peer-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.peer_only:
        peer(arguments)
        return 0
    try:
        result = run(arguments)
    except ServerEnded as error:
        say(str(error))
        return 1
    print(table(result))
    write_result(arguments.json, result)
    return int(bool(result["transformers_problem"]))


if __name__ == "__main__":
    sys.exit(main())
