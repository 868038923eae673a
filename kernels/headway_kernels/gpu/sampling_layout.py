"""How a row's sampling parameters lie in memory, for the host that packs them and the kernels that read them.

Owns: the 64 bytes of a row and the meaning of its flags. Must not know: where parameters come from, or Triton.
"""

import numpy as np

RANDOM = 1
RANKED = 2
PENALTIES = 4
ENTRIES = 8
LOGPROBS = 16
"""A row's flags: it draws at random; it has top-k or top-p; it has penalties; it has entries (logit bias or stop ids
under ``min_tokens``); it reports log probabilities, which the kernels here leave to their caller to ask for."""

ROW_LAYOUT = np.dtype(
    [
        ("seed", "<u8"),
        ("top_p", "<f8"),
        ("min_p", "<f8"),
        ("temperature", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),
        ("num_prompt_tokens", "<i4"),
        ("min_tokens", "<i4"),
        ("flags", "<i4"),
        ("first_entry", "<i4"),
        ("end_entry", "<i4"),
    ]
)
"""One row. ``top_k`` is 0 for none and below the vocabulary's size otherwise; ``temperature`` counts only where RANDOM
is set; entries ``first_entry .. end_entry - 1`` of the pool are the row's own. ``top_p`` and ``min_p`` are float64, so
that a share is the one that the request named, and a comparison comes out here as it does anywhere else."""

ROW_WORDS = ROW_LAYOUT.itemsize // 4
