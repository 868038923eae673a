"""What a KV cache of 8 bits, or products of 8-bit floats, cost in quality: a text's loss with them beside without, on one backend.

Owns: scoring a text through a backend's steps. Must not know: how a backend stores and multiplies.

    python benchmarks/loss_of_codes.py --json result.json                           # the demo model, PyTorch operators
    python benchmarks/loss_of_codes.py --dtypes bfloat16 --model DIR --text held_out.txt
    python benchmarks/loss_of_codes.py --backend triton --device cuda --dtypes bfloat16
    python benchmarks/loss_of_codes.py --of fp8 --chunk 256                         # the same roundings, PyTorch operators
    python benchmarks/loss_of_codes.py --of fp8 --backend triton --device cuda --chunk 256   # inputs of many tokens are rounded

The loss is the mean negative log-likelihood per token, in nats, over consecutive windows of the text. A window runs in
chunks, so that most of its tokens attend to keys and values that were stored by an earlier step.
"""

import argparse
import math
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

import headway
from headway_executor.backend import BackendConfig, ExecutorBackend, NewRow, StepBatch, StepResult
from headway_executor.models.families import read_model_config
from headway_executor.models.linear import Linear
from headway_executor.startup.registry import create_backend
from headway_kernels import kv_codes
from headway_kernels.gpu.linear.float8 import BLOCK
from headway_kernels.gpu.linear.weights import quantize
from headway_kernels.gpu.tunings import MOST_FEW_TOKENS
from headway_proto.columns import EMPTY_COLUMN
from headway_proto.sampling import SamplingParams
from program import add_line, count, count_or_none, parser_of, provenance, write_result

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
BLOCK_SIZE = 16
FORMS: dict[str, dict[str, dict[str, object]]] = {
    "kv_cache_dtype": {"auto": {}, "fp8": {"kv_cache_dtype": "fp8"}},
    "fp8": {
        "none": {},
        "exact inputs": {"quantization": "fp8", "options": {"activations": "exact"}},
        "rounded inputs": {"quantization": "fp8"},
    },
}
"""What is compared with the first: settings of the backend."""


class Scorer:
    """An open backend that scores one window after the other, each in row 0 and in the same blocks."""

    def __init__(self, backend: ExecutorBackend, config: BackendConfig) -> None:
        self._backend = backend
        self._chunk = config.max_num_batched_tokens
        self._blocks = np.arange(config.num_kv_blocks, dtype=np.int32)
        self.info = backend.open(config)
        self._step = 0

    def nats(self, token_ids: np.ndarray) -> float:
        """The summed loss of all tokens of a window but the first."""
        new = NewRow(
            row=0,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=0,
            sampling=SamplingParams(temperature=0.0, prompt_logprobs=0),
        )
        total = 0.0
        for start in range(0, len(token_ids), self._chunk):
            end = min(start + self._chunk, len(token_ids))
            for reported in self._run(new, start, end).prompt_logprobs:
                total -= float(reported.values.values()[0].sum())
        return total

    def _run(self, new: NewRow, start: int, end: int) -> StepResult:
        is_first, row = start == 0, np.zeros(1, dtype=np.int32)
        blocks = self._blocks if is_first else EMPTY_COLUMN
        result = self._backend.execute(
            StepBatch(
                step=self._step,
                finished_rows=row if is_first and self._step else EMPTY_COLUMN,
                new_rows=(new,) if is_first else (),
                new_blocks=np.stack([np.zeros_like(blocks), blocks]),
                rows=row,
                num_scheduled_tokens=row + end - start,
                num_computed_tokens=row + start,
                samples=row + int(end == len(new.token_ids)),
                block_table=self._blocks[None],
            )
        )
        self._step += 1
        return result.result() if isinstance(result, Future) else result


