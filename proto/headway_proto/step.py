"""The step protocol between scheduler and executor: one diff per step, one column of sampled tokens back.

Owns: the messages and the rules by which both sides derive what the messages leave out.
Must not know: how either side keeps its state.

A running request owns a **row**, a small dense integer, from admission until its row is listed in ``finished_rows``.
The executor keeps per row: token ids, block table, ``num_computed_tokens`` and sampling state. The shared rules:

1. A step first forgets ``finished_rows``, then adds ``scheduled_new_reqs``, then appends ``new_blocks``, then moves
   blocks (``swap_out``, ``swap_in``, ``block_copies``, in this order), then runs.
2. Every live row runs exactly one token, unless ``num_scheduled_tokens`` lists another number for it (0: sits out).
3. A row's tokens of a step are positions ``[num_computed_tokens, num_computed_tokens + n)``. Afterwards
   ``num_computed_tokens += n``. If it has now caught up with ``num_tokens``, the row samples one token, which is
   appended (``num_tokens += 1``); otherwise it samples nothing.
4. ``ExecutorOutput.sampled_token_ids`` holds one id per sampling row, rows ascending.
5. ``swap_out`` reads before anything of its step writes: a device block may be swapped out and given to another row in
   one step. Every ``swap_out`` of a step comes before every ``swap_in``. In one step no host block is written twice and
   no device block is swapped in twice.
6. A host block keeps its contents, however often they are read, until it is written again or the epoch ends. It may be
   written again unread: its request may have ended in the meantime, of which nobody tells the executor. ``swap_in``
   reads only what a ``swap_out`` of this epoch, its own step's included, has written.
7. The positions below a new row's ``num_computed_tokens`` are in its blocks by the time it runs: left there by earlier
   steps, written by other rows of its first step (a shared prefix), or brought by ``swap_in`` or ``block_copies`` of
   that step. Of a row with ``prompt_logprobs`` they are not written by other rows of that step: it may run before them.
8. A row with ``prompt_logprobs`` that runs positions ``[a, b)`` reports the positions ``a + 1`` to ``b`` as far as they are
   of its prompt, in every step, whether or not it samples.
9. ``num_speculative_tokens`` lists rows that run exactly one token in this step and sample. After that token such a
   row may run up to k more, which the executor proposes itself, at the positions that follow; its blocks cover them.
   The token of each position is drawn as it always is; what is drawn behind a proposal counts only if that proposal,
   and each before it, is the token that was drawn for its place. So the row brings 1 + a ids, in its place in
   ``sampled_token_ids``, where a is the number of proposals accepted, and both its ``num_computed_tokens`` and its
   ``num_tokens`` grow by a more than rule 3 says. a is known with the answer only: ``state_digest`` of the step leaves
   it out, and no other step is sent before the answer has come back.

So a decode step in which nothing changes is a message of constant size, whatever the batch.

Epochs: the scheduler opens one with ``NewEpoch`` for each life of an executor, or when either side lost the thread.
Opening an epoch empties every row and every host block; steps count from 0 within it. Anything of another epoch is
ignored.

Messages travel as arrays: a field is added at the end of its message, with a default that means "not known" or "none",
so that either side may be the older one.
"""

import zlib

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_proto.columns import INT32, Int32Array
from headway_proto.framing import FrameReader, FrameWriter
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams

DIGEST_INTERVAL_STEPS = 64
"""An executor reports ``state_digest`` with every step whose number is a multiple of this."""

ERRORED_ROW = -1
"""The id in ``sampled_token_ids`` of a row that is listed in ``errors``."""


class BackendInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an executor can hold and run; sent in its hello.

    ``num_blocks`` blocks of ``block_size`` tokens each; ``max_model_len`` tokens per request at most; ``vocab_size`` is
    the width of the logits; ``eos_token_ids`` end a generation; ``model_fingerprint`` names model and weights;
    ``max_num_rows`` is how many rows it can hold. ``num_host_blocks`` blocks can be swapped out to main memory (0: it
    cannot swap); moving one block one way takes about ``swap_us_per_block`` microseconds, measured when the backend
    opened (0.0: not known). ``max_num_batched_tokens`` is the most tokens it takes in one step (0: as many as it is sent).
    ``supports_prompt_logprobs``: it follows rule 8.
    ``supports_constraints``: its rows may have a ``SamplingParams.constraint``.
    ``max_speculative_tokens`` is the most tokens that it proposes for a row in one step, rule 9 (0: it never does).
    """

    backend: str
    device: str
    dtype: str
    model_name: str
    model_fingerprint: str
    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_rows: int
    num_host_blocks: int = 0
    swap_us_per_block: float = 0.0
    max_num_batched_tokens: int = 0
    supports_prompt_logprobs: bool = False
    supports_constraints: bool = False
    max_speculative_tokens: int = 0


_RANGES = (
    ("num_blocks", 1, 1 << 24),
    ("block_size", 1, 1 << 16),
    ("max_model_len", 1, 1 << 24),
    ("vocab_size", 1, 1 << 24),
    ("max_num_rows", 1, 1 << 16),
    ("num_host_blocks", 0, 1 << 24),
    ("swap_us_per_block", 0, 1e9),
    ("max_num_batched_tokens", 0, 1 << 31),
    ("max_speculative_tokens", 0, 1 << 10),
)
_MAX_NAME_CHARACTERS = 4096
_MAX_EOS_TOKEN_IDS = 4096


def info_problem(info: BackendInfo) -> str | None:
    """What keeps an executor that announces ``info`` from being scheduled for, in one line; None if nothing does."""
    for field, least, most in _RANGES:
        value = getattr(info, field)
        if not least <= value <= most:
            return f"{field}: {value} is not allowed; allowed: {least} to {most:g}"
    for field in ("backend", "device", "dtype", "model_name", "model_fingerprint"):
        if len(getattr(info, field)) > _MAX_NAME_CHARACTERS:
            return f"{field}: {len(getattr(info, field))} characters; allowed: at most {_MAX_NAME_CHARACTERS}"
    ids = info.eos_token_ids
    if len(ids) > _MAX_EOS_TOKEN_IDS or not all(0 <= token_id < info.vocab_size for token_id in ids):
        return f"eos_token_ids: {ids!r:.64} is not allowed; allowed: {_MAX_EOS_TOKEN_IDS} ids from 0 to {info.vocab_size - 1}"
    return None


class NewRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request that takes a row: the only time its payload travels.

    ``token_ids`` (int32 column) holds prompt and, after a preemption, the output so far; the first
    ``num_prompt_tokens`` are prompt. ``block_ids`` (int32 column) covers at least this step's tokens, and where
    ``num_computed_tokens`` is above 0 those before them (rule 7).
    """

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    block_ids: bytes
    num_computed_tokens: int
    sampling: SamplingParams


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One step: the difference between the executor's state and what must run.

    Column groups (see ``columns``): ``finished_rows`` (row); ``new_blocks`` (row, block id), appended in order;
    ``num_scheduled_tokens`` (row, n), exceptions only; ``block_copies`` (source, destination); ``swap_out`` (device
    block, host block); ``swap_in`` (host block, device block), see rules 5 and 6. ``total_num_scheduled_tokens`` is a
    check. ``num_speculative_tokens`` (row, k), rows ascending, see rule 8; the total leaves them out.
    """

    epoch: int
    step: int
    scheduled_new_reqs: tuple[NewRequest, ...] = ()
    finished_rows: bytes = b""
    new_blocks: bytes = b""
    num_scheduled_tokens: bytes = b""
    block_copies: bytes = b""
    swap_out: bytes = b""
    swap_in: bytes = b""
    total_num_scheduled_tokens: int = 0
    num_speculative_tokens: bytes = b""


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one sampled position: the sampled token's, then the most likely tokens, best first.

    A row that brings several tokens has an entry for each, in their order.
    """

    row: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RowPromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities of tokens of a row's prompt (rule 8)."""

    row: int
    values: PromptLogprobColumns


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """A row that could not be run; the others of its step are unaffected."""

    row: int
    message: str


class ExecutorOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What one step produced.

    ``device_time_us`` is the time of the forward pass and sampling, ``move_time_us`` the time of the step's block moves (0
    where it had none), which came before them and may have run beside the step before; neither contains the other. Both in
    microseconds. ``prompt_logprobs``: at most one entry for each row.
    ``accepted_tokens`` is a column group (row, proposed, accepted), one entry for each row of the step's
    ``num_speculative_tokens``, rows ascending (rule 9); a row in ``errors`` accepts none.
    """

    epoch: int
    step: int
    sampled_token_ids: bytes = b""
    logprobs: tuple[RowLogprobs, ...] = ()
    errors: tuple[RowError, ...] = ()
    device_time_us: int = 0
    state_digest: int | None = None
    move_time_us: int = 0
    prompt_logprobs: tuple[RowPromptLogprobs, ...] = ()
    accepted_tokens: bytes = b""


class ExecutorHello(msgspec.Struct, frozen=True, array_like=True):
    """Sent by an executor until an epoch is opened for its ``incarnation`` (a random integer, one per process life)."""

    incarnation: int
    info: BackendInfo


class ResyncRequest(msgspec.Struct, frozen=True, array_like=True):
    """An executor lost the thread (gap, damaged frame, impossible diff, failed step) and asks for a new epoch.

    ``max_num_batched_tokens``: the most tokens that it takes in one step from then on, where a larger step was more than
    its memory holds; 0: as before. ``failed_step``: the step that the backend could not run; -1 where it was not a step
    that failed. ``is_leaving``: no epoch helps, the process ends; another life of it will say hello.
    """

    incarnation: int
    reason: str
    max_num_batched_tokens: int = 0
    failed_step: int = -1
    is_leaving: bool = False


class ExecutorHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Sign of life. ``next_step`` is the step the executor would accept next."""

    incarnation: int
    next_step: int


class NewEpoch(msgspec.Struct, frozen=True, array_like=True):
    """Opens an epoch for the executor whose ``incarnation`` is named; all rows are forgotten, the next step is 0."""

    epoch: int
    executor_incarnation: int
    scheduler_incarnation: int


class SchedulerHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Sign of life of the scheduler. An executor of another incarnation says hello again."""

    scheduler_incarnation: int


_TO_EXECUTOR: dict[type[msgspec.Struct], int] = {SchedulerOutput: 1, NewEpoch: 2, SchedulerHeartbeat: 3}
_TO_SCHEDULER: dict[type[msgspec.Struct], int] = {
    ExecutorOutput: 16,
    ExecutorHello: 17,
    ResyncRequest: 18,
    ExecutorHeartbeat: 19,
}


def scheduler_frame_writer() -> FrameWriter:
    """A writer of what a scheduler sends."""
    return FrameWriter(_TO_EXECUTOR)


def executor_frame_writer() -> FrameWriter:
    """A writer of what an executor sends."""
    return FrameWriter(_TO_SCHEDULER)


def scheduler_frame_reader() -> FrameReader:
    """A reader of what a scheduler receives."""
    return FrameReader({kind: body for body, kind in _TO_SCHEDULER.items()})


def executor_frame_reader() -> FrameReader:
    """A reader of what an executor receives."""
    return FrameReader({kind: body for body, kind in _TO_EXECUTOR.items()})


def state_digest(
    rows: NDArray[np.integer],
    num_computed_tokens: Int32Array,
    num_blocks: Int32Array,
    block_table: NDArray[np.integer],
) -> int:
    """Digest of the mirrored state after a step, equal on both sides when they agree.

    ``rows`` ascending, shape ``[n]``; ``num_computed_tokens`` and ``num_blocks`` of those rows, shape ``[n]``;
    ``block_table`` the whole table, shape ``[max rows, max blocks per row]``. Returns a CRC32.
    """
    digest = zlib.crc32(rows.astype(INT32, copy=False).tobytes())
    digest = zlib.crc32(num_computed_tokens.astype(INT32, copy=False).tobytes(), digest)
    digest = zlib.crc32(num_blocks.astype(INT32, copy=False).tobytes(), digest)
    if len(rows):
        width = int(num_blocks.max())
        used = np.arange(width, dtype=np.int32) < num_blocks[:, None]
        digest = zlib.crc32(block_table[rows, :width][used].astype(INT32, copy=False).tobytes(), digest)
    return digest
