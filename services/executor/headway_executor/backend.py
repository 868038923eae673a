"""The interface between the executor and a backend, which runs the model.

Owns: the ``ExecutorBackend`` protocol, its input, its output, and the errors a backend may raise. Must not know:
sockets, frames, epochs, or any particular backend.

``BatchState`` checks each diff and keeps counters and block tables. A backend keeps what needs the *values* of tokens:
token ids per row, sampling state, the KV pool. A step needs no token values, so a backend may get step k + 1 before it
has reported step k.
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
"""The ``swap_space_mib`` with which a backend decides for itself."""

NOBODY_SPECULATED: Int32Array = np.empty((3, 0), dtype=np.int32)
"""``StepResult.accepted_tokens`` of no rows."""


def _nobody_listens(what: str, done: int, total: int) -> None:
    del what, done, total


def _nobody_is_warned(what: str) -> None:
    del what


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a backend.

    ``num_kv_blocks`` and ``max_model_len`` of 0 let the backend decide. ``swap_space_mib`` is main memory for
    swapped-out blocks. ``max_num_seqs`` limits the live rows, ``max_num_batched_tokens`` the tokens of one step.
    ``quantization``: "none", "int8" or "fp8". ``speculation``: "off", "ngram", or "draft" with the checkpoint
    ``draft_model``. A long opening calls ``progress(what, done, total)``; ``warn`` gets one line about anything unusual
    in a model.
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

    When the step runs, its blocks hold the first ``num_computed_tokens``: shared, swapped in or copied.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step, checked and complete. All arrays are int32 and read-only.

    A backend applies the fields in this order. It forgets ``finished_rows`` (after a new epoch: every earlier row),
    takes ``new_rows`` and ``new_blocks`` (shape ``[2, n]``: row, block; new rows included), and runs ``rows`` (shape
    ``[r]``, ascending). Row i runs ``num_scheduled_tokens[i] >= 1`` tokens from position ``num_computed_tokens[i]``.
    ``samples[i]`` is 1 where it draws the next token, at position ``num_computed_tokens[i] + num_scheduled_tokens[i]``.

    ``block_table`` (shape ``[max_num_seqs, max blocks per row]``) belongs to the executor and changes with later steps:
    a backend that runs ahead keeps its own copy. Position p of a row is in block ``block_table[row, p // block_size]``.

    ``num_speculative_tokens`` (shape ``[r]``, or None) is how many proposed tokens the backend may run behind each
    row's one token (rule 9 of ``headway_proto.step``). Blocks cover the proposals.
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
    """The result of a step; all entries have rows ascending.

    ``sampled_token_ids`` int32: one per row with ``samples == 1``, ``ERRORED_ROW`` where ``errors`` has the row.
    ``move_time_us`` is that of the ``move_blocks`` before the step, and not in ``device_time_us``. ``prompt_logprobs``
    are there if the backend announces ``supports_prompt_logprobs``.

    ``accepted_tokens`` (int32, shape ``[3, s]``: row, proposed, accepted) has one entry per row that could speculate,
    or is None. Such a row has 1 + accepted entries in ``sampled_token_ids``, and in ``logprobs`` if it asked for them.
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
    """Four calls. A backend is a no-argument callable in the entry point group ``headway.executor_backends``."""

    def open(self, config: BackendConfig) -> BackendInfo:
        """Load the model, reserve the KV pool, warm up.

        Raises:
            BackendConfigError: a setting cannot be honoured; the message has its name, value and what is allowed.
            ModelFilesError: the checkpoint is missing, damaged or unsupported.
        """
        ...

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """Run one step. Steps take effect in the order of the calls.

        Raises:
            StepOutOfMemoryError: the scheduler sends smaller steps from then on.
            DeviceLostError: the process ends and is started again.
            Exception: the whole step failed; the scheduler opens a new epoch.
        """
        ...

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Move whole blocks before the next ``execute``: swap out, swap in, then copy. Each int32, shape ``[2, n]``.

        Earlier steps have taken effect; the next step's ``finished_rows`` and ``new_rows`` have not. The time is
        reported with the next step's result.

        Raises:
            Exception: as of ``execute``; the next step is then not run.
        """
        ...

    def close(self) -> None:
        """Release everything. May be called twice; ``execute`` raises afterwards."""
        ...


class StepOutOfMemoryError(RuntimeError):
    """The device has too little memory for a step of ``num_tokens`` tokens; a smaller one may fit."""

    def __init__(self, num_tokens: int, detail: str) -> None:
        super().__init__(f"out of memory with {num_tokens} tokens: {detail}")
        self.num_tokens = num_tokens


class DeviceLostError(RuntimeError):
    """Every call of the device fails from now on; only a new process can use it again (exit code 4)."""


class BackendConfigError(ValueError):
    """A setting that this backend or model cannot honour (exit code 2)."""


class ModelFilesError(ValueError):
    """A checkpoint that cannot be served (exit code 3)."""
