"""Structured output: whether every output follows its schema, and the cost of constrained rows per step.

Owns: the schemas, the closed loop of real core, batch state and torch backend, the rounds, and the result file. Must
not know: how a mask is made or applied.

Conformance: ``--outputs`` outputs of the demo model at temperature 1, each checked with the ``jsonschema`` package.
Cost: the time of a decode step of ``--batch`` rows, half of them constrained, against none, by turns, greedy and at
temperature 1, with the demo model (4,096 tokens) and a random 135M model (49,152 tokens). Two steps are in flight.
Steps in which rows begin or end do not count.

    python benchmarks/constraints.py --json benchmarks/results/constraints.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter, deque
from concurrent.futures import Future
from pathlib import Path

import jsonschema
import numpy as np
from tokenizers import Tokenizer

import headway
from headway_executor.backend import BackendConfig, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.columns import encode_column
from headway_proto.sampling import JSON_SCHEMA, Constraint, SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput
from headway_proto.wording import shown
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from program import count, parser_of, provenance, write_result
from random_tokenizer import random_tokenizer
from torch_cpu import SHAPE_135M, write_checkpoint

SEED = 7
PROMPT = "def parse(line):\n    return "
MAX_MODEL_LEN = 512
SCHEMAS: dict[str, object] = {
    "object": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "integer", "minimum": -99, "maximum": 99}, "minItems": 2, "maxItems": 6},
    "enum": {"enum": ["red", "green", "blue", 3, None, True]},
    "nested": {
        "type": "object",
        "properties": {
            "items": {
                "type": "array",
                "maxItems": 3,
                "items": {
                    "type": "object",
                    "properties": {
                        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                        "price": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.01},
                    },
                    "required": ["id", "price"],
                    "additionalProperties": False,
                },
            },
            "kind": {"enum": ["a", "b"]},
        },
        "required": ["items", "kind"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 8}, {"type": "null"}]},
    "optional": {
        "type": "object",
        "properties": {"when": {"type": "string", "format": "date"}, "tags": {"type": "array", "maxItems": 2, "items": {"enum": ["x", "y"]}}},
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                "required": ["left"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
}  # fmt: skip
LONG = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "score": {"type": "number", "minimum": 0, "maximum": 1},
            "kind": {"enum": ["alpha", "beta", "gamma"]},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{3,8}$"}, "maxItems": 4},
        },
        "required": ["name", "score", "kind", "tags"],
        "additionalProperties": False,
    },
}


class Engine:
    """Core, batch state and backend in one process, two steps in flight."""

    def __init__(self, model: Path, batch: int) -> None:
        self._backend = ThreadedBackend(TorchBackend())
        config = BackendConfig(
            model=str(model),
            dtype="float32",
            max_num_seqs=batch,
            max_model_len=MAX_MODEL_LEN,
            num_kv_blocks=batch * MAX_MODEL_LEN // 16,
        )
        self.info = self._backend.open(config)
        assert self.info.supports_constraints
        self._state = BatchState(self.info)
        self._core = Scheduler(
            SchedulerLimits(
                max_num_batched_tokens=2048, max_num_seqs=batch, max_steps_in_flight=2, enable_prefix_caching=False
            ),
            ExecutorCapacity.of(self.info),
        )
        self._handle = 0
        self._in_flight: deque[tuple[int, int | None, int, Future[StepResult]]] = deque()

    def close(self) -> None:
        """End the backend's threads."""
        self._backend.close()

    def run(
        self, prompt: list[int], samplings: list[SamplingParams], max_tokens: int
    ) -> tuple[dict[int, list[int]], list[str], list[float], float]:
        """Run a request for each of ``samplings``.

        Returns the tokens of each by its place, why they ended, the seconds between the answers of steps that decode
        all of them, and the processor time of the whole run in seconds.
        """
        first, cpu_began = self._handle, time.process_time()
        for sampling in samplings:
            self._core.add_request(self._request(prompt, sampling, max_tokens), now=0.0)
        tokens: dict[int, list[int]] = {place: [] for place in range(len(samplings))}
        reasons, gaps, before = [], [], 0.0
        while self._core.num_unfinished or self._in_flight:
            while (diff := self._core.schedule(now=0.0)) is not None:
                applied = self._state.apply(diff)
                digest = self._state.digest() if diff.step % DIGEST_INTERVAL_STEPS == 0 else None
                is_full = len(applied.batch.rows) == len(samplings) == diff.total_num_scheduled_tokens
                self._in_flight.append((diff.step, digest, is_full, self._backend.execute(applied.batch)))
            step, digest, is_full, future = self._in_flight.popleft()
            result = future.result()
            assert isinstance(result, StepResult)
            assert not result.errors, result.errors
            now = time.perf_counter()
            if before and is_full:
                gaps.append(now - before)
            before = now if is_full else 0.0
            events = self._core.update(
                ExecutorOutput(
                    epoch=0,
                    step=step,
                    sampled_token_ids=encode_column(result.sampled_token_ids),
                    state_digest=digest,
                ),
                now=0.0,
            )
            for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
                tokens[handle - first].append(token)
            reasons += [end.reason.value for end in events.finished]
        return tokens, reasons, gaps, time.process_time() - cpu_began

    def _request(self, prompt: list[int], sampling: SamplingParams, max_tokens: int) -> NewRequestEvent:
        handle, self._handle = self._handle, self._handle + 1
        return NewRequestEvent(
            origin=Origin(0, handle),
            request_id=str(handle),
            token_ids=np.array(prompt, dtype=np.int32),
            num_prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=frozenset(self.info.eos_token_ids) if sampling.constraint is not None else frozenset(),
        )


