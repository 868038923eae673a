"""The order in which a model takes a device's memory before it serves, and the step that compiles everything.

Owns: this order. Must not know: requests, what a kernel computes.

The largest step runs first: it compiles, and takes what steps need. Of the rest, the pool gets its share, and graphs are
recorded beside it. Recording gives back what torch kept of the largest step, so that runs again.
"""

import numpy as np
import torch

from headway_executor.backend import StepBatch
from headway_executor.gpu.block_mover import BlockMover
from headway_executor.gpu.device_model import ALIGNMENT
from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.graphs import LaunchSize
from headway_executor.gpu.largest_step import any_row, largest_step
from headway_executor.gpu.step_columns import StepShape, shape_of
from headway_executor.models.pool_sizes import pool_sizes
from headway_kernels.gpu.linear.skinny import MOST_TOKENS

_POOL_SHARE = 0.94
"""The pool's share of the memory that the largest step leaves; the rest is for the graphs."""


def open_pools(parts: DeviceParts) -> BlockMover:
    """Give the pools the memory that the largest step leaves; return the moves of their blocks."""
    config = parts.config
    parts.open_pools(1, num_host_blocks=0)
    if parts.runtime.is_cuda:
        config.progress("trying the largest step", 0, 1)
        try_largest_step(parts)
    block_bytes = parts.target.block_bytes
    num_blocks, num_host_blocks = pool_sizes(
        config,
        parts.settings,
        parts.states,
        parts.stage.group,
        parts.runtime.device,
        block_bytes=block_bytes,
        block_bytes_beside=sum(model.block_bytes for model in parts.models) - block_bytes,
        device_share=_POOL_SHARE,
    )
    return parts.open_pools(num_blocks, num_host_blocks=num_host_blocks)


def record_graphs(parts: DeviceParts) -> None:
    """Record every size of step, and take the largest step's memory again, which the first ones would have to take."""
    parts.record()
    if parts.adapters.adapters.loaded:
        parts.record_adapted()
    try:
        try_largest_step(parts)
    except torch.OutOfMemoryError:
        parts.config.warn("beside its graphs, the device has no memory for the largest step: steps will be smaller")


def try_every_size(parts: DeviceParts) -> None:
    """Run every size of step that would be recorded: without graphs, too, nothing is compiled while requests wait."""
    parts.upload.clear()
    for model in parts.models:
        for size in model.step_sizes(recorded=True).recorded():
            model.forward(size)
    parts.runtime.mark().wait()


def try_largest_step(parts: DeviceParts) -> None:
    """Run the largest step in block 0: this compiles, and torch keeps its memory."""
    config, store = parts.config, parts.rows.token_store
    parts.rows.apply((any_row(),), np.zeros((2, 1), dtype=np.int32))
    _launch_largest(parts, most_rows=1)  # Among many rows, no chunk is long, and of as many as tokens, none is a chunk.
    batch, shape = _launch_largest(parts, most_rows=parts.most_rows)
    if parts.draft is not None:
        parts.draft.forward(parts.draft.size_of(shape._replace(num_rows=min(shape.num_rows, config.max_num_seqs))))
    _try_tilings(parts)
    _try_adapters(parts)
    decoder = parts.target.decoder
    if decoder.has_head:
        parts.prompt_reader.try_largest(decoder, store, shape.num_tokens)
        parts.sampler.try_largest(decoder.logits(shape.num_sampled), batch.rows, parts.upload.views, store)
    parts.runtime.mark().wait()


def _launch_largest(parts: DeviceParts, *, most_rows: int) -> tuple[StepBatch, StepShape]:
    config = parts.config
    batch = largest_step(
        most_tokens=config.max_num_batched_tokens,
        most_rows=most_rows,
        max_num_seqs=parts.max_num_rows,
        max_model_len=parts.max_model_len,
    )
    shape = shape_of(batch)
    parts.launch(batch, shape)
    return batch, shape


def _try_tilings(parts: DeviceParts) -> None:
    """Between the recorded steps and the largest there may be some whose products have tiles that neither have."""
    for bound in parts.tiling_bounds:
        num_tokens = bound // ALIGNMENT * ALIGNMENT
        if 0 < num_tokens < parts.config.max_num_batched_tokens:
            num_rows = min(num_tokens, parts.most_rows)
            parts.target.forward(LaunchSize(num_tokens, num_rows, has_decodes=True, has_chunks=True))


def _try_adapters(parts: DeviceParts) -> None:
    """Behind the gates and ups of few tokens to which an adapter adds lies no activation, which takes other kernels."""
    for num_tokens in {1, min(MOST_TOKENS, parts.config.max_num_batched_tokens)}:
        num_rows = min(num_tokens, parts.most_rows)
        parts.target.forward(LaunchSize(num_tokens, num_rows, has_decodes=True, has_chunks=False, is_adapted=True))
