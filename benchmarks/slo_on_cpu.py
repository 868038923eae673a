"""Gaps between tokens on a real device, this CPU: a fixed token budget against ``budget=slo``.

Owns: the random checkpoint, a closed loop of real scheduler, batch state and torch backend with two steps in flight,
the table and the result file. Must not know: what the scheduler decides, or anything of the backend beyond its
protocol.

A few users chat (short prompts, ``--output`` tokens each) while others send long prompts, each when its last request
has ended. Both kinds of budget run for ``--seconds``, by turns, ``--rounds`` times, each with a new scheduler.
``--warm-up`` seconds do not count; ``slo`` reports them apart.
"""

import argparse
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway_executor.backend import BackendConfig, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_lab.percentiles import percentiles
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput, SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, parser_of, provenance, write_result
from torch_cpu import write_checkpoint

SHAPE_40M: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
MAX_MODEL_LEN = 4096
CHAT, LONG = 0, 1


@dataclass
class Run:
    """The figures of one run; times in seconds since its start."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When a token of a chat came, and how long after the one before."""
    steps: list[tuple[float, int]] = field(default_factory=list)
    """When a step ended, and its tokens."""
    prompt_tokens: list[tuple[float, int]] = field(default_factory=list)
    """When a long prompt had been computed, and how long it is."""


class ClosedLoop:
    """Users of both kinds at one scheduler and one backend."""

    def __init__(self, backend: ThreadedBackend, config: BackendConfig, limits: SchedulerLimits, load: Any) -> None:
        self._backend = backend
        info = backend.open(config)
        self._vocab_size = info.vocab_size
        self._state = BatchState(info)
        self._scheduler = Scheduler(
            limits,
            ExecutorCapacity.of(info),
        )
        self._load = load
        self._rng = np.random.default_rng(load.seed)
        self._in_flight: deque[tuple[SchedulerOutput, int | None, Future[StepResult] | StepResult]] = deque()
        self._kinds: dict[int, int] = {}
        self._last_token: dict[int, float] = {}
        self.run = Run()

    def go(self) -> Run:
        """Send and answer for ``--seconds``."""
        started = time.perf_counter()
        for kind, users in ((CHAT, self._load.chats), (LONG, self._load.long_prompts)):
            for _ in range(users):
                self._send(kind, 0.0)
        now = 0.0
        while now < self._load.seconds:
            while (diff := self._scheduler.schedule(now)) is not None:
                batch = self._state.apply(diff).batch
                digest = self._state.digest() if diff.step % DIGEST_INTERVAL_STEPS == 0 else None
                self._in_flight.append((diff, digest, self._backend.execute(batch)))
            diff, digest, pending = self._in_flight.popleft()
            result = pending.result() if isinstance(pending, Future) else pending
            now = time.perf_counter() - started
            self._take(diff, digest, result, now)
        for _, _, pending in self._in_flight:
            if isinstance(pending, Future):
                pending.result()
        return self.run

    def _take(self, diff: SchedulerOutput, digest: int | None, result: StepResult, now: float) -> None:
        events = self._scheduler.update(
            ExecutorOutput(
                epoch=diff.epoch,
                step=diff.step,
                sampled_token_ids=encode_column(result.sampled_token_ids),
                errors=result.errors,
                state_digest=digest,
                device_time_us=result.device_time_us,
            ),
            now,
        )
        self.run.steps.append((now, diff.total_num_scheduled_tokens))
        for handle in events.handles.tolist():
            before = self._last_token.get(handle)
            if before is None and self._kinds[handle] == LONG:
                self.run.prompt_tokens.append((now, self._load.long))
            elif before is not None and self._kinds[handle] == CHAT:
                self.run.gaps.append((now, now - before))
            self._last_token[handle] = now
        for end in events.finished:
            del self._last_token[end.origin.handle]
            self._send(self._kinds.pop(end.origin.handle), now)

    def _send(self, kind: int, now: float) -> None:
        handle = int(self._rng.integers(1, 1 << 30))
        self._kinds[handle] = kind
        num_tokens, max_tokens = (self._load.prompt, self._load.output) if kind == CHAT else (self._load.long, 4)
        self._scheduler.add_request(
            NewRequestEvent(
                origin=Origin(0, handle),
                request_id=str(handle),
                token_ids=self._rng.integers(3, self._vocab_size, size=num_tokens).astype(np.int32),
                num_prompt_tokens=num_tokens,
                max_tokens=max_tokens,
                sampling=SamplingParams(temperature=0.0),
                stop_token_ids=frozenset(),
            ),
            now,
        )


