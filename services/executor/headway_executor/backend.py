"""The interface between the executor and a backend, which runs the model.

Owns: ``ExecutorBackend``, its types and errors. Must not know: frames, epochs, any backend.

``BatchState`` keeps counters and block tables; a backend keeps token ids, sampling state and the KV pool. A step needs
no token values, so step k + 1 may come before the backend has reported step k.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.link_keys import LinkKeys
from headway_executor.rank_place import ALONE, RankPlace
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.pooling import NO_POOLING
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo, RowError, RowLogprobs, RowPromptLogprobs, RowVector

AUTOMATIC_SWAP_SPACE = -1
"""The ``swap_space_mib`` that lets a backend decide."""

NO_ADAPTERS = "this executor takes no adapters: its backend or model does not"

HostMemorySource: TypeAlias = Callable[[int, int, str], NDArray[np.uint8] | None]
"""See ``BackendConfig``."""

NO_SPECULATION: Int32Array = np.empty((3, 0), dtype=np.int32)
"""``StepResult.accepted_tokens`` of no rows."""


def _ignore_progress(what: str, done: int, total: int) -> None:
    del what, done, total


def _ignore_warning(what: str) -> None:
    del what


def _no_host_memory(num_blocks: int, block_bytes: int, layout: str) -> NDArray[np.uint8] | None:
    del num_blocks, block_bytes, layout
    return None


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a backend; it decides those that are 0 or "auto".

    ``speculation``: "off", "ngram", or "draft" with the checkpoint ``draft_model``. A long opening calls
    ``progress(what, done, total)``; ``warn`` gets one line about anything unusual.

    ``host_memory(num_blocks, block_bytes, layout)`` gives the memory of host blocks, uint8, ``[num_blocks,
    block_bytes]``, or None: the backend takes its own. It may hold blocks of an earlier process, which opening must not
    change. ``layout`` is any text that is the same for blocks whose bytes mean the same. A backend asks also with
    ``num_blocks`` 0; only its last question counts. The cost of a swap then includes a CRC32 of each block on its way out.

    ``kv_cache_dtype``: "auto" for the model's dtype, or "fp8".

    ``adapters``: directories by name, to load at once. Only an ``AdapterBackend`` gets any.

    ``place``: which rank of a group this process is. All ranks get the same calls in the same order. Only rank 0's answers
    count; of another rank, those of a backend with ``every_rank_draws`` are compared with them. ``rank_keys``: this rank's
    end of a connection between rank 0 and any other; without them, nothing may listen beyond loopback.
    """

    model: str
    device: str = "cpu"
    dtype: str = "auto"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    num_kv_blocks: int = 0
    swap_space_mib: int = AUTOMATIC_SWAP_SPACE
    max_model_len: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    num_threads: int = 0
    seed: int = 0
    options: dict[str, str] = {}
    progress: Callable[[str, int, int], None] = _ignore_progress
    warn: Callable[[str], None] = _ignore_warning
    speculation: str = "off"
    draft_model: str = ""
    num_speculative_tokens: int = 8
    host_memory: HostMemorySource = _no_host_memory
    place: RankPlace = ALONE
    rank_keys: LinkKeys | None = None
    adapters: dict[str, str] = {}


class NewRow(msgspec.Struct, frozen=True, kw_only=True):
    """A new row; its blocks already hold the first ``num_computed_tokens``. ``token_ids`` int32, ``[num_tokens]``.

    ``adapter``: the identity of the adapter that it runs with, or "". A row whose adapter is not loaded fails alone.
    ``pooling``: it wants a vector (rule 10 of ``headway_proto.step``); no backend that announces no ``embedding_size``
    gets one.
    """

    row: int
    token_ids: Int32Array
    num_prompt_tokens: int
    num_computed_tokens: int
    sampling: SamplingParams
    adapter: str = ""
    pooling: int = NO_POOLING


class StepBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One step, checked and complete. All arrays are int32 and read-only.

    A backend applies the fields in this order. It forgets ``finished_rows`` (after a new epoch: every earlier row),
    takes ``new_rows`` and ``new_blocks`` (``[2, n]``: row, block; new rows included), and runs ``rows`` (``[r]``,
    ascending). Row i runs ``num_scheduled_tokens[i] >= 1`` tokens from position ``num_computed_tokens[i]``. If
    ``samples[i]`` is 1, it draws the token behind them.

    Position p of a row is in block ``block_table[row, p // block_size]``. Later steps change the table: a backend that
    runs ahead keeps its own copy.

    ``num_speculative_tokens`` (``[r]``, or None) limits the proposals behind each row's one token (rule 9 of
    ``headway_proto.step``). Blocks cover them.

    ``stale_rows`` (``[s]``, ascending) are new rows of this step. Their blocks hold anything until they finish, and what
    they draw is ignored; the other rows are unaffected.

    ``lane``: see ``headway_proto.step``; 0 if the executor has one.
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
    stale_rows: Int32Array = EMPTY_COLUMN
    lane: int = 0


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step; all entries have rows ascending.

    ``sampled_token_ids`` int32: one per row with ``samples == 1``; ``ERRORED_ROW`` if ``errors`` has the row.
    ``device_time_us`` does not contain ``move_time_us``.

    ``accepted_tokens`` (int32, ``[3, s]``: row, proposed, accepted) lists the rows that could speculate. Such a row has
    1 + accepted entries in ``sampled_token_ids``, and in ``logprobs`` if it asked for them.

    ``vectors``: of the pooled rows with ``samples == 1`` and without an error.
    """

    sampled_token_ids: Int32Array
    logprobs: tuple[RowLogprobs, ...] = ()
    errors: tuple[RowError, ...] = ()
    device_time_us: int = 0
    move_time_us: int = 0
    prompt_logprobs: tuple[RowPromptLogprobs, ...] = ()
    accepted_tokens: Int32Array | None = None
    vectors: tuple[RowVector, ...] = ()


@runtime_checkable
class ExecutorBackend(Protocol):
    """Five calls. Backends are in the entry point group ``headway.executor_backends``."""

    def open(self, config: BackendConfig) -> BackendInfo:
        """Load the model, reserve the KV pool, warm up.

        Raises:
            BackendConfigError: a setting cannot be honoured; names its value and what is allowed.
            ModelFilesError: the checkpoint is missing, damaged or unsupported.
        """
        ...

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """Run one step. Steps take effect in order.

        Raises:
            StepOutOfMemoryError: the scheduler then sends smaller steps.
            DeviceLostError: a supervisor restarts the process.
            Exception: the whole step failed; the scheduler opens a new epoch.
        """
        ...

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Future[None] | None:
        """Swap out, swap in, then copy blocks, behind all earlier calls and before the next ``execute``.

        Each int32, ``[2, n]``. The next step's ``finished_rows`` and ``new_rows`` take effect later. There may be several
        calls before a step. The future, if there is one, is done once swapped-out blocks are in the host memory.

        Raises:
            Exception: as of ``execute``; the next step is then not run.
        """
        ...

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """Fill device blocks, int32, ``[n]``, with contents, ``[n, block_bytes]``, of host memory of the same layout.

        In order with ``move_blocks``. The contents are the backend's to keep.

        Raises:
            Exception: as of ``move_blocks``.
        """
        ...

    def close(self) -> None:
        """May be called twice; ``execute`` raises afterwards."""
        ...


class ReadAdapter(NamedTuple):
    """An adapter that is read and checked, and not in use. ``weights`` are the backend's own."""

    adapter: LoadedAdapter
    weights: Any = None


@runtime_checkable
class AdapterBackend(Protocol):
    """What a backend has beside ``ExecutorBackend`` if rows may run with adapters."""

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """Do all of loading that may take long. Steps run meanwhile: it is called on another thread, and changes nothing.

        Raises:
            ModelFilesError: the files are missing, damaged, not supported, or for another model.
        """
        ...

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter | Future[LoadedAdapter | None]:
        """Take an adapter into use, in order with ``execute``: steps wait. One of the same identity stays."""
        ...

    def unload_adapter(self, name: str) -> Future[LoadedAdapter | None] | None:
        """Forget an adapter, if there is one, in order with ``execute``. Rows that have it keep it until they end."""
        ...


def taking_adapters(backend: ExecutorBackend) -> AdapterBackend:
    """The same backend. Raises ``ValueError``: it takes no adapters."""
    if not isinstance(backend, AdapterBackend):
        raise ValueError(NO_ADAPTERS)  # noqa: TRY004 (a setting's fault, not a type's)
    return backend


class StepTooLargeError(RuntimeError):
    """A step of ``num_tokens`` is more than there is room for; a smaller one may fit."""

    def __init__(self, num_tokens: int, text: str) -> None:
        super().__init__(text)
        self.num_tokens = num_tokens


class StepOutOfMemoryError(StepTooLargeError):
    """The device has too little memory for ``num_tokens``."""

    def __init__(self, num_tokens: int, detail: str) -> None:
        super().__init__(num_tokens, f"out of memory with {num_tokens} tokens: {detail}")


class DeviceLostError(RuntimeError):
    """Only a new process can use the device again (exit code 4)."""


class RankLostError(DeviceLostError):
    """Another rank is gone, or this one has come apart from it: only all together can begin again."""


class BackendConfigError(ValueError):
    """The backend cannot honour a setting (exit code 2)."""


class ModelFilesError(ValueError):
    """The checkpoint cannot be served (exit code 3)."""
