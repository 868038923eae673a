"""The cost of a prompt on this CPU: alone, with log probabilities of its own tokens, and many times at once.

Owns: one real scheduler, batch state and torch backend with two steps in flight, the cases, the table and the result
file. Must not know: what the scheduler decides, or anything of the backend beyond its protocol.

Every case begins with an empty prefix cache and ends when each of its requests has its first token. The cases take
turns, ``--rounds`` times, and medians count; ratios are to one request alone. Links, gateway and decodes are left out.
"""

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from headway_executor.backend import BackendConfig, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.columns import encode_column
from headway_proto.sampling import NO_LOGPROBS, SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput, SchedulerOutput
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, parser_of, provenance, write_result
from slo_on_cpu import SHAPE_40M
from torch_cpu import write_checkpoint


class Case(NamedTuple):
    """``num_requests`` of one prompt at once."""

    num_requests: int = 1
    prefix_wait_tokens: int = 128
    prompt_logprobs: int = NO_LOGPROBS


class Outcome(NamedTuple):
    """Seconds until every request had a first token, and the prompt tokens that were computed."""

    seconds: float
    num_computed_tokens: int


class Bench:
    """An open backend, and a fresh scheduler for each case."""

    def __init__(self, model: Path, load: argparse.Namespace) -> None:
        self._backend = ThreadedBackend(TorchBackend())
        blocks_per_request = -(-(load.prompt + 8) // 16)
        self._info = self._backend.open(
            BackendConfig(
                model=str(model),
                max_model_len=load.prompt + 8,
                max_num_seqs=load.requests,
                max_num_batched_tokens=load.budget,
                num_kv_blocks=(load.requests + 1) * blocks_per_request,
                num_threads=load.threads,
                swap_space_mib=0,
            )
        )
        self._state = BatchState(self._info)
        self._load = load

    def run(self, case: Case) -> Outcome:
        """Run one case to its end."""
        info, load = self._info, self._load
        limits = SchedulerLimits(max_num_batched_tokens=load.budget, prefix_wait_tokens=case.prefix_wait_tokens)
        capacity = ExecutorCapacity.of(info)
        scheduler = Scheduler(limits, capacity)
        self._state.begin_epoch()
        prompt = np.random.default_rng(load.seed).integers(3, info.vocab_size, size=load.prompt).astype(np.int32)
        for handle in range(case.num_requests):
            scheduler.add_request(_request(handle, prompt, case), 0.0)
        in_flight: deque[tuple[SchedulerOutput, int | None, Future[StepResult] | StepResult]] = deque()
        num_computed, started = 0, time.perf_counter()
        while scheduler.num_unfinished:
            while (diff := scheduler.schedule(0.0)) is not None:
                num_computed += diff.total_num_scheduled_tokens
                batch = self._state.apply(diff).batch
                digest = self._state.digest() if diff.step % DIGEST_INTERVAL_STEPS == 0 else None
                in_flight.append((diff, digest, self._backend.execute(batch)))
            diff, digest, pending = in_flight.popleft()
            result = pending.result() if isinstance(pending, Future) else pending
            scheduler.update(_output(diff, digest, result), 0.0)
        return Outcome(time.perf_counter() - started, num_computed)

    def close(self) -> None:
        """Release the model."""
        self._backend.close()


def _request(handle: int, prompt: np.ndarray, case: Case) -> NewRequestEvent:
    return NewRequestEvent(
        origin=Origin(0, handle),
        request_id=str(handle),
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        max_tokens=1,
        sampling=SamplingParams(seed=handle, prompt_logprobs=case.prompt_logprobs),
        stop_token_ids=frozenset(),
    )


def _output(diff: SchedulerOutput, digest: int | None, result: StepResult) -> ExecutorOutput:
    return ExecutorOutput(
        epoch=diff.epoch,
        step=diff.step,
        sampled_token_ids=encode_column(result.sampled_token_ids),
        errors=result.errors,
        state_digest=digest,
        prompt_logprobs=result.prompt_logprobs,
    )


def measure(model: Path, load: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return every case by name; a round before the first warms up."""
    many = load.requests
    cases = {
        "one": Case(),
        "prompt_logprobs=0": Case(prompt_logprobs=0),
        "prompt_logprobs=20": Case(prompt_logprobs=20),
        f"{many} at once": Case(num_requests=many),
        f"{many} at once, no waiting": Case(num_requests=many, prefix_wait_tokens=0),
    }
    outcomes: dict[str, list[Outcome]] = {name: [] for name in cases}
    bench = Bench(model, load)
    try:
        for number in range(load.rounds + 1):
            for name, case in cases.items():
                outcome = bench.run(case)
                if number:
                    outcomes[name].append(outcome)
    finally:
        bench.close()
    medians = {name: statistics.median(outcome.seconds for outcome in found) for name, found in outcomes.items()}
    return {
        name: {
            "ms": round(medians[name] * 1e3, 1),
            "ratio": round(medians[name] / medians["one"], 2),
            "prompt_tokens_computed": found[0].num_computed_tokens,
        }
        for name, found in outcomes.items()
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--prompt", type=count, default=1000, help="tokens of the prompt (default: 1000)")
    parser.add_argument("--requests", type=count, default=8, help="how many at once (default: 8)")
    parser.add_argument("--budget", type=count, default=2048, help="max_num_batched_tokens (default: 2048)")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--threads", type=int, default=0, help="of the backend; 0: all that pay")
    parser.add_argument("--model", type=Path, help="a checkpoint instead of the random one of 40M parameters")
    load = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        if load.model is None:
            write_checkpoint(Path(scratch), load.seed, SHAPE_40M)
        rows = measure(load.model or Path(scratch), load)
    for name, row in rows.items():
        print(f"{name:28}{row['ms']:>10.1f} ms{row['ratio']:>8.2f}x{row['prompt_tokens_computed']:>8} prompt tokens")
    settings = {name: value for name, value in vars(load).items() if name not in {"json", "model", "seed"}}
    model = "given" if load.model else SHAPE_40M
    record = {
        "benchmark": "prompt_work",
        **provenance(load.seed),
        "model": model,
        "load": settings,
        "results": rows,
    }
    write_result(load.json, record)


if __name__ == "__main__":
    main()