class Float8Reference:
    """Products of PyTorch operators with the roundings of ``--quantization fp8``, which that backend does not have.

    The head stays as it is; ``rounds``: inputs of more than 64 tokens, too.
    """

    def __init__(self, *, rounds: bool, num_head: int) -> None:
        self._rounds = rounds
        self._num_head = num_head
        self._made, self._called = Linear.__init__, Linear.__call__

    def __enter__(self) -> None:
        made, called = self._made, self._called

        def rounded_weight(linear: Linear, weight: Tensor, bias: Tensor | None, **form: Any) -> None:
            if len(weight) != self._num_head:
                codes, scales = quantize(weight, "fp8")
                weight = codes.float() * scales[:, None]
            made(linear, weight, bias, **form)

        def rounded_inputs(linear: Linear, inputs: Tensor) -> Tensor:
            is_head = len(linear._weight) == self._num_head  # noqa: SLF001 (which product it is)
            if self._rounds and len(inputs) > MOST_FEW_TOKENS and not is_head:
                blocks = functional.pad(inputs, (0, -inputs.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
                rounded = kv_codes.decode(*kv_codes.encode(blocks)).flatten(1)[:, : inputs.shape[1]]
                inputs = rounded.to(inputs.dtype)
            return called(linear, inputs)

        Linear.__init__, Linear.__call__ = rounded_weight, rounded_inputs

    def __exit__(self, *_: object) -> None:
        Linear.__init__, Linear.__call__ = self._made, self._called


def emulating(arguments: argparse.Namespace, settings: dict[str, object]) -> AbstractContextManager[None]:
    """What stands for products of 8-bit floats where PyTorch operators compute."""
    if arguments.backend != "torch" or settings.pop("quantization", "none") != "fp8":
        return nullcontext()
    config = read_model_config(arguments.model)
    return Float8Reference(rounds=not settings.pop("options", None), num_head=config.vocab_size)


def loss(arguments: argparse.Namespace, token_ids: list[int], dtype: str, settings: dict[str, object]) -> float:
    """Nats per token; every window is scored alone."""
    settings = dict(settings)
    with emulating(arguments, settings):
        return _loss(arguments, token_ids, dtype, settings)


def _loss(arguments: argparse.Namespace, token_ids: list[int], dtype: str, settings: dict[str, object]) -> float:
    backend = create_backend(arguments.backend)
    config = BackendConfig(
        model=str(arguments.model),
        device=arguments.device,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        num_kv_blocks=-(-(arguments.window + 1) // BLOCK_SIZE),
        max_model_len=arguments.window + 1,
        max_num_seqs=1,
        max_num_batched_tokens=arguments.chunk,
        swap_space_mib=0,
        **({"options": {"kernels": "eager"}} if arguments.backend == "torch" else {}) | settings,
    )
    scorer = Scorer(backend, config)
    total, number = 0.0, 0
    for start in range(0, len(token_ids) - 1, arguments.window):
        part = np.array(token_ids[start : start + arguments.window + 1], dtype=np.int32)
        total += scorer.nats(part)
        number += len(part) - 1
    backend.close()
    return total / number


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--text", type=Path, default=DEMO_MODEL / "held_out.txt")
    parser.add_argument("--tokens", type=count_or_none, default=0, help="of the text; 0: all")
    parser.add_argument("--window", type=count, default=256, help="tokens that are scored together")
    parser.add_argument("--of", choices=sorted(FORMS), default="kv_cache_dtype", help="what is compared")
    parser.add_argument("--chunk", type=count, default=64, help="tokens of a step")
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the model, with commas between")
    parser.add_argument("--lines", type=Path, help="add each line, as soon as it is measured, to this file")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    token_ids = Tokenizer.from_file(str(arguments.model / "tokenizer.json")).encode(arguments.text.read_text()).ids
    token_ids = token_ids[: arguments.tokens or None]
    results = []
    for dtype in arguments.dtypes.split(","):
        losses = {name: loss(arguments, token_ids, dtype, settings) for name, settings in FORMS[arguments.of].items()}
        without = next(iter(losses.values()))
        for name, nats in losses.items():
            change = nats / without - 1
            line = {"dtype": dtype, arguments.of: name, "nats_per_token": round(nats, 5)}
            line |= {"perplexity": round(math.exp(nats), 4), "relative_difference": round(change, 6)}
            results.append(line)
            add_line(arguments.lines, {"kind": f"{arguments.of} loss", "backend": arguments.backend, **line})
            print(f"{dtype:9} {arguments.of} {name:14} {nats:.5f} nats per token ({change:+.4%})", flush=True)
    record = {
        **provenance(arguments.seed),
        "backend": arguments.backend,
        "device": arguments.device,
        "model": arguments.model.name,
        "tokens": len(token_ids),
        "window": arguments.window,
        "chunk": arguments.chunk,
        "results": results,
    }
    write_result(arguments.json, record)


if __name__ == "__main__":
    main()
