"""The CPU kernels as several ranks, each on a thread of this process: the same bits as one rank."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decoder_driver import Sequences, Span, compiled_pool, write_checkpoint
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.memory.kv_pool import KvPool, StoredBlock
from headway_executor.models.compiled import CompiledModel, part_for
from headway_executor.models.compiled_loading import load_compiled
from headway_executor.models.families import read_model_config
from headway_executor.models.stage import Stage
from headway_executor.rank_place import RankPlace
from headway_executor.ranks.shared_memory import OwnMemory
from headway_executor.ranks.stage_mates import DivergedError, SharedRows
from headway_kernels.cpu.library import CpuLibrary, installed_variants, runs_here, variant_of
from headway_kernels.cpu.meeting import POST_BYTES, MeetingPlace
from quantised_checkpoints import quantise

BY_NAME = {variant_of(path): path for path in installed_variants() if runs_here(path)}
STEPS = (
    [Span(0, 0, 70), Span(1, 0, 1), Span(2, 0, 33)],
    [Span(2, 33, 1), Span(0, 70, 20), Span(1, 1, 1)],
    [Span(0, 90, 1), Span(1, 2, 1), Span(2, 34, 1)],
)

pytestmark = pytest.mark.skipif(not BY_NAME, reason="needs the CPU kernels")


@pytest.fixture(params=BY_NAME)
def library(request):
    return CpuLibrary(BY_NAME[request.param])


class Ranks:
    """``degree`` ranks of one stage, who share the memory of this process."""

    def __init__(self, directory, library, sequences, degree, **settings):
        config = read_model_config(directory)
        posts = torch.zeros(degree * POST_BYTES, dtype=torch.uint8)
        memory = OwnMemory()
        memory.bytes(1 << 22)  # Later it must not grow: each thread would get memory of its own.
        self.sequences = sequences
        self.models = []
        for rank in range(degree):
            rows = SharedRows(MeetingPlace(library, posts, rank=rank, size=degree), memory)
            part = part_for(library, config, RankPlace(rank=rank, tensor_parallel=degree))
            stage = Stage(part, SimpleNamespace(rows=lambda *_, rows=rows: rows))
            with torch.inference_mode(), Checkpoint(directory) as checkpoint:
                decoder = load_compiled(
                    config,
                    checkpoint,
                    library,
                    max_model_len=config.context,
                    block_size=sequences.block_size,
                    stage=stage,
                    **{"quantization": "none", "num_threads": 1} | settings,
                )
            pool = KvPool(
                num_layers=config.num_layers,
                num_blocks=sequences.num_blocks,
                block_size=sequences.block_size,
                block=StoredBlock((decoder.block_floats,), torch.float32),
                device=torch.device("cpu"),
            )
            self.models.append(CompiledModel(decoder, pool, stage))

    def logits(self, spans):
        """One step in all ranks; what each of them answers."""
        answers = [None] * len(self.models)

        def run(rank):
            answers[rank] = self.sequences.last_logits(self.models[rank], spans).clone()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        return answers


def one_rank(directory, library, sequences, **settings):
    config = read_model_config(directory)
    with torch.inference_mode(), Checkpoint(directory) as checkpoint:
        decoder = load_compiled(
            config,
            checkpoint,
            library,
            max_model_len=config.context,
            block_size=sequences.block_size,
            **{"quantization": "none", "num_threads": 1} | settings,
        )
    return CompiledModel(decoder, compiled_pool(directory, decoder, sequences))


SHAPES = {
    "even": {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 128},
    "columns of no equal parts": {"hidden_size": 36, "intermediate_size": 52, "vocab_size": 90, "head_dim": 10},
    "one key-value head": {"num_key_value_heads": 1, "hidden_size": 80, "sliding_window": 20},
    "a key-value head each": {"num_key_value_heads": 4, "intermediate_size": 100, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("shape", SHAPES)
def test_ranks_give_the_bits_of_one_rank(library, tmp_path, shape, form, degree):
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    directory = write_checkpoint(tmp_path / "model", dtype=dtype, **SHAPES[shape])
    settings = {"quantization": form if form.startswith("int") else "none"}
    sequences = Sequences(num_rows=3, length=100, vocab_size=90, block_size=8)
    alone = one_rank(directory, library, sequences, **settings)
    ranks = Ranks(directory, library, sequences, degree, **settings)
    for spans in STEPS:
        expected = sequences.last_logits(alone, spans)
        assert all(torch.equal(found, expected) for found in ranks.logits(spans))


MIXTURE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "hidden_size": 80,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 72,
    "mlp_only_layers": [1],
    "num_hidden_layers": 3,
}
STACKED = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 36,
    "hidden_act": "silu",
    "sliding_window": 20,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "hidden_size": 72,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
}
SPARSE = {
    "mixture": MIXTURE,
    "experts in one tensor": STACKED,
    "latent": LATENT,
    "latent, whole queries": LATENT | {"q_lora_rank": None},
}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("form", ["float32", "int8", pytest.param("int4", marks=pytest.mark.deep)])
@pytest.mark.parametrize("model", SPARSE)
def test_ranks_of_mixtures_and_latent_attention_give_the_bits_of_one_rank(library, tmp_path, model, form, degree):
    directory = write_checkpoint(tmp_path / "model", **SPARSE[model])
    settings = {"quantization": form if form.startswith("int") else "none"}
    sequences = Sequences(num_rows=3, length=100, vocab_size=90, block_size=8)
    alone, ranks = (
        one_rank(directory, library, sequences, **settings),
        Ranks(directory, library, sequences, degree, **settings),
    )
    for spans in STEPS:
        expected = sequences.last_logits(alone, spans)
        assert expected.isfinite().all()
        assert all(torch.equal(found, expected) for found in ranks.logits(spans))


def test_ranks_of_several_threads_give_the_bits_of_one_rank(library, tmp_path):
    directory = write_checkpoint(tmp_path / "model", hidden_size=96)
    sequences = Sequences(num_rows=3, length=100, vocab_size=90, block_size=16)
    alone = one_rank(directory, library, sequences)
    ranks = Ranks(directory, library, sequences, 2, num_threads=2)
    for spans in STEPS:
        assert torch.equal(ranks.logits(spans)[0], sequences.last_logits(alone, spans))


def test_a_step_that_draws_nothing(library, tmp_path):
    directory = write_checkpoint(tmp_path / "model")
    sequences = Sequences(num_rows=2, length=100, vocab_size=90, block_size=16)
    alone, ranks = one_rank(directory, library, sequences), Ranks(directory, library, sequences, 2)
    rows = sequences.step_rows([Span(0, 0, 50), Span(1, 0, 9)])
    nothing = type(rows)(rows.numbers, rows.num_new, rows.num_computed, rows.tables, np.empty(0, dtype=np.int64))
    sequences.step_rows = lambda _: nothing
    assert all(len(found) == 0 for found in ranks.logits([]))
    sequences.last_logits(alone, [])
    del sequences.step_rows
    spans = [Span(1, 9, 1), Span(0, 50, 7)]
    assert torch.equal(ranks.logits(spans)[1], sequences.last_logits(alone, spans))


def test_ranks_that_begin_different_steps_are_found(library, tmp_path):
    directory = write_checkpoint(tmp_path / "model")
    sequences = Sequences(num_rows=1, length=100, vocab_size=90, block_size=16)
    ranks = Ranks(directory, library, sequences, 2)
    errors = []

    def run(rank, count):
        try:
            sequences.last_logits(ranks.models[rank], [Span(0, 0, count)])
        except DivergedError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=place, daemon=True) for place in ((0, 5), (1, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == ["the ranks of this executor began different steps"] * 2


CODED_MIXTURE = MIXTURE | {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}


@pytest.mark.parametrize(
    ("kind", "activations", "model"),
    [
        ("awq", "auto", {}),
        ("gptq-act-order", "auto", {}),
        ("fp8-blocks", "auto", {}),
        ("bitnet", "auto", {"architectures": ["BitNetForCausalLM"]}),
        ("awq", "int8", {}),
        ("w8a16", "int8", {}),
        ("awq", "auto", CODED_MIXTURE),
        ("fp8-blocks", "auto", CODED_MIXTURE),
        ("w8a8", "int8", CODED_MIXTURE),
        ("mxfp4", "int8", STACKED),
    ],
)
def test_ranks_of_a_quantised_checkpoint_give_the_bits_of_one_rank(library, tmp_path, kind, activations, model):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    directory = write_checkpoint(tmp_path / "model", **model | sizes)
    quantise(directory, kind)
    sequences = Sequences(num_rows=3, length=100, vocab_size=90, block_size=8)
    settings = {"activations": activations}
    alone = one_rank(directory, library, sequences, **settings)
    ranks = Ranks(directory, library, sequences, 2, **settings)
    for spans in STEPS:
        expected = sequences.last_logits(alone, spans)
        assert all(torch.equal(found, expected) for found in ranks.logits(spans))
