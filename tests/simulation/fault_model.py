"""The model that simulated executors run: a hash for tokens, a list per block for keys and values.

Owns: which token follows which history, which undisturbed answer a request has, and what blocks hold.
Must not know: steps in flight, links, faults of processes.

The next token depends on the whole history, so that a token lost, repeated or misplaced anywhere changes all that
follow. A slot of a block holds the hash of the prefix that ends in it, so that a block which does not hold what a row's
table promises is noticed by the first step that reads it.
"""

from collections.abc import Callable
from functools import reduce
from operator import xor
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import StepBatch, StepResult
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import Int32Array, decode_column, encode_column, encode_floats
from headway_proto.pooling import NO_POOLING, needs_every_token
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import NO_LOGPROBS, SamplingParams
from headway_proto.step import ERRORED_ROW, BackendInfo, RowError, RowLogprobs, RowPromptLogprobs, RowVector
from simulation.fault_schedule import ADAPTERS, END_TOKEN, MAX_MODEL_LEN, VOCABULARY, RequestPlan, Settings
from simulation.fault_store import FaultPool

_MASK = (1 << 64) - 1
_EMPTY = 0x9E3779B97F4A7C15
LACKS_ADAPTER = "this executor lacks the adapter"
_NAN_SEED_BITS = 32
"""Above these bits of a request's seed stands the output token at which its logits are NaN, plus one."""


