"""Latent attention beside attention with whole keys and values: bytes of KV memory, and tokens per second, by context.

Owns: the two models, the turns, the table and the result file. Must not know: how a row of a token is stored.

Both are random, in bfloat16, on the torch backend, and have heads of the same number and size. The latent one makes keys and
values of all heads from one compressed row of a token; the plain one has a key and a value for each head. Projections differ
as far as this asks for. Each runs the same steps, by turns in one run, and the best round counts. ``--tokens`` are shared by
the rows: with 8,192, one row has a context of 8,192 and each of eight one of 1,024.

    python benchmarks/latent.py --shape minicpm3 --rows 1,8 --tokens 8192 --json result.json
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from headway_executor.backend import BackendConfig
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.models.compiled_loading import compiled_layout
from headway_executor.models.families import read_model_config
from headway_executor.models.part import whole
from headway_kernels.cpu.library import load_library
from program import count, counts, parser_of, provenance, write_result
from ranks import BLOCK_SIZE, best, time_steps, write_random

SHAPES = {
    "minicpm3": {
        "hidden_size": 2560,
        "num_attention_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 6400,
    },
    "deepseek-v2-lite": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 5632,
    },
}
"""Layers of MiniCPM3 4B, and of DeepSeek V2 Lite, with a dense feed-forward of the work of its experts."""


def write_models(directory: Path, arguments: argparse.Namespace) -> dict[str, Path]:
    """Write both models, with weights that bfloat16 holds."""
    shape: dict[str, Any] = SHAPES[arguments.shape]
    common = {
        "vocab_size": arguments.vocab,
        "num_hidden_layers": arguments.layers,
        "num_key_value_heads": shape["num_attention_heads"],
        "max_position_embeddings": 2 * arguments.tokens,
        "eos_token_id": 0,
    }
    latent = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": arguments.layers,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    }
    head_dim = shape["qk_nope_head_dim"] + shape["qk_rope_head_dim"]
    configs = {
        "latent": common | shape | latent,
        "plain": common | shape | {"architectures": ["LlamaForCausalLM"], "head_dim": head_dim},
    }
    return {name: write_random(directory / name, config, arguments.seed) for name, config in configs.items()}


def opened(model: Path, arguments: argparse.Namespace) -> TorchBackend:
    """Open one model."""
    most_blocks = max(rows * width_of(rows, arguments) for rows in arguments.rows)
    backend = TorchBackend()
    backend.open(
        BackendConfig(
            model=str(model),
            num_threads=arguments.threads,
            quantization=arguments.quantization,
            dtype="bfloat16",
            block_size=BLOCK_SIZE,
            max_model_len=max(width_of(rows, arguments) for rows in arguments.rows) * BLOCK_SIZE,
            max_num_seqs=max(arguments.rows),
            max_num_batched_tokens=arguments.tokens,
            num_kv_blocks=most_blocks,
            swap_space_mib=0,
        )
    )
    return backend


def bytes_of_token(model: Path) -> int:
    """Of keys and values in all layers, as the CPU kernels store them."""
    library = load_library()
    if library is None:
        raise SystemExit("no CPU kernels run here")
    config = read_model_config(model)
    layout = compiled_layout(config, whole(config), library, BLOCK_SIZE, torch.bfloat16)
    return layout.block_bytes // BLOCK_SIZE


def width_of(rows: int, arguments: argparse.Namespace) -> int:
    """Blocks of a row."""
    return -(-(arguments.tokens // rows + arguments.steps + 1) // BLOCK_SIZE)


def measure(backends: dict[str, TorchBackend], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a record for each number of rows: tokens per second of both, and the latent one's as a ratio."""
    records: list[dict[str, Any]] = []
    for rows in arguments.rows:
        context = arguments.tokens // rows
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in backends}
        for _ in range(arguments.rounds):
            for name, backend in backends.items():
                rounds[name].append(time_steps(backend, rows, 1, arguments.steps, context))
        record: dict[str, Any] = {"rows": rows, "context": context}
        for name, some in rounds.items():
            record[f"{name}_decode_rate"] = round(1e3 * rows / best(some)["decode_ms"], 2)
            record[f"{name}_prompt_rate"] = round(1e3 * rows * context / min(one["prompt_ms"] for one in some), 1)
        for kind in ("decode", "prompt"):
            record[f"{kind}_ratio"] = round(record[f"latent_{kind}_rate"] / record[f"plain_{kind}_rate"], 2)
        records.append(record)
        print(
            f"{rows:>5} {context:>8} {record['latent_decode_rate']:>9} {record['plain_decode_rate']:>9}"
            f" {record['decode_ratio']:>7} {record['latent_prompt_rate']:>11} {record['plain_prompt_rate']:>9}"
            f" {record['prompt_ratio']:>7}"
        )
    return records


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="minicpm3")
    parser.add_argument("--rows", type=counts, default="1,8")
    parser.add_argument("--tokens", type=count, default=8192, help="contexts of all rows together")
    parser.add_argument("--layers", type=count, default=2)
    parser.add_argument("--vocab", type=count, default=8192)
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--steps", type=count, default=20, help="decode steps of a round")
    parser.add_argument("--rounds", type=count, default=3)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        models = write_models(Path(directory), arguments)
        stored = {name: bytes_of_token(model) for name, model in models.items()}
        backends = {name: opened(model, arguments) for name, model in models.items()}
    print(f"bytes of a token in {arguments.layers} layers: latent {stored['latent']:,}, plain {stored['plain']:,}")
    print(f"{'rows':>5} {'context':>8} {'decode: latent':>9}  plain   ratio   prompts     plain   ratio")
    results = measure(backends, arguments)
    for backend in backends.values():
        backend.close()
    load = {name: value for name, value in vars(arguments).items() if name not in ("seed", "json", "rows")}
    record = {"benchmark": "latent", **provenance(arguments.seed), "load": load, "kv_bytes_of_token": stored}
    write_result(arguments.json, record | {"results": results})


if __name__ == "__main__":
    main()
