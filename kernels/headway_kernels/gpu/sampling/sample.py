"""Draw the next token of each row, in Triton: penalties, bias, temperature, top-k, top-p and min-p, without a sort.

Owns: the order of the stages. Must not know: requests, steps.

The rule: ``p`` is the float32 softmax of the adjusted logits divided by the temperature, and ``floor(p * 2^52)`` a
token's weight. Tokens rank by ``p``, best first, equal ones by lower id. Top-k keeps the first k. Top-p keeps the
shortest beginning whose weight reaches ``top_p`` times the weight that top-k left (``2^52`` without top-k). Min-p keeps
tokens with ``p`` of at least ``min_p`` times the best. The draw inverts the cumulative weights of the kept tokens, in
the order of their ids, at the row's Philox uniform. Sums of integer weights are exact, so the rest of the batch cannot
change a token.

Two numbers describe the kept tokens: a **threshold** (the bits of a float32), and how many of the tokens exactly at it
are kept, lowest ids first. The stages:

1. ``statistics``, per chunk of the vocabulary: largest logit, its first place, sum of exponentials;
2. ``merge``, per row: the scale of the distribution; greedy rows end here;
3. ``survey``, per chunk, for rows with top-k or top-p as 4 and 5: how much lies above each of a few fixed
   probabilities;
4. ``list``, per chunk: a cutoff that surely keeps enough, and the bits of all probabilities above it, in any order;
   (``narrow`` and ``gather``, per chunk: what a long list of a top-p needs before one block can search it;)
5. ``threshold``, per row: a search with several pivots at once over that list;
6. ``weigh``, per chunk: the weight above the threshold and the number of tokens at it;
7. ``draw``, per row: the chunk in which the uniform falls, then the token.

Shapes fix all grids, and kernels read parameters on the device, so a captured graph serves any batch of its size.
"""

from typing import Literal

from torch import Tensor

from headway_kernels.gpu.sampling.distribution import launch_merge, launch_statistics
from headway_kernels.gpu.sampling.draw import draw_tokens
from headway_kernels.gpu.sampling.memory import SamplingColumns, SamplingWorkspace
from headway_kernels.gpu.sampling.penalties import adjust_logits
from headway_kernels.gpu.sampling.truncation import find_thresholds

Variant = Literal["greedy", "random", "truncated"]


def sample(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    columns: SamplingColumns,
    token_store: Tensor,
    workspace: SamplingWorkspace,
    out_token_ids: Tensor,
    out_status: Tensor,
    *,
    variant: Variant,
    adjusted: bool,
) -> None:
    """Draw one token per row of ``logits``.

    ``logits`` bfloat16, float16 or float32, ``[n, vocab_size]``, contiguous along the vocabulary, not modified.
    ``rows`` int32, ``[n]``, -1 for padding. ``positions`` int32, ``[n]``, at least 1: the index of the drawn token.
    ``token_store`` int32, ``[rows, width]``. Writes int32 ``[n]``: ``out_status`` is 1 for a row without a finite
    largest logit, otherwise 0; ``out_token_ids`` is -1 for it and for padding.

    ``variant`` is the most that a row needs: "greedy", "random" (also min-p), or "truncated" (top-k or top-p).
    ``adjusted``: some row has penalties or entries. A row gets the same token under any variant that suffices.
    """
    if adjusted:
        adjust_logits(logits, rows, positions, columns, token_store, workspace)
        logits = workspace.adjusted
    launch_statistics(logits, rows, columns, workspace, with_sum=variant != "greedy")
    launch_merge(rows, columns, workspace, out_token_ids, out_status, random=variant != "greedy")
    if variant == "truncated":
        find_thresholds(logits, rows, columns, workspace)
    if variant != "greedy":
        draw_tokens(logits, rows, positions, columns, workspace, out_token_ids)
