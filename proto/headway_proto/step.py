"""The step protocol between scheduler and executor: one diff per step, one column of sampled tokens back.

Owns: the messages, and the rules that derive what they leave out. Must not know: how either side keeps its state.

A running request owns a **row**, a small dense integer, until ``finished_rows`` lists it. Per row the executor keeps
token ids, block table, ``num_computed_tokens`` and sampling state.

1. A step forgets ``finished_rows``, adds ``scheduled_new_reqs``, appends ``new_blocks``, moves blocks (``swap_out``,
   ``swap_in``, ``pulls``, ``block_copies``), then runs. Behind that, it copies ``exports``; its answer does not wait for
   these copies, but the next step does.
2. Every live row runs one token, unless ``num_scheduled_tokens`` lists another number (0: none).
3. Its tokens are positions ``[num_computed_tokens, num_computed_tokens + n)``; then ``num_computed_tokens += n``. If
   that reaches ``num_tokens``, the row samples one token, and ``num_tokens += 1``.
4. ``sampled_token_ids`` holds one id per sampling row, rows ascending.
5. ``swap_out`` reads before any write of its step and before every ``swap_in``, so another row may take the block at
   once. A step writes a host block, and swaps into a device block, at most once.
6. A host block keeps its contents until the next write, even beyond the epoch and the process. ``swap_in`` reads only
   what this epoch's ``swap_out`` or ``exports`` wrote. Whatever else is read from a host block, of this executor or of
   another, is a pull: it names the epoch and step that wrote the block, and the executor believes the block only if its
   record says the same and its checksum is right. A new row with a block that is not right is in ``stale_rows``.
7. Positions below a new row's ``num_computed_tokens`` are in its blocks when it runs: from earlier steps, its block
   moves, or (without ``prompt_logprobs``) other rows of the same step that share its prefix.
8. A row with ``prompt_logprobs`` that runs positions ``[a, b)`` reports the prompt's positions ``a + 1`` to ``b``.
9. A row in ``num_speculative_tokens`` runs one token and samples, then may run up to k tokens that the executor
   proposes. The token after a proposal counts only if this proposal and all before it equal the tokens drawn for their
   places. With a accepted proposals the row brings 1 + a ids, and ``num_computed_tokens`` and ``num_tokens`` grow by a
   more. ``state_digest`` leaves a out, and the next step waits for the answer.
10. A new row in ``pooled`` makes a vector of its tokens' hidden states. The step in which it samples reports the vector;
   the token that it samples means nothing. If the pooling needs every token, the row begins at position 0.

An executor with several **lanes** (``BackendInfo.num_lanes``) works on several steps at once, as the stages of a pipeline
do. Its steps are each of one lane (``LaneOutput``), and rule 2 becomes:

2. Every live row *of the step's lane* runs one token, unless ``num_scheduled_tokens`` lists another number (0: none). A
   row that has not sampled since it was new is in no lane: it runs only in the steps that list it, of whatever lane. The
   step in which it first samples puts it in its lane, where it stays. A step lists no row of another lane.

Steps are applied, moved, run and answered in their order by each stage. A step needs the tokens of its lane's earlier
steps, and no tokens of other lanes'; so chunks of one prompt may follow each other through the stages, and its decodes
may not. Such an executor does not speculate.

So a decode step without changes has constant size. ``NewEpoch`` opens an epoch for a new executor process or after an
error: there are no rows, steps count from 0, other epochs' messages are ignored. Messages are arrays; new
fields go to the end, with defaults for other versions.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_proto.adapters import AdapterChange, AdapterChanged, LoadedAdapter, RowAdapter
from headway_proto.checksum import crc32
from headway_proto.columns import INT32, Int32Array
from headway_proto.framing import FrameReader, FrameWriter
from headway_proto.pooling import NO_POOLING, POOL_SCORE
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import SamplingParams
from headway_proto.wording import shown

NO_LANE = -1
"""The lane of a row that has not sampled yet."""

DIGEST_INTERVAL_STEPS = 64
"""``state_digest`` is reported with steps that are multiples of this."""

ERRORED_ROW = -1
"""The id in ``sampled_token_ids`` for a row in ``errors``."""


class BackendInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What an executor can hold and run.

    ``max_model_len`` per request; ``vocab_size``: width of the logits; ``num_host_blocks`` for swapping (0: none), at
    about ``swap_us_per_block`` microseconds each (0.0: unknown); ``max_num_batched_tokens`` per step (0: no limit);
    ``max_speculative_tokens`` per row and step, 0 with several lanes. ``host_pool`` names the contents of the host blocks: a process that takes
    them over from one that died announces the same name; "" if they end with the process. ``block_addresses``: where
    other executors reach them, best first, each ``TRANSPORT:ADDRESS``. ``num_lanes``: steps that it works on at the same
    time, one for each stage of its pipeline. ``adapters``: those that are loaded.

    ``embedding_size``: numbers of a pooled vector, 0 without rule 10; ``default_pooling`` is the checkpoint's own, or
    ``NO_POOLING``; a reranker's is ``POOL_SCORE``, the only one that it has.
    ``generates``: tokens of an encoder, or of a model without a head, mean nothing. ``keeps_states``: blocks alone do not say
    what a row's tokens have been, so every new row begins at position 0.
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
    host_pool: str = ""
    block_addresses: tuple[str, ...] = ()
    num_lanes: int = 1
    supports_adapters: bool = False
    adapters: tuple[LoadedAdapter, ...] = ()
    embedding_size: int = 0
    default_pooling: int = NO_POOLING
    generates: bool = True
    keeps_states: bool = False


SHARED_MEMORY = "shm"
"""The transport whose blocks outlive the executor's process."""

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
    ("num_lanes", 1, 1 << 6),
    ("embedding_size", 0, 1 << 24),
    ("default_pooling", NO_POOLING, POOL_SCORE),
)
_MAX_NAME_CHARACTERS = 4096
_MAX_EOS_TOKEN_IDS = 4096
_MAX_BLOCK_ADDRESSES = 8
_MAX_ADAPTERS = 1 << 16


