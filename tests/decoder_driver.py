"""Drives a tiny decoder on the CPU kernels, or eagerly, step by step, with block tables in a random order.

Owns: random checkpoints of any shape, the sequences of a few rows, and running spans of them.
Must not know: transformers, so that a process which only runs kernels starts quickly.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.memory.kv_pool import KvPool
from headway_executor.models.compiled import CompiledModel
from headway_executor.models.compiled_loading import compiled_layout, load_compiled
from headway_executor.models.config import ModelConfig
from headway_executor.models.eager import EagerModel
from headway_executor.models.eager_loading import load_eager
from headway_executor.models.families import read_model_config
from headway_executor.models.forward import ForwardPass, StepRows, last_tokens
from headway_executor.models.kv_layout import KvLayout, vectors_layout
from headway_executor.models.part import whole
from headway_executor.models.recurrence import RowStates
from headway_executor.models.stored_names import as_stored
from headway_executor.models.tensor_shapes import expected_tensors
from headway_kernels.cpu.coded_weight import CODE_DTYPES, CodedWeight
from headway_kernels.cpu.decoder import Decoder
from headway_kernels.cpu.library import CpuLibrary, PackedLinear, Team, WeightForm

CPU = torch.device("cpu")


def write_checkpoint(directory: Path, *, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """Write a random checkpoint; ``changes`` are fields of its config.json. Of Mistral's family, whose window is free."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 90,
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 640,
        "sliding_window": None,
        "eos_token_id": 0,
        "rope_theta": 10_000.0,
    } | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if "norm" in name:
            return 0.6 + torch.rand(shape, generator=generator)
        return torch.randn(shape, generator=generator) * 0.25

    shapes = expected_tensors(read_model_config(directory))
    tensors = {name: drawn(name, shape).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(frozen=True)
class Span:
    """``num_new`` tokens of a row, of which ``num_computed`` are already in the pool."""

    row: int
    num_computed: int
    num_new: int


class Sequences:
    """Random tokens of ``num_rows`` rows of ``length``, and a block table for each; no two share a block."""

    def __init__(self, *, num_rows: int, length: int, vocab_size: int, block_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        width = -(-length // block_size)
        self.num_rows, self.length, self.block_size = num_rows, length, block_size
        self.num_blocks = num_rows * width
        self.token_ids = rng.integers(0, vocab_size, size=(num_rows, length)).astype(np.int32)
        self.tables = rng.permutation(self.num_blocks).reshape(num_rows, width).astype(np.int32)

    def step_rows(self, spans: Sequence[Span]) -> StepRows:
        """The step that runs ``spans``, with the logits of each one's last token asked for."""
        numbers, num_computed, num_new = np.array(
            [(span.row, span.num_computed, span.num_new) for span in spans], dtype=np.int64
        ).T.copy()
        return StepRows(numbers, num_new, num_computed, self.tables[numbers], last_tokens(num_new))

    def last_logits(self, forward: ForwardPass, spans: Sequence[Span]) -> Tensor:
        """Run a step; logits of the last token of each span."""
        with torch.inference_mode():
            return forward.run(self.step_rows(spans), torch.from_numpy(self.token_ids))

    def logits_of_all_tokens(self, forward: ForwardPass, spans: Sequence[Span]) -> Tensor:
        """Run a step; logits of every token, span after span."""
        rows = self.step_rows(spans)
        rows = replace(rows, wanted=np.arange(int(rows.num_new.sum())))
        with torch.inference_mode():
            return forward.run(rows, torch.from_numpy(self.token_ids))

    def all_logits(self, decoder: Decoder, pool: KvPool, spans: Sequence[Span]) -> list[Tensor]:
        """Run a step; for each span the logits of all its tokens."""
        rows = self.step_rows(spans)
        places, positions = rows.token_places()
        logits = decoder.forward(
            token_ids=self.token_ids[rows.numbers[places], positions],
            num_tokens=rows.num_new,
            first_positions=rows.num_computed,
            tables=rows.tables,
            sampled=np.arange(len(places)),
            pool=pool.layers,
            row_numbers=rows.numbers,
        )
        return list(logits.split(rows.num_new.tolist()))


def compiled_decoder(
    directory: Path,
    library: CpuLibrary,
    *,
    block_size: int,
    quantization: str = "none",
    num_threads: int = 1,
    activations: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """The checkpoint on the kernels."""
    with torch.inference_mode(), Checkpoint(directory) as checkpoint:
        config = as_stored(read_model_config(directory), checkpoint, print)
        return load_compiled(
            config,
            checkpoint,
            library,
            quantization=quantization,
            max_model_len=config.context,
            block_size=block_size,
            num_threads=num_threads,
            activations=activations,
            dtype=dtype,
        )


def compiled_pool(directory: Path, decoder: Decoder, sequences: Sequences, *, stale: float = 0.0) -> KvPool:
    """A pool for ``sequences``, full of ``stale`` numbers, as if earlier rows had left them."""
    config = read_model_config(directory)
    own = compiled_layout(config, whole(config), decoder.library, sequences.block_size, decoder.kv_dtype)
    pool = _pool(own, sequences)
    pool.layers.fill_(stale)
    return pool


def compiled_model(directory: Path, library: CpuLibrary, sequences: Sequences, **settings: object) -> CompiledModel:
    """The checkpoint on the kernels, with a pool; ``settings`` as of ``compiled_decoder``."""
    decoder = compiled_decoder(directory, library, block_size=sequences.block_size, **settings)
    states = states_of(read_model_config(directory), sequences)
    return CompiledModel(decoder, compiled_pool(directory, decoder, sequences), states=states)


def states_of(config: ModelConfig, sequences: Sequences) -> RowStates | None:
    """Of as many rows as there are; None of a model without states."""
    layers = config.recurrences(range(config.num_layers))
    return RowStates(layers, sequences.num_rows, CPU) if layers else None


def eager_model(directory: Path, sequences: Sequences) -> EagerModel:
    """The checkpoint as torch operators, with a pool."""
    with torch.inference_mode(), Checkpoint(directory) as checkpoint:
        config = as_stored(read_model_config(directory), checkpoint, print)
        layout = vectors_layout(config, whole(config), sequences.block_size, torch.float32, "auto")
        decoder, embedding = load_eager(
            config, checkpoint, max_model_len=config.context, dtype=torch.float32, device=CPU, places=layout.places
        )
    pool = _pool(layout, sequences)
    return EagerModel(config, decoder, embedding, pool, torch.float32, states=states_of(config, sequences))


def _pool(layout: KvLayout, sequences: Sequences) -> KvPool:
    return KvPool(
        num_layers=max(1, layout.num_layers),  # A model of states alone has blocks, too.
        num_blocks=sequences.num_blocks,
        block_size=sequences.block_size,
        block=layout.block,
        device=CPU,
    )


def exercise(library_path: Path, *directories: Path) -> None:
    """Run every weight form and a few mixed steps of small decoders, to see that nothing undefined happens."""
    library = CpuLibrary(library_path)
    team = Team(library, 2)
    forms = [form for form in WeightForm if form is not WeightForm.PAIRS or library.multiplies_pairs]
    for form in forms:
        for outputs, inputs, rows in ((1, 1, 1), (50, 7, 13), (34, 21, 3)):
            weight = torch.randn(outputs, inputs).bfloat16().float()
            for gated in (False, True)[: 2 - outputs % 2]:
                product = PackedLinear(library, weight, torch.randn(outputs), form, gated=gated)
                assert product(team, torch.randn(rows, inputs), torch.rand(inputs), 1e-5).isfinite().all()
    for form, dtype in CODE_DTYPES.items():
        codes = torch.randint(0, 16, (34, 40), dtype=torch.uint8).view(dtype)
        for minima, rounds_inputs in ((torch.rand(34, 2), False), (torch.rand(34, 2), True), (None, True)):
            coded = CodedWeight(form, codes, torch.rand(34, 2), 32, minima, rounds_inputs=rounds_inputs)
            assert PackedLinear(library, coded, None)(team, torch.randn(13, 40)).isfinite().all()
    wide, narrow = torch.float32, torch.bfloat16
    ways = (("none", 4, wide), ("none", 32, narrow), ("int8", 4, narrow), ("int8", 32, wide), ("int4", 32, wide))
    for quantization, block_size, dtype in ways:
        for directory in directories:
            sequences = Sequences(num_rows=3, length=150, vocab_size=90, block_size=block_size)
            settings = {"quantization": quantization, "num_threads": 2, "dtype": dtype}
            model = compiled_model(directory, library, sequences, **settings)
            first = sequences.last_logits(model, [Span(0, 0, 140), Span(1, 0, 1), Span(2, 0, 37)])
            then = sequences.last_logits(model, [Span(2, 37, 1), Span(0, 140, 10), Span(1, 1, 1)])
            assert first.isfinite().all()
            assert then.isfinite().all()
