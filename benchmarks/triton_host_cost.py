"""The host's cost of a step of the triton backend: applying the diff, preparing inputs, building the result; no kernels
run.

Owns: the scripted steps, and replacements for everything that is launched. Needs no GPU. Must not know: how the backend
prepares a step.

A decode step of ``--rows`` rows in which one row in ``block_size`` gets a block, from the scheduler's message to the
executor's. The driver's time for copies, events and a graph's launch is left out.

    python benchmarks/triton_host_cost.py
    python benchmarks/triton_host_cost.py --rows 64,256,1024 --json result.json
"""

import json
import os
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from statistics import median

import numpy as np
import torch

from program import count, parser_of, provenance, write_result

os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported: without a device, they cannot be compiled

from gpu_shapes import TINY
from headway_executor.backend import BackendConfig
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.gpu import device_rows, device_sampler
from headway_executor.gpu.decoder import Decoder
from headway_executor.gpu.graphs import StepGraphs
from headway_proto.columns import encode_column, encode_columns
from headway_proto.sampling import SamplingParams
from headway_proto.step import (
    ExecutorOutput,
    NewRequest,
    SchedulerOutput,
    executor_frame_reader,
    executor_frame_writer,
    scheduler_frame_writer,
)

BLOCK_SIZE = 16
CONTEXT = 64
MAX_MODEL_LEN = 4096
NUM_WARM_UPS = 20


class HostStep:
    """An open backend that launches nothing, with ``num_rows`` rows that decode."""

    def __init__(self, num_rows: int) -> None:
        config = {**TINY.config, "max_position_embeddings": MAX_MODEL_LEN}
        self._num_rows = num_rows
        self._backend = TritonBackend()
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(config))
            info = self._backend.open(
                BackendConfig(
                    model=directory,
                    block_size=BLOCK_SIZE,
                    num_kv_blocks=num_rows * MAX_MODEL_LEN // BLOCK_SIZE,
                    swap_space_mib=0,
                    max_num_seqs=num_rows,
                    max_num_batched_tokens=num_rows * CONTEXT,
                    options={"weights": "random"},
                )
            )
        self._state = BatchState(info)
        self._writer, self._reader = scheduler_frame_writer(), executor_frame_reader()
        self._answers = executor_frame_writer()
        self._next_block = 0
        self._length = CONTEXT
        self._launch_nothing()

    def admit(self) -> None:
        """Give every row a prompt, whose blocks begin at random offsets."""
        requests = tuple(
            NewRequest(
                row=row,
                token_ids=encode_column(np.zeros(CONTEXT - row % BLOCK_SIZE, dtype=np.int32)),
                num_prompt_tokens=CONTEXT - row % BLOCK_SIZE,
                block_ids=encode_column(self._blocks(CONTEXT // BLOCK_SIZE)),
                num_computed_tokens=0,
                sampling=SamplingParams(temperature=0.0),
            )
            for row in range(self._num_rows)
        )
        counts = [CONTEXT - row % BLOCK_SIZE for row in range(self._num_rows)]
        exceptions = encode_columns((np.arange(self._num_rows, dtype=np.int32), np.array(counts, dtype=np.int32)))
        output = SchedulerOutput(
            epoch=1,
            step=0,
            scheduled_new_reqs=requests,
            num_scheduled_tokens=exceptions,
            total_num_scheduled_tokens=sum(counts),
        )
        self.seconds(self._writer.encode(output))

    def message(self, step: int) -> bytes:
        """Return the scheduler's message of a decode step."""
        # Row r has CONTEXT - r % BLOCK_SIZE + step - 1 computed tokens: it needs a block when that is a multiple.
        rows = np.arange(self._num_rows, dtype=np.int32)
        crossing = rows[(CONTEXT - rows % BLOCK_SIZE + step - 1) % BLOCK_SIZE == 0]
        blocks = encode_columns((crossing, self._blocks(len(crossing)))) if len(crossing) else b""
        return self._writer.encode(
            SchedulerOutput(epoch=1, step=step, new_blocks=blocks, total_num_scheduled_tokens=self._num_rows)
        )

    def seconds(self, message: bytes) -> float:
        """Return the time from a message to its answer."""
        started = time.perf_counter()
        frame = self._reader.decode(message)
        assert isinstance(frame.body, SchedulerOutput)
        batch, _ = self._state.apply(frame.body)
        result = self._backend.execute(batch)
        assert not isinstance(result, Future)
        self._answers.encode(
            ExecutorOutput(epoch=1, step=batch.step, sampled_token_ids=encode_column(result.sampled_token_ids))
        )
        return time.perf_counter() - started

    def _blocks(self, count: int) -> np.ndarray:
        found = np.arange(self._next_block, self._next_block + count, dtype=np.int32)
        self._next_block += count
        return found

    def _launch_nothing(self) -> None:
        """Replace all launches, which the interpreter would run, by nothing."""

        def nothing(*arguments: object, **named: object) -> None:
            del arguments, named

        device_rows.apply_edits = nothing
        device_sampler.store_sampled = nothing
        device_sampler.sample = nothing
        StepGraphs.launch = lambda *_: True  # type: ignore[method-assign]
        logits = torch.zeros((self._num_rows, TINY.config["vocab_size"]))
        Decoder.logits = lambda _, num_sampled: logits[:num_sampled]  # type: ignore[method-assign]


def measure(num_rows: int, num_steps: int) -> dict[str, float]:
    """Return microseconds of a step."""
    host = HostStep(num_rows)
    host.admit()
    times = [host.seconds(host.message(step)) for step in range(1, 1 + num_steps + NUM_WARM_UPS)][NUM_WARM_UPS:]
    return {"rows": num_rows, "median_us": median(times) * 1e6, "best_us": min(times) * 1e6}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", default="32,256,1024")
    parser.add_argument("--steps", type=count, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    lines = []
    print(f"{'rows':>6} {'median us':>10} {'best us':>8}")
    for num_rows in map(int, arguments.rows.split(",")):
        lines.append(measure(num_rows, arguments.steps))
        print(f"{num_rows:6d} {lines[-1]['median_us']:10.1f} {lines[-1]['best_us']:8.1f}", flush=True)
    write_result(arguments.json, {**provenance(0), "lines": lines})
    return 0


if __name__ == "__main__":
    sys.exit(main())