@contextmanager
def loop(model: Path, load: argparse.Namespace, **limits: Any) -> Iterator[ClosedLoop]:
    config = BackendConfig(
        model=str(model),
        max_model_len=min(MAX_MODEL_LEN, load.long + 64),
        max_num_seqs=32,
        max_num_batched_tokens=load.budget,
        num_kv_blocks=(load.chats + load.long_prompts + 2) * (load.long + 64) // 16,
        num_threads=load.threads,
        swap_space_mib=0,
    )
    backend = ThreadedBackend(TorchBackend())
    settings = SchedulerLimits(
        max_num_batched_tokens=load.budget,
        max_num_seqs=32,
        default_itl_slo_ms=load.objective_ms,
        enable_prefix_caching=False,
        **limits,
    )
    try:
        yield ClosedLoop(backend, config, settings, load)
    finally:
        backend.close()


def spread(gaps_s: list[float]) -> dict[str, float]:
    values = percentiles([gap * 1e3 for gap in gaps_s])
    return {f"{name}_ms": round(value or 0.0, 1) for name, value in msgspec.structs.asdict(values).items()}


def figures(runs: list[Run], load: argparse.Namespace) -> dict[str, Any]:
    """Return the figures over all rounds, without the warm-up."""
    gaps = [gap for run in runs for when, gap in run.gaps if when >= load.warm_up]
    first_gaps = [gap for run in runs for when, gap in run.gaps if when < load.warm_up]
    seconds = len(runs) * (load.seconds - load.warm_up)
    num_prompt_tokens = sum(count for run in runs for when, count in run.prompt_tokens if when >= load.warm_up)
    step_tokens = [count for run in runs for when, count in run.steps if when >= load.warm_up]
    within = [gap <= load.objective_ms / 1e3 for gap in gaps]
    return {
        "itl": spread(gaps),
        "itl_in_warm_up": spread(first_gaps) if first_gaps else None,
        "within_objective": round(sum(within) / len(within), 4),
        "num_gaps": len(gaps),
        "chat_tokens_per_s": round(len(gaps) / seconds, 1),
        "long_prompt_tokens_per_s": round(num_prompt_tokens / seconds, 1),
        "mean_step_tokens": round(sum(step_tokens) / len(step_tokens), 1),
    }


def main() -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--objective-ms", type=count, default=50)
    parser.add_argument("--budget", type=count, default=2048, help="max_num_batched_tokens of both")
    parser.add_argument("--chats", type=count, default=4, help="users who chat")
    parser.add_argument("--prompt", type=count, default=32, help="tokens of a chat's prompt")
    parser.add_argument("--output", type=count, default=128, help="tokens of a chat's answer")
    parser.add_argument("--long-prompts", type=int, default=2, help="users who send long prompts")
    parser.add_argument("--long", type=count, default=2000, help="tokens of a long prompt")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--warm-up", type=float, default=5.0, help="seconds that do not count")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--threads", type=int, default=0, help="of the backend; 0: all cores")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the random one")
    arguments = parser.parse_args()
    runs: dict[str, list[Run]] = {"fixed": [], "slo": []}
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is None:
            write_checkpoint(Path(scratch), arguments.seed, SHAPE_40M)
        for _ in range(arguments.rounds):
            for budget, done in runs.items():
                with loop(arguments.model or Path(scratch), arguments, budget=budget) as closed_loop:
                    done.append(closed_loop.go())
    table = {budget: figures(done, arguments) for budget, done in runs.items()}
    ratio = round(table["fixed"]["itl"]["p99_ms"] / table["slo"]["itl"]["p99_ms"], 2)
    for budget, row in table.items():
        print(f"{budget:6} {row}")
    print(f"P99 of gaps: {ratio}x as long with the fixed budget")
    load = {name: value for name, value in vars(arguments).items() if name not in {"json", "model", "seed"}}
    record = {
        "benchmark": "slo_on_cpu",
        **provenance(arguments.seed),
        "model": "given" if arguments.model else SHAPE_40M,
        "load": load,
        "results": table,
        "p99_ratio": ratio,
    }
    write_result(arguments.json, record)


if __name__ == "__main__":
    main()
