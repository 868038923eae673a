"""A checkpoint as a model on the CPU kernels.

Owns: the decoder's shape, and loading on several threads. Must not know: how one weight is packed.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.memory.kv_pool import StoredBlock
from headway_executor.models.alibi import score_biases
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.coded_tensors import CodedTensors
from headway_executor.models.compiled import part_for, stored_heads
from headway_executor.models.compiled_weights import WeightLoader
from headway_executor.models.config import ModelConfig
from headway_executor.models.kv_layout import KvLayout, kv_layout
from headway_executor.models.loading import ModelTensors
from headway_executor.models.part import ModelPart
from headway_executor.models.rope import halves
from headway_executor.models.stage import Stage
from headway_executor.models.stored_names import TensorSource
from headway_executor.models.tensor_shapes import layers_as_stored
from headway_executor.rank_place import ALONE
from headway_kernels.cpu.decoder import (
    Decoder,
    DecoderShape,
    GateKind,
    NormKind,
    OwnColumns,
    StageMates,
    WideRows,
    block_floats,
)
from headway_kernels.cpu.library import CpuLibrary, Team, rounded

GATES = {"sigmoid": GateKind.SIGMOID, "softplus": GateKind.SOFTPLUS}


def load_compiled(
    config: ModelConfig,
    checkpoint: Checkpoint,
    library: CpuLibrary,
    *,
    quantization: str,
    max_model_len: int,
    block_size: int,
    num_threads: int,
    stage: Stage | None = None,
    activations: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Load a checked checkpoint, or a stage's part of it. ``quantization`` is "none", "int8" or "int4".

    Weights that are stored as codes stay so, with "none". ``activations`` of such weights are "exact", rounded to "int8" where
    the kernels can, rounded to "bfloat16" with what codes stand for, where that is faster, or "auto": to int8 with a
    quantization or if the checkpoint asks for that, else as ``dtype`` says. ``dtype``, float32 or bfloat16, is that of keys
    and values, and of other weights; with bfloat16 the inputs of these are rounded to it, where the processor multiplies pairs
    of them.
    """
    part = part_for(library, config, ALONE) if stage is None else stage.part

    def tensors_of(source: TensorSource) -> ModelTensors:
        return ModelTensors(config, source, halves, part=part)

    tensors = tensors_of(checkpoint)
    coded = CodedTensors(checkpoint, tensors_of)
    layout = compiled_layout(config, part, library, block_size, dtype)
    places = dict(zip(part.layers, layout.places, strict=True))
    loader = WeightLoader(
        config, part, tensors, coded, library, quantization, activations, dtype, max_model_len, places
    )
    with ThreadPoolExecutor(num_threads) as threads:  # the library and torch let other threads run meanwhile
        embedding = threads.submit(loader.embedding) if part.place.is_first_stage else None
        head = threads.submit(loader.head) if part.place.is_last_stage and config.has_head else None
        order = layers_as_stored(config, checkpoint.headers, part.layers)
        layers = dict(zip(order, threads.map(loader.layer, order), strict=True))
    shape = _shape_of(
        config,
        part,
        loader,
        embedding=None if embedding is None else embedding.result(),
        max_model_len=max_model_len,
        block_size=block_size,
        block_stride=layout.block.shape[0],
        dtype=dtype,
    )
    return Decoder(
        library,
        Team(library, num_threads),
        shape,
        [layers[index] for index in part.layers],
        None if head is None else head.result(),
        _mates_of(stage, config, library),
    )


def _shape_of(
    config: ModelConfig,
    part: ModelPart,
    loader: WeightLoader,
    *,
    embedding: Tensor | None,
    max_model_len: int,
    block_size: int,
    block_stride: int,
    dtype: torch.dtype,
) -> DecoderShape:
    attention, scalings = config.attention, config.scalings
    biases = score_biases(attention, max_model_len)
    return DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.dense_size,
        vocab_size=config.vocab_size,
        num_heads=len(part.heads),
        num_kv_heads=len(part.kv_heads),
        head_dim=config.head_dim,
        block_size=block_size,
        block_stride=block_stride,
        inputs=loader.inputs(),
        norm_eps=config.norm.eps,
        post_norm_eps=config.norm.post_eps,
        score_scale=attention.scale,
        embedding=embedding,
        positions=loader.positions(max_model_len) if part.place.is_first_stage else None,
        final_norm=loader.final_norm(),
        before_head=loader.before_head() if part.place.is_last_stage and config.has_head else None,
        norm_kind=NormKind.RMS if config.norm.kind == "rms" else NormKind.LAYER,
        is_parallel=config.is_parallel,
        norms_sums=config.norms_sums,
        score_biases=None if biases is None else biases.of_heads(part.heads).table,
        biases_distances=biases is not None and biases.is_by_distance,
        norms_all_heads=attention.qk_norm == "all",
        norms_rotated=attention.norms_rotated,
        norms_values=attention.norms_values,
        gates=GateKind.NONE if attention.gates == "none" else GATES[attention.gate_kind],
        head_norm_kind=NormKind.LAYER if attention.qk_norm == "layer" else NormKind.RMS,
        clips_normed=attention.clips_normed,
        score_softcap=attention.softcap or 0.0,
        qkv_clip=attention.clip or 0.0,
        residual_factor=scalings.residual,
        logits_factor=scalings.logits,
        logits_softcap=scalings.logits_softcap or 0.0,
        own=OwnColumns(
            all_heads=config.num_heads,
            first_head=part.heads.start,
            hidden_start=part.own_hidden.start,
            hidden_columns=len(part.own_hidden),
            activation_start=part.own_inner(config.dense_size).start,
            logits_start=part.own_vocab.start,
        ),
        kv_dtype=dtype,
    )


def compiled_layout(
    config: ModelConfig, part: ModelPart, library: CpuLibrary, block_size: int, dtype: torch.dtype
) -> KvLayout:
    """Where keys and values are in the kernels' own form."""

    def block_of(attention: AttentionConfig) -> StoredBlock:
        stored = stored_heads(library, attention, len(part.kv_heads_of(attention.num_kv_heads)))
        return StoredBlock((block_floats(library, *stored, block_size),), dtype)

    return kv_layout(config, part.layers, block_of)


def _mates_of(stage: Stage | None, config: ModelConfig, library: CpuLibrary) -> StageMates | None:
    if stage is None or stage.group is None:
        return None
    part = stage.part
    latent = config.attention.latent
    per_head = library.padded_head_dim(config.head_dim) if latent is None else rounded(latent.value_dim, library.panel)
    attended = part.attended(config.num_heads, per_head)
    feed = config.experts
    pairs = part.of_expert(0 if feed is None else feed.intermediate_size)
    of_shared = part.of_expert(0 if feed is None or feed.experts is None else feed.experts.shared_size)
    inner = part.inner(config.dense_size)
    return stage.group.rows(library, WideRows(part.hidden, attended, inner, part.vocab, pairs, of_shared))
