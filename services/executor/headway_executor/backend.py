"""The seam between the executor and whatever runs the model.

Owns: the ``ExecutorBackend`` protocol, what goes in (``BackendConfig``, ``StepBatch``), what comes out
(``StepResult``), and the errors a backend may raise.
Must not know: sockets, frames, epochs, or any particular backend.

The executor's batch state (``batch_state.py``) validates each diff and keeps the counters and block tables; a backend
keeps whatever needs the *values* of tokens: token ids per row, sampling state, the KV pool. A step is described
completely without token values, so step k + 1 may be given to a backend before it has reported step k.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np

from headway_proto.columns import Int32Array
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo, RowError, RowLogprobs, RowPromptLogprobs

AUTOMATIC_SWAP_SPACE = -1
"""The ``swap_space_mib`` of a backend that decides for itself."""

NOBODY_SPECULATED: Int32Array = np.empty((3, 0), dtype=np.int32)
"""``StepResult.accepted_tokens`` of no rows."""


def _nobody_listens(what: str, done: int, total: int) -> None:
    del what, done, total


def _nobody_is_warned(what: str) -> None:
    del what


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend is opened with.

    ``num_kv_blocks`` and ``max_model_len`` of 0 let the backend decide (free memory; the model's context).
    ``swap_space_mib`` is the main memory for swapped-out blocks in MiB, ``AUTOMATIC_SWAP_SPACE`` lets the backend decide.
    ``max_num_seqs`` is how many rows can be live at once, ``max_num_batched_tokens`` the most tokens of one step.
    ``quantization`` is "none", "int8" or "fp8". ``speculation`` is "off", or who proposes tokens: "ngram", or "draft" for the
    checkpoint ``draft_model``; at most ``num_speculative_tokens`` for a row in one step. ``options`` are the backend's own, as text. ``progress`` hears how far a
    long opening has come: what is being done, how much of it is done, and of how much. ``warn`` hears, in one line each, what
    an operator should know of a model that is served nevertheless.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    quantization: str = "none"
    block_size: int = 16
    num_kv_blocks: int = 0
    swap_space_mib: int = AUTOMATIC_SWAP_SPACE
    max_model_len: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_threads: int = 0
    seed: int = 0
    options: dict[str, str] = {}
    progress: Callable[[str, int, int], None] = _nobody_listens
    warn: Callable[[str], None] = _nobody_is_warned
    speculation: str = "off"
    draft_model: str = ""
    num_speculative_tokens: int = 8


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that becomes live with this step. ``token_ids`` int32, shape ``[num_tokens]``.

    The first ``num_computed_tokens`` are in its blocks when the step runs: shared, swapped in or copied.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step, checked and complete. All arrays int32; nothing may be written to them.

    First forget ``finished_rows`` (after a new epoch: every row that was live before it), then take ``new_rows``, then ``new_blocks`` (shape ``[2, n]``: row, block id; they
    include the blocks of the new rows), then run. ``rows`` (ascending, shape ``[r]``) are the rows that run,
    ``num_scheduled_tokens[i] >= 1`` tokens each, at positions
    ``[num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i])``. ``samples[i]`` is 1 where the row
    draws its next token, the one at position ``num_computed_tokens[i] + num_scheduled_tokens[i]``.

    ``block_table`` (shape ``[max_num_seqs, max blocks per row]``) is the executor's own table after this diff, for
    backends that run on the host; it changes with later steps, so a backend that runs ahead keeps its own copy from
    ``new_blocks``. Position p of a row lives in block ``block_table[row, p // block_size]`` at ``p % block_size``.

    ``num_speculative_tokens`` (shape ``[r]``) is how many tokens of its own proposing the backend may run after the one
    token of each row, rule 8 of ``headway_proto.step``; None, where nobody speculates. It is 0 for all rows but those that
    run one token and sample; their blocks cover the proposals.
    """

    step: int
    finished_rows: Int32Array
    new_rows: tuple[NewRow, ...]
    new_blocks: Int32Array
    rows: Int32Array
    num_scheduled_tokens: Int32Array
    num_computed_tokens: Int32Array
    samples: Int32Array
    block_table: Int32Array
    num_speculative_tokens: Int32Array | None = None


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced.

    ``sampled_token_ids`` int32, one per row with ``samples == 1``, rows ascending; ``ERRORED_ROW`` where ``errors``
    names the row. ``logprobs`` for the rows that asked for them, rows ascending. ``device_time_us`` is the time of the
    step in microseconds, ``move_time_us`` that of the ``move_blocks`` before it, which the former leaves out; it may have
    run beside the step before. ``prompt_logprobs`` for the rows that ask for them and ran tokens from which they follow
    (rule 8 of ``headway_proto.step``), rows ascending, if the backend announces ``supports_prompt_logprobs``.

    ``accepted_tokens`` (int32, shape ``[3, s]``: row, proposed, accepted) has an entry for each of the step's s rows that
    might speculate, rows ascending; None where there were none. Such a row has 1 + accepted entries in
    ``sampled_token_ids``, and in ``logprobs`` if it asked for them.
    """

    sampled_token_ids: Int32Array
    logprobs: tuple[RowLogprobs, ...] = ()
    errors: tuple[RowError, ...] = ()
    device_time_us: int = 0
    move_time_us: int = 0
    prompt_logprobs: tuple[RowPromptLogprobs, ...] = ()
    accepted_tokens: Int32Array | None = None


@runtime_checkable
class ExecutorBackend(Protocol):
    """Four calls. Registered under the entry point group ``headway.executor_backends`` as a no-argument callable."""

    def open(self, config: BackendConfig) -> BackendInfo:
        """Load the model, reserve the KV pool, warm up.

        Raises:
            BackendConfigError: a setting cannot be honoured; the message names it, its value and what is allowed.
            ModelFilesError: the checkpoint is missing, damaged or unsupported.
        """
        ...

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """Run one step. Steps are given in order and must take effect in order.

        Raises:
            StepOutOfMemoryError: as below, and the scheduler sends smaller steps from then on.
            DeviceLostError: as below, and the process ends, to be started again.
            Exception: the step failed as a whole; the executor reports it and the scheduler opens a new epoch.
        """
        ...

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Move whole blocks before the next ``execute``: swap out, swap in, then copy. Each int32, shape ``[2, n]``.

        Steps given before have taken effect; the next one's ``finished_rows`` and ``new_rows`` have not. Host blocks are
        below ``BackendInfo.num_host_blocks``. The time it takes is reported with the next step's result.

        Raises:
            Exception: as of ``execute``; the next step is not given then.
        """
        ...

    def close(self) -> None:
        """Release everything. May be called twice; ``execute`` raises from then on."""
        ...


class StepOutOfMemoryError(RuntimeError):
    """A step of ``num_tokens`` tokens was more than the device's memory holds; a smaller one may not be."""

    def __init__(self, num_tokens: int, detail: str) -> None:
        super().__init__(f"out of memory with {num_tokens} tokens: {detail}")
        self.num_tokens = num_tokens


class DeviceLostError(RuntimeError):
    """The device answers every call with an error from now on; only another process can use it again (exit code 4)."""


class BackendConfigError(ValueError):
    """A setting that this backend or model cannot honour (exit code 2)."""


class ModelFilesError(ValueError):
    """A checkpoint that cannot be served (exit code 3)."""
