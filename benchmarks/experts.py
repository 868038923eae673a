"""What experts cost: tokens per second of a small mixture against the dense model of equal active parameters.

Owns: the two models, the turns, the table and the result file. Must not know: how experts are multiplied.

Both are random, of the Qwen3 family and on the torch backend. They differ in the feed-forward alone: the dense one is as
wide as all experts together that a token of the mixture goes through. Each runs the same steps, by turns in one run, and
the best round counts. Decode steps of few rows read more weights in the mixture, as rows choose different experts.

    python benchmarks/experts.py --rows 1,8,32 --json result.json
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from headway_executor.backend import BackendConfig
from headway_executor.backends.torch_backend import TorchBackend
from program import count, counts, parser_of, provenance, write_result
from ranks import BLOCK_SIZE, PROMPT, best, time_steps, write_random


def write_models(directory: Path, arguments: argparse.Namespace) -> dict[str, Path]:
    """Write both models, with weights that bfloat16 holds."""
    common = {
        "vocab_size": arguments.vocab,
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.hidden // 64 or 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "eos_token_id": 0,
    }
    mixture = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": arguments.inner,
        "moe_intermediate_size": arguments.inner,
        "num_experts": arguments.experts,
        "num_experts_per_tok": arguments.chosen,
        "norm_topk_prob": True,
    }
    dense = {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": arguments.chosen * arguments.inner}
    configs = {"mixture": common | mixture, "dense": common | dense}
    return {name: write_random(directory / name, config, arguments.seed) for name, config in configs.items()}


def opened(model: Path, arguments: argparse.Namespace) -> TorchBackend:
    """Open one model."""
    rows = max(arguments.rows)
    width = -(-(PROMPT + arguments.steps + 1) // BLOCK_SIZE)
    backend = TorchBackend()
    backend.open(
        BackendConfig(
            model=str(model),
            num_threads=arguments.threads,
            quantization=arguments.quantization,
            block_size=BLOCK_SIZE,
            max_model_len=width * BLOCK_SIZE,
            max_num_seqs=rows,
            max_num_batched_tokens=rows * PROMPT,
            num_kv_blocks=rows * width,
            swap_space_mib=0,
        )
    )
    return backend


def measure(backends: dict[str, TorchBackend], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record for each number of rows: tokens per second of both, and the mixture's share of the dense one's."""
    records: list[dict[str, Any]] = []
    for rows in arguments.rows:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in backends}
        for _ in range(arguments.rounds):
            for name, backend in backends.items():
                rounds[name].append(time_steps(backend, rows, 1, arguments.steps))
        fastest = {name: best(some) for name, some in rounds.items()}
        prompts = {name: min(one["prompt_ms"] for one in some) for name, some in rounds.items()}
        record: dict[str, Any] = {"rows": rows}
        for name in backends:
            record[f"{name}_decode_rate"] = round(1e3 * rows / fastest[name]["decode_ms"])
            record[f"{name}_prompt_rate"] = round(1e3 * rows * PROMPT / prompts[name])
        for kind in ("decode", "prompt"):
            record[f"{kind}_ratio"] = round(record[f"mixture_{kind}_rate"] / record[f"dense_{kind}_rate"], 3)
        records.append(record)
        print(
            f"{rows:>5} {record['mixture_decode_rate']:>9} {record['dense_decode_rate']:>9} {record['decode_ratio']:>7}"
            f" {record['mixture_prompt_rate']:>11} {record['dense_prompt_rate']:>9} {record['prompt_ratio']:>7}"
        )
    return records


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--rows", type=counts, default="1,8,32")
    parser.add_argument("--layers", type=count, default=8)
    parser.add_argument("--hidden", type=count, default=768)
    parser.add_argument("--inner", type=count, default=384, help="columns of one expert")
    parser.add_argument("--experts", type=count, default=32)
    parser.add_argument("--chosen", type=count, default=4, help="experts of a token")
    parser.add_argument("--vocab", type=count, default=8192)
    parser.add_argument("--quantization", choices=("none", "int8"), default="none")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--steps", type=count, default=40, help="decode steps of a round")
    parser.add_argument("--rounds", type=count, default=5)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        models = write_models(Path(directory), arguments)
        backends = {name: opened(model, arguments) for name, model in models.items()}
    print(f"{'tokens a second, decode: mixture':>15}     dense   ratio     prompts     dense   ratio")
    results = measure(backends, arguments)
    for backend in backends.values():
        backend.close()
    load = {name: value for name, value in vars(arguments).items() if name not in ("seed", "json", "rows")}
    record = {"benchmark": "experts", **provenance(arguments.seed), "load": load | {"prompt": PROMPT}}
    write_result(arguments.json, record | {"results": results})


if __name__ == "__main__":
    main()
