"""Exclude tokens by a bit mask: a forbidden token gets a logit of minus infinity.

Owns: the kernel. Must not know: constraints.
"""

import triton
import triton.language as tl
from torch import Tensor

from headway_kernels.gpu.dependence import await_grid, dependent_launch

_TOKENS_PER_PROGRAM = 1024
_NUM_WARPS = 4


def exclude(logits: Tensor, places: Tensor, words: Tensor) -> None:
    """Exclude the tokens of rows ``places`` that their masks do not allow.

    ``logits`` floating, ``[n, vocab]``, contiguous along the vocabulary, changed in place; ``places`` int64, ``[c]``,
    no row twice; ``words`` int32, ``[c, ceil(vocab / 32)]``, contiguous: bit ``i % 32`` of word ``i // 32`` is token i.
    """
    num_masked, vocab_size = len(places), logits.shape[1]
    if not num_masked:
        return
    _exclude[(num_masked, triton.cdiv(vocab_size, _TOKENS_PER_PROGRAM))](
        logits,
        places,
        words,
        logits.stride(0),
        words.stride(0),
        VOCAB=vocab_size,
        BLOCK=_TOKENS_PER_PROGRAM,
        num_warps=_NUM_WARPS,
        **dependent_launch(logits.device),
    )


@triton.jit
def _exclude(
    logits,
    places,
    words,
    logits_stride,
    words_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_grid(PDL)
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = token < VOCAB
    word = tl.load(words + number * words_stride + token // 32, mask=exists, other=-1)
    is_excluded = ((word >> (token % 32)) & 1) == 0
    row = tl.load(places + number)
    excluded = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    tl.store(logits + row * logits_stride + token, excluded, mask=exists & is_excluded)