def conformance(model: Path, num_outputs: int) -> dict[str, object]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    engine = Engine(model, 64)
    names = [list(SCHEMAS)[place % len(SCHEMAS)] for place in range(num_outputs)]
    samplings = [
        SamplingParams(seed=SEED + place, constraint=Constraint(JSON_SCHEMA, json.dumps(SCHEMAS[name])))
        for place, name in enumerate(names)
    ]
    started = time.perf_counter()
    tokens, reasons, _, _ = engine.run(tokenizer.encode(PROMPT).ids, samplings, 400)
    seconds = time.perf_counter() - started
    engine.close()
    valid: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for place, name in enumerate(names):
        text = tokenizer.decode(tokens[place])
        examples.setdefault(name, text)
        try:
            jsonschema.validate(json.loads(text), SCHEMAS[name], cls=jsonschema.Draft202012Validator)
        except (ValueError, jsonschema.ValidationError) as error:
            print(f"NOT VALID ({name}): {shown(text, 200)}: {str(error).splitlines()[0]:.100}")
        else:
            valid[name] += 1
    return {
        "outputs": num_outputs,
        "valid": valid.total(),
        "valid_by_schema": {name: [valid[name], names.count(name)] for name in SCHEMAS},
        "ends": dict(Counter(reasons)),
        "tokens": sum(map(len, tokens.values())),
        "seconds": round(seconds, 2),
        "examples": examples,
    }


def cost(model: Path, arguments: argparse.Namespace) -> list[dict[str, object]]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    engine = Engine(model, arguments.batch)
    constraint = Constraint(JSON_SCHEMA, json.dumps(LONG))
    results = []
    for temperature in (1.0, 0.0):
        step_ms: dict[bool, list[float]] = {False: [], True: []}
        run_cpu_s: dict[bool, list[float]] = {False: [], True: []}
        ratios = []
        for turn in range(arguments.rounds + 1):
            for is_constrained in (False, True) if turn % 2 else (True, False):
                samplings = [
                    SamplingParams(
                        temperature=temperature,
                        seed=SEED + place,
                        constraint=constraint if is_constrained and place % 2 else None,
                    )
                    for place in range(arguments.batch)
                ]
                _, _, gaps, cpu_s = engine.run(prompt, samplings, arguments.steps)
                if turn:  # the first warms up
                    step_ms[is_constrained].append(1e3 * statistics.median(gaps))
                    run_cpu_s[is_constrained].append(cpu_s)
            if turn:
                ratios.append(step_ms[True][-1] / step_ms[False][-1])
        results.append(
            {
                "temperature": temperature,
                "batch": arguments.batch,
                "constrained": arguments.batch // 2,
                "step_ms_none": round(statistics.median(step_ms[False]), 3),
                "step_ms_half": round(statistics.median(step_ms[True]), 3),
                "processor_time_ratio": round(sum(run_cpu_s[True]) / sum(run_cpu_s[False]), 4),
                "ratio": round(statistics.median(ratios), 4),
                "ratios": [round(ratio, 4) for ratio in ratios],
            }
        )
        print(json.dumps(results[-1]), flush=True)
    engine.close()
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--outputs", type=count, default=500)
    parser.add_argument("--batch", type=count, default=64)
    parser.add_argument("--steps", type=count, default=64, help="decode steps of a round")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--models", default="demo,135m")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    demo = Path(headway.__file__).parent / "demo_model"
    result: dict[str, object] = {"provenance": provenance(SEED)}
    if arguments.outputs:
        result["conformance"] = conformance(demo, arguments.outputs)
        print(json.dumps(result["conformance"], indent=1))
    costs = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.models.split(","):
            model = demo
            if name == "135m":
                model = Path(scratch)
                write_checkpoint(model, SEED)
                vocab_size = SHAPE_135M["vocab_size"]
                assert isinstance(vocab_size, int)
                (model / "tokenizer.json").write_text(random_tokenizer(vocab_size, SEED))
            print(f"model {name}")
            costs[name] = cost(model, arguments)
    result["cost"] = costs
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()
