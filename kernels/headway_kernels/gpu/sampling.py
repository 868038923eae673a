"""Draw the next token of each row, in Triton: penalties, bias, temperature, top-k, top-p and min-p, without a sort.

Owns: the order of the stages and the choice among their variants. Must not know: requests, steps, or how parameters get
here.

The rule, which ``headway_kernels.reference.sample`` writes out: ``p`` is the float32 softmax of the adjusted logits
divided by the temperature. The weight of a token is ``floor(p * 2^52)``. Tokens rank by ``p``, equal ones by lower id.
Top-k, top-p and min-p each keep a beginning of the ranking. The draw takes the cumulative weights of the kept tokens in
the order of their ids and inverts them at the row's Philox uniform. Weights are integers, so their sums are exact: neither
the order in which programs add nor the rest of the batch can change a token.

Two numbers say which tokens are kept: a **threshold**, the bits of a float32 (bits order as non-negative floats do), and
how many of the tokens exactly at the threshold are kept, lowest ids first. A row goes through

1. ``statistics``, per chunk of the vocabulary: largest logit, its first place, sum of exponentials;
2. ``merge``, per row: the scale of the distribution; greedy rows end here;
3. ``survey``, per chunk, and from here to 5 only for rows with top-k or top-p: how much lies above each of a few fixed
   probabilities, to choose a cutoff that surely keeps enough;
4. ``list``, per chunk: the bits of all probabilities from the cutoff upward, in any order;
5. ``threshold``, per row: the threshold, by a search with several pivots at once over that list;
6. ``weigh``, per chunk: the weight above the threshold and the number of tokens at it;
7. ``draw``, per row: the chunk in which the uniform falls, then the token.

Stages 1 and 2 are in ``sampling_distribution``, 3 to 5 in ``sampling_truncation``, 6 and 7 in ``sampling_draw``.

Every stage turns logits into probabilities by ``sampling_numbers.probability_of``, from the numbers that ``merge`` stored:
kernels may compare bits only if all of them compute the same bits.

The shapes fix all grids, and the kernels read the rows' parameters on the device, so a captured graph serves any batch
of its size. The host chooses only the variant: it knows which stages no row of a batch needs.
"""

from typing import Literal

from torch import Tensor

from headway_kernels.gpu.sampling_distribution import launch_merge, launch_statistics
from headway_kernels.gpu.sampling_draw import draw_tokens
from headway_kernels.gpu.sampling_memory import SamplingColumns, SamplingWorkspace
from headway_kernels.gpu.sampling_penalties import adjust_logits
from headway_kernels.gpu.sampling_truncation import find_thresholds

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

    ``logits`` bfloat16, float16 or float32, shape ``[n, vocab_size]``, contiguous along the vocabulary, not modified;
    ``rows`` int32, shape ``[n]``, -1 for padding; ``positions`` int32, shape ``[n]``, at least 1: the index of the token
    being drawn; ``token_store`` int32, shape ``[rows, width]``, of which positions ``0 .. position - 1`` are read for
    rows with penalties. Writes ``out_token_ids`` (int32, shape ``[n]``; -1 for padding and for rows without a finite
    largest logit) and ``out_status`` (int32, shape ``[n]``; 1 for the latter, otherwise 0).

    ``variant`` says what some row of the batch asks for: "greedy" nothing, "random" a draw, "truncated" a draw under
    top-k or top-p; min-p needs no more than "random". ``adjusted``: some row has penalties or entries. A row gets the
    same token under any that suffices for it.
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