def info_problem(info: BackendInfo) -> str | None:
    """Return in one line why this executor cannot be used."""
    for field, least, most in _RANGES:
        value = getattr(info, field)
        if not least <= value <= most:
            return f"{field}: {value} is not allowed; allowed: {least} to {most:g}"
    for field in ("backend", "device", "dtype", "model_name", "model_fingerprint", "host_pool"):
        if len(getattr(info, field)) > _MAX_NAME_CHARACTERS:
            return f"{field}: {len(getattr(info, field))} characters; allowed: at most {_MAX_NAME_CHARACTERS}"
    if info.num_lanes > 1 and info.max_speculative_tokens:
        return f"max_speculative_tokens: {info.max_speculative_tokens} is not allowed with several lanes; allowed: 0"
    if len(info.adapters) > (_MAX_ADAPTERS if info.supports_adapters else 0):
        return f"adapters: {len(info.adapters)} are not allowed; allowed: {_MAX_ADAPTERS}, with a backend for them"
    addresses = info.block_addresses
    if len(addresses) > _MAX_BLOCK_ADDRESSES or any(len(address) > _MAX_NAME_CHARACTERS for address in addresses):
        return (
            f"block_addresses: {len(addresses)} addresses; allowed: at most {_MAX_BLOCK_ADDRESSES}, of "
            f"{_MAX_NAME_CHARACTERS} characters each"
        )
    ids = info.eos_token_ids
    if len(ids) > _MAX_EOS_TOKEN_IDS or not all(0 <= token_id < info.vocab_size for token_id in ids):
        return f"eos_token_ids: {shown(ids)} is not allowed; allowed: {_MAX_EOS_TOKEN_IDS} ids from 0 to {info.vocab_size - 1}"
    return None


class NewRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request that takes a row.

    ``token_ids`` (int32 column): prompt, then earlier output; ``num_prompt_tokens`` divides them. ``block_ids`` (int32
    column) covers this step's tokens and those before.
    """

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    block_ids: bytes
    num_computed_tokens: int
    sampling: SamplingParams


class BlockPull(msgspec.Struct, frozen=True, array_like=True):
    """Blocks to bring from a host pool, see rule 6.

    ``pool`` and ``addresses`` as its executor announced them; ``epoch`` wrote the blocks. ``blocks`` is a column group
    (host block there, step that wrote it, device block here); each device block belongs to a new row of the same step.
    """

    pool: str
    addresses: tuple[str, ...]
    epoch: int
    blocks: bytes


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One step, as a change of the executor's state.

    Column groups: ``finished_rows`` (row); ``new_blocks`` (row, block id), appended in order; ``num_scheduled_tokens``
    (row, n), exceptions only; ``swap_out`` (device block, host block); ``swap_in`` (host block, device block);
    ``num_speculative_tokens`` (row, k), rows ascending, not counted in ``total_num_scheduled_tokens``, which is a
    check.

    ``block_copies`` (source, destination): never sent today, kept because recorded flight logs must replay to the byte.
    A backend must still copy each source block, all layers, after the step's swaps and before it runs; no block is both
    source and destination in a step.
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


class TransferringOutput(SchedulerOutput, frozen=True, array_like=True, kw_only=True):
    """A step with blocks that go to other executors or come from a host pool.

    ``exports`` is a column group (device block, host block), copied once the step has run.
    A message of its own, so that other steps stay as small as they are and recorded flights replay to the byte.
    """

    exports: bytes = b""
    pulls: tuple[BlockPull, ...] = ()


class LaneOutput(TransferringOutput, frozen=True, array_like=True, kw_only=True):
    """A step of an executor with several lanes: of lane ``lane``, from 0. Only such an executor gets this message."""

    lane: int = 0


class AdapterOutput(TransferringOutput, frozen=True, array_like=True, kw_only=True):
    """A step with new rows that run with an adapter. Only an executor that supports adapters gets this message."""

    adapters: tuple[RowAdapter, ...] = ()


class PoolingOutput(AdapterOutput, frozen=True, array_like=True, kw_only=True):
    """A step with new rows that are pooled: ``pooled`` is a column group (row, pooling). See rule 10.

    Of ``SchedulerOutput``, ``TransferringOutput``, ``AdapterOutput`` and this, each has all fields of the one before, and a
    step is the first that holds what it needs; with several lanes, of ``LaneOutput`` and ``PoolingLaneOutput``.
    """

    pooled: bytes = b""


class PoolingLaneOutput(LaneOutput, frozen=True, array_like=True, kw_only=True):
    """A step of a lane with new rows that run with an adapter or are pooled; see ``PoolingOutput``."""

    adapters: tuple[RowAdapter, ...] = ()
    pooled: bytes = b""


def adapters_in(output: SchedulerOutput) -> tuple[RowAdapter, ...]:
    """Which new rows of a step run with which adapter."""
    return output.adapters if isinstance(output, AdapterOutput | PoolingLaneOutput) else ()


def pooled_in(output: SchedulerOutput) -> bytes:
    """Which new rows of a step are pooled: see ``PoolingOutput``."""
    return output.pooled if isinstance(output, PoolingOutput | PoolingLaneOutput) else b""


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token and the most likely ones, best first."""

    row: int
    logprob: float
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RowPromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """See rule 8."""

    row: int
    values: PromptLogprobColumns


class RowVector(msgspec.Struct, frozen=True, array_like=True):
    """See rule 10. ``values``: a float32 column."""

    row: int
    values: bytes


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """Other rows are unaffected."""

    row: int
    message: str


