"""Headway's turns: the real scheduler, batch state and backend in one process.

headway_driver.py MODEL QUANTIZATION:ACTIVATIONS:DTYPE THREADS
"""

import sys
from pathlib import Path

import torch
from turns import redirected_output, take_turns

from headway_executor.backend import BackendConfig
from headway_kernels.cpu.library import load_library
from program import commit_of
from quantized_weights import Precision, held_out_loss
from torch_cpu import OfflineEngine

_KV_BLOCKS = 1400
"""Of 16 tokens: 1 GiB with the 135M shape."""


class HeadwayEngine:
    """See ``Engine``."""

    version = commit_of(Path(__file__).parent)

    def __init__(self, model: str, precision: str, num_threads: int) -> None:
        quantization, activations, dtype = precision.split(":")
        self._model = Path(model)
        self._precision = Precision(quantization, activations, getattr(torch, dtype))
        self._engine = OfflineEngine(
            BackendConfig(
                model=model,
                quantization=quantization,
                dtype=dtype,
                max_model_len=1024,
                max_num_seqs=64,
                num_kv_blocks=_KV_BLOCKS,
                num_threads=num_threads,
                options={"activations": activations},
            )
        )

    def generate(self, prompts: list[list[int]], num_output: int) -> None:
        """See ``Engine``."""
        self._engine.seconds(prompts, num_output)

    def nats(self, token_ids: list[int], window: int) -> tuple[float, int]:
        """See ``Engine``."""
        library = load_library()
        assert library is not None
        count = len(token_ids) - 1
        nats = held_out_loss(library, self._model, token_ids, window, self._precision)
        return nats * count, count


if __name__ == "__main__":
    output = redirected_output()
    take_turns(HeadwayEngine(sys.argv[1], sys.argv[2], int(sys.argv[3])), output)
