"""The memory layout of a row's sampling parameters, shared by the host and the kernels.

Owns: a row's 64 bytes, its flags. Must not know: Triton.
"""

import numpy as np

RANDOM = 1
RANKED = 2
PENALTIES = 4
ENTRIES = 8
LOGPROBS = 16
"""A row's flags: it draws at random; it has top-k or top-p; penalties; entries (logit bias or stop ids under
``min_tokens``); it reports log probabilities, which the caller asks for.
"""

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
"""One row. ``top_k`` is 0 for none, else below the vocabulary's size; ``temperature`` counts only with RANDOM; the
row's entries are ``first_entry .. end_entry - 1`` of the pool. ``top_p`` and ``min_p`` are float64, exactly as
requested.
"""

ROW_WORDS = ROW_LAYOUT.itemsize // 4