class ExecutorOutput(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The results of one step.

    ``device_time_us``: forward pass and sampling; ``move_time_us``: block moves before them, perhaps during the
    previous step. ``accepted_tokens``: a column group (row, proposed, accepted) for the rows in
    ``num_speculative_tokens``, ascending; a row in ``errors`` accepts none. ``stale_rows`` (row), ascending: what they
    have in this step, or bring in a later one, follows from blocks that are not right, and is to be ignored.
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
    stale_rows: bytes = b""


class PooledOutput(ExecutorOutput, frozen=True, array_like=True, kw_only=True):
    """The results of a step in which pooled rows sampled: their vectors, rows ascending."""

    vectors: tuple[RowVector, ...] = ()


class ExecutorHello(msgspec.Struct, frozen=True, array_like=True):
    """Sent until an epoch opens for ``incarnation``, random per process.

    ``number``: the cell that it wants, so that both sides call it the same; -1: any.
    """

    incarnation: int
    info: BackendInfo
    number: int = -1


class ResyncRequest(msgspec.Struct, frozen=True, array_like=True):
    """An executor needs a new epoch: gap, damaged frame, impossible diff, failed step.

    ``max_num_batched_tokens``: a new limit after a step that exceeded its memory (0: unchanged). ``failed_step``: or
    -1. ``is_leaving``: the process ends. ``is_in_another_state``: than the steps say, so that what it has copied to the
    host in this epoch may be anything.
    """

    incarnation: int
    reason: str
    max_num_batched_tokens: int = 0
    failed_step: int = -1
    is_leaving: bool = False
    is_in_another_state: bool = False


class ExecutorHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """``next_step`` is expected next."""

    incarnation: int
    next_step: int


class NewEpoch(msgspec.Struct, frozen=True, array_like=True):
    """Opens an epoch for ``executor_incarnation``."""

    epoch: int
    executor_incarnation: int
    scheduler_incarnation: int


class SchedulerHeartbeat(msgspec.Struct, frozen=True, array_like=True):
    """After a change of incarnation, executors say hello again."""

    scheduler_incarnation: int


_TO_EXECUTOR: dict[type[msgspec.Struct], int] = {
    SchedulerOutput: 1,
    NewEpoch: 2,
    SchedulerHeartbeat: 3,
    TransferringOutput: 4,
    LaneOutput: 5,
    AdapterOutput: 6,
    AdapterChange: 7,
    PoolingOutput: 8,
    PoolingLaneOutput: 9,
}
_TO_SCHEDULER: dict[type[msgspec.Struct], int] = {
    ExecutorOutput: 16,
    ExecutorHello: 17,
    ResyncRequest: 18,
    ExecutorHeartbeat: 19,
    PooledOutput: 20,
    AdapterChanged: 21,
}


def scheduler_frame_writer() -> FrameWriter:
    """Make a writer."""
    return FrameWriter(_TO_EXECUTOR)


def executor_frame_writer() -> FrameWriter:
    """Make a writer."""
    return FrameWriter(_TO_SCHEDULER)


def scheduler_frame_reader() -> FrameReader:
    """Make a reader."""
    return FrameReader({kind: body for body, kind in _TO_SCHEDULER.items()})


def executor_frame_reader() -> FrameReader:
    """Make a reader."""
    return FrameReader({kind: body for body, kind in _TO_EXECUTOR.items()})


def state_digest(
    rows: NDArray[np.integer],
    num_computed_tokens: Int32Array,
    num_blocks: NDArray[np.integer],
    block_table: NDArray[np.integer],
    lanes: NDArray[np.integer] | None = None,
) -> int:
    """CRC32 of the mirrored state after a step, equal on both sides.

    ``rows`` ascending; ``num_computed_tokens`` and ``num_blocks`` of them, shape ``[n]``; ``block_table`` whole, shape
    ``[max rows, max blocks per row]``. ``lanes``, of these rows, -1 for none: only if the executor has several.
    """
    num_blocks = num_blocks.astype(INT32, copy=False)
    digest = crc32(rows.astype(INT32, copy=False).tobytes())
    digest = crc32(num_computed_tokens.astype(INT32, copy=False).tobytes(), digest)
    digest = crc32(num_blocks.tobytes(), digest)
    if len(rows):
        width = int(num_blocks.max())
        used = np.arange(width, dtype=INT32) < num_blocks[:, None]
        digest = crc32(block_table[rows, :width][used].astype(INT32, copy=False).tobytes(), digest)
    if lanes is not None:
        digest = crc32(lanes.astype(INT32, copy=False).tobytes(), digest)
    return digest
