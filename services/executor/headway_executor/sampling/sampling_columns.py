"""The sampling parameters of every row, on the host.

Owns: one record per row, the pool of entries. Must not know: devices, kernels.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headway_kernels.gpu.sampling.layout import (
    ENTRIES,
    LOGPROBS,
    PENALTIES,
    RANDOM,
    RANKED,
    ROW_LAYOUT,
    ROW_WORDS,
)
from headway_proto.sampling import NO_LOGPROBS, SamplingParams

_GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: dividing by them leaves only the largest logit."""

_MAX_INT32 = (1 << 31) - 1


class SamplingEntriesError(ValueError):
    """The pool has no room for a row's entries."""


class SamplingEntries(NamedTuple):
    """Entries to upload; ``token_ids`` int32 and ``biases`` float32, both ``[k]``. See ``SamplingColumns`` of the
    kernels.
    """

    first: int
    token_ids: NDArray[np.int32]
    biases: NDArray[np.float32]


class SamplingNeeds(NamedTuple):
    """Arguments of ``headway_kernels.gpu.sampling.sample``.

    ``top_logprobs`` is the most alternatives of a row, -1 for none.
    """

    variant: Literal["greedy", "random", "truncated"]
    adjusted: bool
    top_logprobs: int


class SamplingColumns:
    """A record per row, and a pool of ``entry_capacity`` entries.

    Padding rows use one more record, which stays greedy.
    """

    def __init__(self, *, vocab_size: int, max_num_rows: int, entry_capacity: int) -> None:
        self._vocab_size = vocab_size
        self._entry_capacity = entry_capacity
        self._records = np.zeros(max_num_rows + 1, dtype=ROW_LAYOUT)
        self._records["top_p"] = self._records["repetition"] = 1.0
        self._num_logprobs = np.full(max_num_rows + 1, NO_LOGPROBS, dtype=np.int32)
        self._flags = self._records["flags"]
        self._spans: dict[int, tuple[int, int]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._records[name]

    def set_row(self, row: int, sampling: SamplingParams, num_prompt_tokens: int) -> SamplingEntries | None:
        """Give ``row`` to a request; return the entries to upload, if any.

        Upload in the order of the steps: entries may take the place of a cleared row's.

        Raises:
            SamplingEntriesError: the pool has no room; the row is left cleared.
        """
        self.clear_row(row)
        token_ids, biases = _entries(sampling)
        first = self._place(row, len(token_ids))
        record = self._records[row]
        record["seed"] = sampling.seed
        record["top_p"] = sampling.top_p
        record["min_p"] = sampling.min_p
        record["temperature"] = sampling.temperature
        record["repetition"] = sampling.repetition_penalty
        record["presence"] = sampling.presence_penalty
        record["frequency"] = sampling.frequency_penalty
        record["top_k"] = sampling.top_k if 0 < sampling.top_k < self._vocab_size else 0
        record["num_prompt_tokens"] = num_prompt_tokens
        record["min_tokens"] = min(sampling.min_tokens, _MAX_INT32)
        record["flags"] = _flags(sampling, ranked=record["top_k"] > 0 or sampling.top_p < 1.0)
        record["first_entry"], record["end_entry"] = first, first + len(token_ids)
        self._num_logprobs[row] = sampling.logprobs
        return SamplingEntries(first, token_ids, biases) if len(token_ids) else None

    def clear_row(self, row: int) -> None:
        """Make ``row`` greedy and free its entries."""
        self._spans.pop(row, None)
        self._records[row] = self._records[-1]
        self._num_logprobs[row] = NO_LOGPROBS

    def pack(self, rows: NDArray[np.integer]) -> NDArray[np.int32]:
        """The records as 32-bit words, ``[k, ROW_WORDS]``."""
        words: NDArray[np.int32] = self._records[rows].view(np.int32)
        return words.reshape(len(rows), ROW_WORDS)

    def num_logprobs(self, rows: NDArray[np.integer]) -> NDArray[np.int32]:
        """Alternatives per row; ``NO_LOGPROBS`` if it reports none."""
        counts: NDArray[np.int32] = self._num_logprobs[rows]
        return counts

    def needs(self, rows: NDArray[np.integer]) -> SamplingNeeds:
        """The needs of a step that samples ``rows``."""
        flags = int(np.bitwise_or.reduce(self._flags[rows], initial=0))
        variant: Literal["greedy", "random", "truncated"] = "greedy"
        if flags & RANDOM:
            variant = "truncated" if flags & RANKED else "random"
        top_logprobs = int(self._num_logprobs[rows].max()) if flags & LOGPROBS else NO_LOGPROBS
        return SamplingNeeds(variant, bool(flags & (PENALTIES | ENTRIES)), top_logprobs)

    def _place(self, row: int, count: int) -> int:
        if not count:
            return 0
        first = 0
        for start, end in sorted(self._spans.values()):
            if start - first >= count:
                break
            first = end
        if first + count > self._entry_capacity:
            raise SamplingEntriesError(
                f"{count} tokens under logit_bias and min_tokens are too many beside those of the other requests; "
                f"there is place for {self._entry_capacity} in all"
            )
        self._spans[row] = (first, first + count)
        return first


def _flags(sampling: SamplingParams, *, ranked: bool) -> int:
    random = sampling.temperature >= _GREEDY_BELOW and sampling.top_k != 1
    penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    masked = sampling.min_tokens > 0 and bool(sampling.stop_token_ids)
    return (
        (RANDOM if random else 0)
        | (RANKED if random and ranked else 0)
        | (PENALTIES if penalties != (1.0, 0.0, 0.0) else 0)
        | (ENTRIES if sampling.logit_bias or masked else 0)
        | (LOGPROBS if sampling.logprobs != NO_LOGPROBS else 0)
    )


def _entries(sampling: SamplingParams) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Biases of one token add up."""
    biases: dict[int, np.float32] = {}
    for token_id, bias in sampling.logit_bias:
        biases[token_id] = biases.get(token_id, np.float32(0)) + np.float32(bias)
    stops = set(sampling.stop_token_ids) if sampling.min_tokens > 0 else set()
    token_ids = list(biases) + sorted(stops - biases.keys())
    return (
        np.array([~token_id if token_id in stops else token_id for token_id in token_ids], dtype=np.int32),
        np.array([biases.get(token_id, 0.0) for token_id in token_ids], dtype=np.float32),
    )