def backend_info(settings: Settings, shrunk: int = 0, life: int = 0) -> BackendInfo:
    """What an executor announces; ``shrunk`` 1: half the rows and the fewest blocks, 2: no blocks on the host.

    ``life``: of its process, where they have blocks of different sizes.
    """
    info = _whole_info(settings)
    if settings.contexts:
        info = msgspec.structs.replace(info, max_model_len=settings.contexts[life % len(settings.contexts)])
    if settings.block_sizes:
        size = settings.block_sizes[life % len(settings.block_sizes)]
        info = msgspec.structs.replace(
            info,
            block_size=size,
            num_blocks=_in_blocks_of(size, info, info.num_blocks),
            num_host_blocks=_in_blocks_of(size, info, info.num_host_blocks),
        )
    if shrunk == 1:
        num_blocks = -(-MAX_MODEL_LEN // info.block_size)
        info = msgspec.structs.replace(info, max_num_rows=-(-info.max_num_rows // 2), num_blocks=num_blocks)
    elif shrunk == 2:
        info = msgspec.structs.replace(info, num_host_blocks=0)
    return info


def _in_blocks_of(size: int, info: BackendInfo, num_blocks: int) -> int:
    return -(-num_blocks * info.block_size // size)


def _whole_info(settings: Settings) -> BackendInfo:
    return BackendInfo(
        backend="model",
        device="none",
        dtype="none",
        model_name="model",
        model_fingerprint="model",
        num_blocks=settings.num_blocks,
        block_size=settings.block_size,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCABULARY,
        eos_token_ids=(END_TOKEN,),
        max_num_rows=settings.num_rows,
        num_host_blocks=settings.num_host_blocks,
        swap_us_per_block=1.0,
        supports_prompt_logprobs=True,
        max_speculative_tokens=settings.max_speculative_tokens if settings.num_lanes == 1 else 0,
        num_lanes=settings.num_lanes,
        supports_adapters=settings.has_adapters,
        adapters=tuple(map(adapter_of, ADAPTERS[:-1])) if settings.has_adapters else (),
        embedding_size=int(settings.embeds),
        keeps_states=settings.keeps_states,
    )


def adapter_of(name: str) -> LoadedAdapter:
    """Each has files of its own, which nobody replaces by others."""
    return LoadedAdapter(name, f"directory-of-{name}", "1")


def sampling_of(plan: RequestPlan) -> SamplingParams:
    return SamplingParams(
        temperature=plan.temperature,
        seed=(plan.fails_at + 1) << _NAN_SEED_BITS | plan.seed,
        stop_token_ids=plan.stop,
        logprobs=0 if plan.wants_logprobs else NO_LOGPROBS,
        prompt_logprobs=0 if plan.wants_prompt_logprobs else NO_LOGPROBS,
    )


def grown(prefix: int, token: int) -> int:
    """The hash of a history that is one token longer."""
    return ((prefix ^ (token + 1)) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & _MASK


def _beginning(adapter: str) -> int:
    """The hash of an empty history. ``adapter``: an identity, or ""."""
    return grown(_EMPTY, crc32(adapter.encode())) if adapter else _EMPTY


def token_after(prefix: int, sampling: SamplingParams) -> int:
    salt = (sampling.seed & 0xFFFF) + 1 if sampling.temperature else 0
    draw = ((prefix + salt * _EMPTY) & _MASK) * 0x94D049BB133111EB & _MASK
    return (draw >> 40) % VOCABULARY


def is_right(prefix: int) -> bool:
    """Whether the proposal that ends this history is the token that was drawn."""
    return (prefix >> 20) % 3 > 0


def fails_at(sampling: SamplingParams) -> int:
    return (sampling.seed >> _NAN_SEED_BITS) - 1


def logprob_of(prefix: int) -> float:
    return -float(prefix >> 44)


class Answer:
    """What a request brings if nothing goes wrong, with so long a context: tokens, their log probabilities, why it ends, and
    the number that a pooled one is about.
    """

    def __init__(self, plan: RequestPlan, settings: Settings, context: int = MAX_MODEL_LEN) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.reason = "length"
        sampling = sampling_of(plan)
        stops = set(plan.stop) | (set() if plan.ignore_eos else {END_TOKEN})
        limit = min(plan.max_tokens, min(context, settings.num_blocks * settings.block_size + 1) - len(plan.prompt))
        prefix = _beginning(adapter_of(plan.adapter).identity if plan.adapter else "")
        self.prompt_logprobs: list[float] = []
        prefixes = [prefix := grown(prefix, token) for token in plan.prompt]
        self.prompt_logprobs += map(logprob_of, prefixes)
        self.vector = vector_of(prefixes, plan.pooling)
        del self.prompt_logprobs[0]
        for index in range(limit):
            if index == plan.fails_at:
                self.reason = "error"
                return
            token = token_after(prefix, sampling)
            self.tokens.append(token)
            self.logprobs.append(logprob_of(prefix))
            prefix = grown(prefix, token)
            if token in stops:
                self.reason = "stop"
                return


def vector_of(prefixes: list[int], pooling: int) -> bytes:
    """The vector of the tokens that end these histories."""
    if pooling == NO_POOLING:
        return b""
    wanted = prefixes if needs_every_token(pooling) else prefixes[-1:]
    return encode_floats([logprob_of(reduce(xor, wanted, pooling << 50))])


class _Row:
    __slots__ = ("error", "num_prompt", "pooling", "prefixes", "run", "sampling")

    def __init__(
        self, prefixes: list[int], num_prompt: int, sampling: SamplingParams, error: str, start: int, pooling: int
    ) -> None:
        self.run = slice(start, start)
        """The tokens that it has run, if each step has begun where the one before ended."""
        self.pooling = pooling
        self.prefixes = prefixes
        self.num_prompt = num_prompt
        self.sampling = sampling
        self.error = error
        """Why it cannot draw its next token, or ""."""


class ModelOfBlocks:
    """One executor's rows and blocks. ``complain`` is called with what a step finds wrong in a block."""

    def __init__(self, info: BackendInfo, complain: Callable[[str], None], host: FaultPool) -> None:
        self._size = info.block_size
        self._complain = complain
        self._blocks = [[0] * info.block_size for _ in range(info.num_blocks)]
        self._host = host
        self._keeps_states = info.keeps_states
        self._unsound: set[int] = set()
        """Rows that were told to be stale, until they end."""
        self._rows: dict[int, _Row] = {}
        self.adapters = {adapter.identity: adapter for adapter in info.adapters}

    @property
    def rows(self) -> list[int]:
        """The rows that it knows, ascending."""
        return sorted(self._rows)

    def move(self, copies: list[list[int]], swap_out: list[list[int]], swap_in: list[list[int]]) -> None:
        for block, host in zip(*swap_out, strict=True):
            self._host.write(host, [number & _MASK for number in self._blocks[block]])
        for host, block in zip(*swap_in, strict=True):
            self._blocks[block] = self._host.contents(host)
        for source, destination in zip(*copies, strict=True):
            self._blocks[destination] = list(self._blocks[source])

    def load(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        for block, numbers in zip(blocks.tolist(), contents, strict=True):
            self._blocks[block] = numbers.view(np.uint64).tolist()

    def run(self, batch: StepBatch) -> StepResult:
        for row in batch.finished_rows.tolist():
            self._rows.pop(row, None)
        self._unsound.difference_update(batch.finished_rows.tolist(), [new.row for new in batch.new_rows])
        self._unsound.update(batch.stale_rows.tolist())
        for new in batch.new_rows:
            prefix = _beginning(new.adapter)
            prefixes = [prefix]
            for token in new.token_ids.tolist():
                prefix = grown(prefix, token)
                prefixes.append(prefix)
            error = f"{LACKS_ADAPTER} {new.adapter}" if new.adapter and new.adapter not in self.adapters else ""
            self._rows[new.row] = _Row(
                prefixes, new.num_prompt_tokens, new.sampling, error, new.num_computed_tokens, new.pooling
            )
        work = list(
            zip(
                batch.rows.tolist(),
                batch.num_computed_tokens.tolist(),
                batch.num_scheduled_tokens.tolist(),
                batch.samples.tolist(),
                strict=True,
            )
        )
        speculative = batch.num_speculative_tokens
        most = {} if speculative is None else dict(zip(batch.rows.tolist(), speculative.tolist(), strict=True))
        tables = {
            row: batch.block_table[row, : -(-(start + count + most.get(row, 0)) // self._size)].tolist()
            for row, start, count, _ in work
        }
        self._write(work, tables)
        self._read(work, tables)
        self._advance(work)
        result = self._sample(work, {row: count for row, count in most.items() if count}, tables)
        return msgspec.structs.replace(result, prompt_logprobs=self._report(work))

    def _write(self, work: list[tuple[int, int, int, int]], tables: dict[int, list[int]]) -> None:
        size, written = self._size, {}
        for row, start, count, _ in work:
            prefixes, table = self._rows[row].prefixes, tables[row]
            for position in range(start, start + count):
                block = table[position // size]
                if written.setdefault(block, row) != row:
                    self._complain(f"rows {written[block]} and {row} both write block {block}")
                self._blocks[block][position % size] = prefixes[position + 1]

    def _read(self, work: list[tuple[int, int, int, int]], tables: dict[int, list[int]]) -> None:
        size = self._size
        for row, start, count, _ in work:
            if row in self._unsound:
                continue
            prefixes, end = self._rows[row].prefixes, start + count
            for index, block in enumerate(tables[row][: -(-end // size)]):
                first = index * size
                last = min(first + size, end)
                if self._blocks[block][: last - first] != prefixes[first + 1 : last + 1]:
                    self._complain(f"row {row}: block {block} does not hold its tokens {first} to {last - 1}")

    def _advance(self, work: list[tuple[int, int, int, int]]) -> None:
        """What a row's state, or its vector, is made of."""
        for number, start, count, _ in work:
            row = self._rows[number]
            if (self._keeps_states or row.pooling) and start != row.run.stop:
                self._complain(f"row {number} runs from {start}, and has run {row.run}")
            if self._keeps_states and row.run.start:
                self._complain(f"row {number} began at {row.run.start}, without its state")
            row.run = slice(row.run.start, start + count)

    def _report(self, work: list[tuple[int, int, int, int]]) -> tuple[RowPromptLogprobs, ...]:
        reports = []
        for number, start, count, _ in work:
            row = self._rows[number]
            end = min(start + count, row.num_prompt - 1)
            if row.sampling.prompt_logprobs != NO_LOGPROBS and end > start:
                values = [logprob_of(prefix) for prefix in row.prefixes[start + 2 : end + 2]]
                reports.append(RowPromptLogprobs(number, PromptLogprobColumns(start + 1, encode_floats(values))))
        return tuple(reports)

    def _sample(
        self, work: list[tuple[int, int, int, int]], most: dict[int, int], tables: dict[int, list[int]]
    ) -> StepResult:
        tokens: list[int] = []
        errors: list[RowError] = []
        logprobs: list[RowLogprobs] = []
        accepted: list[tuple[int, int, int]] = []
        vectors: list[RowVector] = []
        for number, _, _, samples in work:
            if not samples:
                continue
            drawn = self._draw(number, logprobs)
            tokens.append(ERRORED_ROW if drawn is None else drawn)
            if drawn is None:
                errors.append(RowError(number, self._rows[number].error or "the logits are NaN"))
            elif self._rows[number].pooling:
                row = self._rows[number]
                vectors.append(RowVector(number, vector_of(row.prefixes[row.run.start + 1 : -1], row.pooling)))
            if number in most:
                further = [] if drawn is None else self._speculate(number, most[number], tables[number], logprobs)
                tokens += further
                accepted.append((number, 0 if drawn is None else most[number], len(further)))
        columns = np.array(accepted, dtype=np.int32).reshape(-1, 3).T
        return StepResult(
            sampled_token_ids=decode_column(encode_column(tokens)),
            logprobs=tuple(logprobs),
            errors=tuple(errors),
            accepted_tokens=columns if accepted else None,
            vectors=tuple(vectors),
        )

    def _draw(self, number: int, logprobs: list[RowLogprobs]) -> int | None:
        """Draw a row's next token and append it; None if its logits are NaN, or its adapter is not there."""
        row = self._rows[number]
        prefix = row.prefixes[-1]
        if row.error or len(row.prefixes) - 1 - row.num_prompt == fails_at(row.sampling):
            row.prefixes.append(grown(prefix, 0))
            return None
        token = token_after(prefix, row.sampling)
        if row.sampling.logprobs != NO_LOGPROBS:
            logprobs.append(RowLogprobs(number, logprob_of(prefix), (), ()))
        row.prefixes.append(grown(prefix, token))
        return token

    def _speculate(self, number: int, most: int, table: list[int], logprobs: list[RowLogprobs]) -> list[int]:
        """Run ``most`` proposals behind the token that was just drawn: the tokens behind those that are right."""
        prefixes, size = self._rows[number].prefixes, self._size
        further: list[int] = []
        is_going = True
        first = len(prefixes) - 2
        for place in range(most):
            position = first + place
            if is_going and is_right(prefixes[-1]):
                self._blocks[table[position // size]][position % size] = prefixes[-1]
                drawn = self._draw(number, logprobs)
                if drawn is not None:
                    further.append(drawn)
                    continue
                prefixes.pop()  # it is drawn again, alone
            is_going = False
            self._blocks[table[position // size]][position % size] = -1 - place
        return further
