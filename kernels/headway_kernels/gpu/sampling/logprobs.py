"""Raw log probabilities of the drawn and of the most likely tokens.

Owns: normalisers. Must not know: draws.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch
from headway_kernels.gpu.sampling.distribution import statistics_kernel
from headway_kernels.gpu.sampling.memory import CHUNK_WARPS, SamplingWorkspace, chunk_grid
from headway_kernels.gpu.sampling.numbers import finite_or_zero, scale_of, total_of


@triton.jit
def _logprob_kernel(
    logits_ptr,
    logits_stride,
    token_ids_ptr,
    chunk_max_ptr,
    chunk_sum_ptr,
    out_logprobs_ptr,
    out_normalisers_ptr,
    num_chunks,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    i = tl.program_id(0).to(tl.int64)
    token_id = tl.load(token_ids_ptr + i)
    if token_id < 0:
        tl.store(out_logprobs_ptr + i, 0.0)
        tl.store(out_normalisers_ptr + i, 0.0)
        return
    chunks = tl.arange(0, CHUNKS)
    held = chunks < num_chunks
    chunk_max = tl.load(chunk_max_ptr + i * num_chunks + chunks, mask=held, other=float("-inf"))
    sums = tl.load(chunk_sum_ptr + i * num_chunks + chunks, mask=held, other=0)
    row_max = finite_or_zero(tl.max(chunk_max, 0))
    scale = scale_of(tl.full((), 1.0, tl.float32))
    normaliser = row_max + tl.log(total_of(chunk_max, sums, row_max, scale))
    logit = tl.load(logits_ptr + i * logits_stride + token_id).to(tl.float32)
    tl.store(out_logprobs_ptr + i, logit - normaliser)
    tl.store(out_normalisers_ptr + i, normaliser)


def row_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    workspace: SamplingWorkspace,
    out_logprobs: Tensor,
    out_normalisers: Tensor,
) -> None:
    """Log probabilities of ``token_ids`` (int32, ``[n]``) in the raw distribution of ``logits``.

    ``out_logprobs`` and ``out_normalisers`` float32, ``[n]``: a logit less its row's normaliser is its log probability.
    Token -1 gives zeros. Uses the workspace after ``sample``.
    """
    work = workspace
    # A row without a token counts as padding.
    statistics_kernel[chunk_grid(token_ids, work)](
        logits,
        logits.stride(0),
        token_ids,
        out_logprobs,
        work.chunk_max,
        work.chunk_place,
        work.chunk_sum,
        work.vocab_size,
        CHUNK=work.chunk,
        WITH_SUM=True,
        RAW=True,
        num_warps=CHUNK_WARPS,
        **dependent_launch(logits.device),
    )
    _logprob_kernel[(len(token_ids),)](
        logits,
        logits.stride(0),
        token_ids,
        work.chunk_max,
        work.chunk_sum,
        out_logprobs,
        out_normalisers,
        work.chunk_max.shape[1],
        CHUNKS=triton.next_power_of_2(work.chunk_max.shape[1]),
        **dependent_launch(logits.device),
    )


def top_logprobs(logits: Tensor, k: int, normalisers: Tensor) -> tuple[Tensor, Tensor]:
    """The ``k`` likeliest tokens of each row: ids (int64) and log probabilities (float32), both ``[n, k]``.

    Allocates, but waits for nothing.
    """
    best = logits.topk(k, dim=-1)
    return best.indices, best.values.float() - normalisers[:, None]
