"""What int8 weights cost in quality: a model's held-out loss in float32 and with quantised weights.

Owns: scoring a text with the executor's own model code. Must not know: serving.

    python benchmarks/int8_loss.py --model DIR --text held_out.txt

The loss is the mean negative log-likelihood per token, in nats, over consecutive windows of the text. The embedded demo
model is the default; its relative difference has to stay below 1%.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.nn import functional

import headway
from headway_executor.models.compiled import load_compiled
from headway_executor.models.families import read_model_config
from headway_executor.weights import Checkpoint
from headway_kernels.cpu.library import CpuLibrary, load_library
from program import count, parser_of

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"


def held_out_loss(library: CpuLibrary, model: Path, token_ids: list[int], quantization: str, window: int) -> float:
    """Return the mean loss per token in nats; every window of ``window`` tokens is scored alone."""
    config = read_model_config(model)
    num_threads = len(os.sched_getaffinity(0))
    with torch.inference_mode(), Checkpoint(model) as checkpoint:
        decoder = load_compiled(
            config,
            checkpoint,
            library,
            quantization=quantization,
            max_model_len=window,
            block_size=window,
            num_threads=num_threads,
        )
        pool = torch.zeros(config.num_layers, 1, decoder.block_floats)
        total, count = 0.0, 0
        for start in range(0, len(token_ids) - 1, window):
            part = np.array(token_ids[start : start + window + 1], dtype=np.int32)
            places = np.arange(len(part) - 1)
            logits = decoder.forward(
                token_ids=part[:-1],
                num_tokens=np.array([len(places)]),
                first_positions=np.zeros(1, np.int64),
                tables=np.zeros((1, 1), np.int32),
                sampled=places,
                pool=pool,
            )
            total += float(functional.cross_entropy(logits, torch.from_numpy(part[1:]).long(), reduction="sum"))
            count += len(places)
    return total / count


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--text", type=Path, default=DEMO_MODEL / "held_out.txt")
    parser.add_argument("--window", type=count, default=256, help="tokens per window")
    parser.add_argument("--tokens", type=int, default=0, help="score only the first so many tokens; 0: all")
    arguments = parser.parse_args()
    token_ids = Tokenizer.from_file(str(arguments.model / "tokenizer.json")).encode(arguments.text.read_text()).ids
    token_ids = token_ids[: arguments.tokens or None]
    library = load_library()
    if library is None:
        parser.error("the CPU kernels are not installed, or do not run on this processor")
    exact = held_out_loss(library, arguments.model, token_ids, "none", arguments.window)
    quantised = held_out_loss(library, arguments.model, token_ids, "int8", arguments.window)
    print(
        json.dumps(
            {
                "benchmark": "int8_loss",
                "tokens": len(token_ids),
                "float32_nats_per_token": round(exact, 5),
                "int8_nats_per_token": round(quantised, 5),
                "relative_difference": round(quantised / exact - 1, 5),
            }
        )
    )


if __name__ == "__main__":
    main()
