"""The simulated backend: no model and no torch. A hash for tokens, a cost model for time, a mirror for the KV cache.

Owns: the next-token hash, the simulated pools and their verification, the time model, and injected failures.
Must not know: epochs, frames, or why a row runs.

**Tokens.** The next token is a pure function of the row's whole history, of the model's seed and, above temperature 0,
of the request's seed. One token lost, repeated or misplaced anywhere changes everything that follows, and a row that
resumes from the same tokens continues as if nothing had happened. The history is hashed as a sum of mixed
(position, token) pairs, so a token is appended in O(1) and all prefixes of a prompt come from one cumulative sum. The
mixer is the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014).

**KV.** A slot of the simulated pool holds the hash of the prefix that ends with its token. The last slot that a row
needs of each of its blocks must hold the row's own prefix, and nothing may have been written to the block from its
start again. A wrong block table, a block reused too early and a wrong prefix hit all raise ``CacheMismatch``. A block that
is swapped out takes along what it holds.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import (
    AUTOMATIC_SWAP_SPACE,
    BackendConfig,
    BackendConfigError,
    DeviceLostError,
    ModelFilesError,
    NewRow,
    StepBatch,
    StepOutOfMemoryError,
    StepResult,
)
from headway_proto.columns import Int32Array, encode_column, encode_floats
from headway_proto.prompt_logprobs import PromptLogprobColumns
from headway_proto.sampling import NO_LOGPROBS, SamplingParams
from headway_proto.step import ERRORED_ROW, BackendInfo, RowError, RowLogprobs, RowPromptLogprobs

Hashes: TypeAlias = NDArray[np.uint64]

_AtLeast0 = Annotated[float, msgspec.Meta(ge=0)]
_SPIN_SECONDS = 100e-6
_MAX_DEFAULT_BLOCKS = 16_384
_MAX_HOST_BLOCKS = 1 << 24
# Keys and values of one token in a model of 8 billion parameters: 32 layers of 8 heads of 128 numbers, 16 bits each.
_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
_SWAP_BYTES_PER_US = 25_000
_PROPOSAL_SALT = 0xD1B54A32D192ED03


class CacheMismatch(RuntimeError):  # noqa: N818 (it names the finding)
    """A row was about to attend to a block that does not hold the row's tokens."""


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The backend's own options; each is given as text.

    ``vocab_size``, ``eos_token_id`` and ``context_length`` describe the model where no checkpoint directory does.
    A step takes ``step_base_us + per_token_us * scheduled tokens + per_seq_us * rows + per_context_token_us * tokens
    attended`` microseconds, and before it ``swap_us_per_block`` for every block that is swapped out or in (None: the
    blocks of an 8-billion-parameter model at 25 GB/s); with ``real_time`` false the time is reported and not waited for.
    ``eos_probability`` ends rows at random; ``verify_kv`` checks the simulated cache. Up to ``max_speculative_tokens``
    tokens are proposed where a step asks for proposals; each is right with probability ``speculative_acceptance``. To
    inject failures: a row whose last
    token is ``nan_row_token`` reports NaN logits, a step of more than ``oom_over_tokens`` tokens runs out of memory. A step
    with a request whose prompt has the token ``fail_on_token`` fails, with ``lose_device_on_token`` the device is lost, and
    with ``kill_on_token`` the process is killed (SIGKILL).
    """

    vocab_size: Annotated[int, msgspec.Meta(ge=2)] = 32_000
    eos_token_id: Annotated[int, msgspec.Meta(ge=0)] = 2
    context_length: Annotated[int, msgspec.Meta(ge=1)] = 4096
    eos_probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    verify_kv: bool = True
    real_time: bool = True
    step_base_us: _AtLeast0 = 0.0
    per_token_us: _AtLeast0 = 0.0
    per_seq_us: _AtLeast0 = 0.0
    per_context_token_us: _AtLeast0 = 0.0
    swap_us_per_block: _AtLeast0 | None = None
    nan_row_token: int | None = None
    oom_over_tokens: int | None = None
    fail_on_token: int | None = None
    lose_device_on_token: int | None = None
    kill_on_token: int | None = None
    max_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    speculative_acceptance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5


class TokenHash(msgspec.Struct, frozen=True, kw_only=True):
    """The next-token function of a simulated model.

    ``eos_token_ids`` ascending; they are drawn with ``eos_probability`` in all, and never otherwise.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    eos_probability: float
    model_seed: int

    def prefixes(self, token_ids: Int32Array) -> Hashes:
        """The hash of each prefix: shape ``[n + 1]`` for ``token_ids`` of shape ``[n]``; the first is the empty one's."""
        sums = np.zeros(len(token_ids) + 1, dtype=np.uint64)
        np.cumsum(mix_tokens(token_ids, np.arange(len(token_ids))), out=sums[1:])
        return sums

    def salt(self, sampling: SamplingParams) -> int:
        """What tells this request's draws from another's with the same tokens: its seed, unless it is greedy."""
        seeds = [self.model_seed, sampling.seed if sampling.temperature > 0 else 0]
        return int(_mix(_mix(np.array(seeds[:1], dtype=np.uint64)) + np.array(seeds[1:], dtype=np.uint64))[0])

    def next_tokens(self, prefixes: Hashes, salts: Hashes) -> Int32Array:
        """The token after each prefix; all of shape ``[n]``."""
        draws = _mix(prefixes + salts)
        tokens = (draws % np.uint64(self.vocab_size - len(self.eos_token_ids))).astype(np.int32)
        for eos in self.eos_token_ids:
            tokens += tokens >= eos
        if self.eos_probability > 0:
            chances = _mix(draws)
            ends = (chances >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.eos_probability
            which = _mix(chances)[ends] % np.uint64(len(self.eos_token_ids))
            tokens[ends] = np.array(self.eos_token_ids, dtype=np.int32)[which.astype(np.intp)]
        return tokens

    def next_token_except(self, prefix: int, salt: int, excluded: frozenset[int]) -> int:
        """The first token not in ``excluded`` among the draws of a row, for rows below their ``min_tokens``.

        Raises:
            ValueError: none is left.
        """
        if not self.leaves_any(excluded):
            raise ValueError("every token is excluded")
        state = np.array([prefix], dtype=np.uint64)
        salts = np.array([salt], dtype=np.uint64)
        while (token := int(self.next_tokens(state, salts)[0])) in excluded:
            state = _mix(state + salts)
        return token

    def leaves_any(self, excluded: frozenset[int]) -> bool:
        """Whether a token that can be drawn is not in ``excluded``."""
        ends = frozenset(self.eos_token_ids)
        left = self.vocab_size - len(excluded | ends) if self.eos_probability < 1 else 0
        return left > 0 or (self.eos_probability > 0 and bool(ends - excluded))

    def prompt_logprobs(
        self, token_ids: Int32Array, start: int, end: int, num_alternatives: int
    ) -> PromptLogprobColumns:
        """Made-up log probabilities of the tokens at positions ``start + 1`` to ``end`` behind those before them.

        The token itself is the likeliest, its successors follow.
        """
        num_alternatives = min(num_alternatives, self.vocab_size)
        behind = self.prefixes(token_ids[: end + 1])[start + 2 : end + 2]
        best = ((behind >> np.uint64(32)).astype(np.float64) / -(2.0**32)).astype(np.float32)
        steps = np.arange(num_alternatives)
        top_ids = (token_ids[start + 1 : end + 1, None] + steps) % self.vocab_size
        return PromptLogprobColumns(
            start + 1, encode_floats(best), encode_column(top_ids), encode_floats(best[:, None] - steps)
        )

    def continuation(self, token_ids: list[int], num_tokens: int, sampling: SamplingParams) -> list[int]:
        """The next ``num_tokens`` tokens after a prompt: the oracle for whole generations.

        It honours ``min_tokens`` and does not stop at any token.
        """
        history = np.array(token_ids, dtype=np.int32)
        prefix = self.prefixes(history)[-1:]
        salts = np.array([self.salt(sampling)], dtype=np.uint64)
        excluded = frozenset(sampling.stop_token_ids)
        output: list[int] = []
        for position in range(len(token_ids), len(token_ids) + num_tokens):
            token = int(self.next_tokens(prefix, salts)[0])
            if len(output) < sampling.min_tokens and token in excluded:
                token = self.next_token_except(int(prefix[0]), int(salts[0]), excluded)
            output.append(token)
            prefix = prefix + mix_tokens(np.array([token], dtype=np.int32), np.array([position]))
        return output


class SimulatedBackend:
    """``ExecutorBackend`` without a model. Its steps take microseconds, so they need no thread of their own."""

    executes_inline: ClassVar[bool] = True

    def __init__(self) -> None:
        self._options = SimulatedOptions()
        self._pool: _SimulatedPool | None = None
        self._swap_us_per_block = 0.0
        self._move_time_us = 0
        self._poison: dict[int, Int32Array] = {}
        self._prompts: dict[int, NewRow] = {}

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``. ``config.model`` is a directory with a config.json, or just a name."""
        self._options, model, max_model_len, num_blocks, num_host_blocks = _settled(config)
        self._hash = TokenHash(
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            eos_probability=self._options.eos_probability,
            model_seed=config.seed & 0xFFFF_FFFF_FFFF_FFFF,
        )
        # The hash of every prefix of every row: one more than its tokens, and one for a token drawn at the very end.
        self._prefixes = np.zeros((config.max_num_seqs, max_model_len + 2), dtype=np.uint64)
        self._salts = np.zeros(config.max_num_seqs, dtype=np.uint64)
        self._last_tokens = np.zeros(config.max_num_seqs, dtype=np.int32)
        self._masked: dict[int, tuple[int, frozenset[int]]] = {}
        self._num_logprobs: dict[int, int] = {}
        self._pool = _SimulatedPool(num_blocks, num_host_blocks, config.block_size)
        self._swap_us_per_block = _swap_us_per_block(self._options, config.block_size)
        return BackendInfo(
            backend="simulated",
            device="none",
            dtype="none",
            model_name=Path(config.model).name or "simulated",
            model_fingerprint=f"simulated-{model.vocab_size}-{config.seed}-{self._options.eos_probability}",
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            max_num_rows=config.max_num_seqs,
            num_host_blocks=num_host_blocks,
            swap_us_per_block=self._swap_us_per_block if num_host_blocks else 0.0,
            supports_prompt_logprobs=True,
            max_speculative_tokens=_max_speculative_tokens(config, self._options),
        )

    @property
    def token_hash(self) -> TokenHash:
        """The next-token function in use; valid after ``open``."""
        return self._hash

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``ExecutorBackend.execute``.

        Raises:
            CacheMismatch: a block does not hold what its row's table says.
            StepOutOfMemoryError: injected by ``oom_over_tokens``.
            RuntimeError: injected by ``fail_on_token``.
            DeviceLostError: injected by ``lose_device_on_token``.
        """
        started = time.perf_counter()
        assert self._pool is not None
        move_time_us, self._move_time_us = self._move_time_us, 0
        for row in batch.finished_rows.tolist():
            self._masked.pop(row, None)
            self._num_logprobs.pop(row, None)
            self._prompts.pop(row, None)
            self._poison.pop(row, None)
        for new_row in batch.new_rows:
            self._admit(new_row)
        reached = batch.num_computed_tokens + batch.num_scheduled_tokens
        total = int(batch.num_scheduled_tokens.sum())
        if self._options.oom_over_tokens is not None and total > self._options.oom_over_tokens:
            raise StepOutOfMemoryError(total, f"simulated, over {self._options.oom_over_tokens}")
        self._inject(batch)
        if self._options.verify_kv:
            self._pool.check_partial_blocks(batch, self._prefixes)
            self._pool.write(batch, self._prefixes, total)
            self._pool.check_full_blocks(batch, self._prefixes)
        sampling = batch.samples != 0
        result = self._sample(batch.rows[sampling], reached[sampling])
        if batch.num_speculative_tokens is not None:
            result = self._speculate(batch, batch.num_speculative_tokens, reached, result)
            assert result.accepted_tokens is not None
            total += int(result.accepted_tokens[1].sum())
        microseconds = self._step_time_us(total, len(batch.rows), int(reached.sum()))
        if self._options.real_time:
            _wait_until(started + microseconds * 1e-6)
        return msgspec.structs.replace(
            result,
            device_time_us=round(microseconds),
            move_time_us=move_time_us,
            prompt_logprobs=self._report_prompts(batch) if self._prompts else (),
        )

    def _inject(self, batch: StepBatch) -> None:
        """Fail as the options say where the prompt of a row of the step has a token that does it."""
        options = self._options
        if options.fail_on_token is None and options.kill_on_token is None and options.lose_device_on_token is None:
            return
        for new_row in batch.new_rows:
            self._poison[new_row.row] = new_row.token_ids[: new_row.num_prompt_tokens]
        running = [self._poison[row] for row in batch.rows.tolist() if row in self._poison]
        present = set(np.unique(np.concatenate(running)).tolist()) if running else set()
        if options.kill_on_token in present:
            os.kill(os.getpid(), signal.SIGKILL)
        if options.lose_device_on_token in present:
            raise DeviceLostError(f"simulated: token {options.lose_device_on_token} was run")
        if options.fail_on_token in present:
            raise RuntimeError(f"simulated: token {options.fail_on_token} was run")

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """See ``ExecutorBackend.move_blocks``."""
        started = time.perf_counter()
        assert self._pool is not None
        self._pool.move(copies=copies, swap_out=swap_out, swap_in=swap_in)
        microseconds = self._swap_us_per_block * (swap_out.shape[1] + swap_in.shape[1])
        if self._options.real_time:
            _wait_until(started + microseconds * 1e-6)
        self._move_time_us = round(microseconds)

    def close(self) -> None:
        """See ``ExecutorBackend.close``."""
        self._pool = None

    def _admit(self, new_row: NewRow) -> None:
        row, sampling = new_row.row, new_row.sampling
        self._prefixes[row, : len(new_row.token_ids) + 1] = self._hash.prefixes(new_row.token_ids)
        self._last_tokens[row] = new_row.token_ids[-1]
        self._salts[row] = self._hash.salt(sampling)
        if sampling.min_tokens > 0 and sampling.stop_token_ids:
            end = new_row.num_prompt_tokens + sampling.min_tokens
            self._masked[row] = (end, frozenset(sampling.stop_token_ids))
        if sampling.logprobs != NO_LOGPROBS:
            self._num_logprobs[row] = sampling.logprobs
        if sampling.prompt_logprobs != NO_LOGPROBS:
            self._prompts[row] = new_row

    def _report_prompts(self, batch: StepBatch) -> tuple[RowPromptLogprobs, ...]:
        reports = []
        columns = (batch.rows, batch.num_computed_tokens, batch.num_scheduled_tokens)
        for row, start, count in zip(*(column.tolist() for column in columns), strict=True):
            wanted = self._prompts.get(row)
            end = 0 if wanted is None else min(start + count, wanted.num_prompt_tokens - 1)
            if wanted is not None and end > start:
                values = self._hash.prompt_logprobs(wanted.token_ids, start, end, wanted.sampling.prompt_logprobs)
                reports.append(RowPromptLogprobs(row, values))
        return tuple(reports)

    def _sample(self, rows: Int32Array, positions: Int32Array) -> StepResult:
        """Draw the token at ``positions`` for ``rows`` and append it to their histories."""
        prefixes = self._prefixes[rows, positions]
        tokens = self._hash.next_tokens(prefixes, self._salts[rows])
        messages: dict[int, str] = {}
        if self._masked:
            self._apply_masks(rows, positions, prefixes, tokens)
            messages |= dict.fromkeys(rows[tokens == ERRORED_ROW].tolist(), "simulated: every token is excluded")
        if self._options.nan_row_token is not None:
            failed = self._last_tokens[rows] == self._options.nan_row_token
            messages |= dict.fromkeys(rows[failed].tolist(), "simulated: the logits are NaN")
            tokens[failed] = ERRORED_ROW
        errors = tuple(RowError(row, message) for row, message in sorted(messages.items()))
        self._prefixes[rows, positions + 1] = prefixes + mix_tokens(tokens, positions)
        self._last_tokens[rows] = tokens
        logprobs = self._invent_logprobs(rows, tokens, prefixes) if self._num_logprobs else ()
        return StepResult(sampled_token_ids=tokens, logprobs=logprobs, errors=errors)

    def _speculate(
        self, batch: StepBatch, num_allowed: Int32Array, reached: Int32Array, first: StepResult
    ) -> StepResult:
        """Propose as many tokens as the step allows; chance, a function of the history, says how many are right."""
        assert self._pool is not None
        asked = num_allowed > 0
        rows, positions, counts = batch.rows[asked], reached[asked], num_allowed[asked]
        first_of = dict(zip(batch.rows[batch.samples != 0].tolist(), first.sampled_token_ids.tolist(), strict=True))
        is_drawn = np.array([first_of[row] != ERRORED_ROW for row in rows.tolist()])
        proposed = np.where(is_drawn, counts, 0).astype(np.int32)
        accepted = np.zeros_like(proposed)
        tokens = {row: [token] for row, token in first_of.items()}
        logprobs = list(first.logprobs)
        for place in range(int(proposed.max(initial=0))):
            going = np.flatnonzero((accepted == place) & (place < proposed))
            right = self._is_right(self._prefixes[rows[going], positions[going] + place + 1])
            going = going[right]
            last_tokens = self._last_tokens[rows[going]]
            more = self._sample(rows[going], positions[going] + place + 1)
            for entry, token, last in zip(
                going.tolist(), more.sampled_token_ids.tolist(), last_tokens.tolist(), strict=True
            ):
                if token == ERRORED_ROW:
                    self._last_tokens[rows[entry]] = last
                else:
                    accepted[entry] += 1
                    tokens[int(rows[entry])].append(token)
            logprobs += more.logprobs
        if self._options.verify_kv:
            self._write_proposals(batch, rows, positions, proposed, accepted)
        return StepResult(
            sampled_token_ids=np.array([token for drawn in tokens.values() for token in drawn], dtype=np.int32),
            logprobs=tuple(sorted(logprobs, key=lambda values: values.row)),
            errors=first.errors,
            accepted_tokens=np.stack((rows, proposed, accepted)),
        )

    def _is_right(self, prefixes: Hashes) -> NDArray[np.bool_]:
        """Whether the proposal that ends each history is the token that was drawn."""
        chances = _mix(prefixes ^ np.uint64(_PROPOSAL_SALT)) >> np.uint64(11)
        right: NDArray[np.bool_] = chances.astype(np.float64) * 2.0**-53 < self._options.speculative_acceptance
        return right

    def _write_proposals(
        self, batch: StepBatch, rows: Int32Array, positions: Int32Array, proposed: Int32Array, accepted: Int32Array
    ) -> None:
        """Put the proposals into the pool: the right ones as what they are, the others as something else."""
        assert self._pool is not None
        for row, start, count, num_right in zip(
            rows.tolist(), positions.tolist(), proposed.tolist(), accepted.tolist(), strict=True
        ):
            places = np.arange(start, start + count)
            hashes = self._prefixes[row, places + 1].copy()
            hashes[num_right:] = _mix(hashes[num_right:] + np.uint64(_PROPOSAL_SALT))
            self._pool.write_at(batch.block_table[row], places, hashes)

    def _apply_masks(self, rows: Int32Array, positions: Int32Array, prefixes: Hashes, tokens: Int32Array) -> None:
        for place, row in enumerate(rows.tolist()):
            end, excluded = self._masked.get(row, (0, frozenset()))
            if positions[place] < end and int(tokens[place]) in excluded:
                tokens[place] = self._next_except(int(prefixes[place]), int(self._salts[row]), excluded)

    def _next_except(self, prefix: int, salt: int, excluded: frozenset[int]) -> int:
        """The next token that is not excluded, ``ERRORED_ROW`` where all are: that row fails, and no other."""
        if not self._hash.leaves_any(excluded):
            return ERRORED_ROW
        return self._hash.next_token_except(prefix, salt, excluded)

    def _invent_logprobs(self, rows: Int32Array, tokens: Int32Array, prefixes: Hashes) -> tuple[RowLogprobs, ...]:
        """Deterministic values in the right form: the sampled token is the likeliest, its successors follow."""
        reported = []
        for row, token, prefix in zip(rows.tolist(), tokens.tolist(), prefixes.tolist(), strict=True):
            count = self._num_logprobs.get(row)
            if count is not None and token != ERRORED_ROW:
                best = -(prefix >> 32) / 2.0**32
                ids = tuple((token + step) % self._hash.vocab_size for step in range(count))
                reported.append(RowLogprobs(row, best, ids, tuple(best - step for step in range(count))))
        return tuple(reported)

    def _step_time_us(self, num_tokens: int, num_rows: int, num_context_tokens: int) -> float:
        options = self._options
        return (
            options.step_base_us
            + options.per_token_us * num_tokens
            + options.per_seq_us * num_rows
            + options.per_context_token_us * num_context_tokens
        )


class _SimulatedPool:
    """The KV pool: per slot the hash of the prefix that ends there, per block how many slots are written.

    Host blocks are held in the same way, and whether anything was ever swapped out to them.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots = np.zeros((num_blocks, block_size), dtype=np.uint64)
        self._filled = np.zeros(num_blocks, dtype=np.int32)
        self._host_slots = np.zeros((num_host_blocks, block_size), dtype=np.uint64)
        self._host_filled = np.zeros(num_host_blocks, dtype=np.int32)
        self._host_written = np.zeros(num_host_blocks, dtype=bool)

    def check_partial_blocks(self, batch: StepBatch, prefixes: Hashes) -> None:
        """Before the step writes: a block that a row goes on filling must hold that row's last computed token."""
        offsets = batch.num_computed_tokens % self._block_size
        places = np.flatnonzero(offsets)
        rows, ends, offsets = batch.rows[places], batch.num_computed_tokens[places], offsets[places]
        indices = ends // self._block_size
        blocks = batch.block_table[rows, indices]
        right = (self._slots[blocks, offsets - 1] == prefixes[rows, ends]) & (self._filled[blocks] >= offsets)
        if not right.all():
            first = int(right.argmin())
            raise _mismatch(rows[first], blocks[first], indices[first], ends[first] - offsets[first], ends[first])

    def check_full_blocks(self, batch: StepBatch, prefixes: Hashes) -> None:
        """After the step wrote: each full block that a row attends to must hold the prefix of that row.

        After, because a row may attend to a block of a shared prefix that another row fills in the same step.
        """
        num_full = batch.num_computed_tokens // self._block_size
        width = int(num_full.max(initial=0))
        if not width:
            return
        blocks = batch.block_table[batch.rows, :width]
        expected = prefixes[:, self._block_size : width * self._block_size + 1 : self._block_size][batch.rows]
        right = (self._slots[:, -1][blocks] == expected) & (self._filled[blocks] == self._block_size)
        # Shorter rows compare unused places too; what those say is ignored.
        wrong = ~right & (np.arange(width) < num_full[:, None])
        if wrong.any():
            place, index = (int(axis[0]) for axis in np.nonzero(wrong))
            start = index * self._block_size
            raise _mismatch(batch.rows[place], blocks[place, index], index, start, start + self._block_size)

    def write(self, batch: StepBatch, prefixes: Hashes, total: int) -> None:
        """Write the scheduled tokens of the batch, ``total`` in all."""
        rows: NDArray[np.integer] = batch.rows
        positions: NDArray[np.integer] = batch.num_computed_tokens
        if total != len(rows):
            counts = batch.num_scheduled_tokens
            first = np.cumsum(counts) - counts
            rows = np.repeat(rows, counts)
            positions = np.repeat(positions - first, counts) + np.arange(total)
        blocks = batch.block_table[rows, positions // self._block_size]
        offsets = positions % self._block_size
        self._slots[blocks, offsets] = prefixes[rows, positions + 1]
        # Where a block is written several times, numpy keeps the last value, which is the furthest offset.
        self._filled[blocks] = offsets + 1

    def write_at(self, table: Int32Array, positions: NDArray[np.integer], hashes: Hashes) -> None:
        """Write ``hashes`` at positions that follow each other, of the row with this block table."""
        blocks = table[positions // self._block_size]
        offsets = positions % self._block_size
        self._slots[blocks, offsets] = hashes
        self._filled[blocks] = offsets + 1

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """Move whole blocks: out to the host, in from the host, then within the pool."""
        blocks, host_blocks = swap_out
        self._host_slots[host_blocks] = self._slots[blocks]
        self._host_filled[host_blocks] = self._filled[blocks]
        self._host_written[host_blocks] = True
        host_blocks, blocks = swap_in
        empty = ~self._host_written[host_blocks]
        if empty.any():
            raise CacheMismatch(f"host block {host_blocks[empty][0]} is to be swapped in and holds nothing")
        self._slots[blocks] = self._host_slots[host_blocks]
        self._filled[blocks] = self._host_filled[host_blocks]
        sources, destinations = copies
        self._slots[destinations] = self._slots[sources]
        self._filled[destinations] = self._filled[sources]


def _mismatch(row: int, block: int, index: int, start: int, end: int) -> CacheMismatch:
    where = f"block {block}, number {index} of its table"
    return CacheMismatch(f"row {row}: {where}, does not hold its tokens {start} to {end - 1}")


class _Model(msgspec.Struct, frozen=True):
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_length: int


class _CheckpointConfig(msgspec.Struct, frozen=True):
    """What this backend reads of a checkpoint's config.json."""

    vocab_size: Annotated[int, msgspec.Meta(ge=2)]
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1)]
    eos_token_id: int | list[int] | None = None


def mix_tokens(token_ids: Int32Array, positions: NDArray[np.integer]) -> Hashes:
    """What each (position, token) adds to the hash of its history; shapes ``[n]``."""
    return _mix((positions.astype(np.uint64) << np.uint64(32)) | token_ids.astype(np.uint32).astype(np.uint64))


def _mix(values: Hashes) -> Hashes:
    """SplitMix64: add the golden gamma, then finalise."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Hashes = mixed ^ (mixed >> np.uint64(31))
    return result


def check(config: BackendConfig) -> None:
    """See that ``SimulatedBackend.open`` could take this.

    Raises:
        BackendConfigError: a setting cannot be honoured.
        ModelFilesError: the model directory has no config.json that can be read.
    """
    _settled(config)


def _settled(config: BackendConfig) -> tuple[SimulatedOptions, "_Model", int, int, int]:
    """The options, the model, tokens per request at most, blocks of the pool, and those on the host."""
    options = _parse_options(config.options)
    _check_at_least("block_size", config.block_size, 1)
    _check_at_least("max_num_seqs", config.max_num_seqs, 1)
    model = _describe_model(config.model, options)
    max_model_len = _max_model_len(config.max_model_len, model.context_length)
    num_blocks = _num_blocks(config, max_model_len)
    return options, model, max_model_len, num_blocks, _num_host_blocks(config, num_blocks)


def _parse_options(options: dict[str, str]) -> SimulatedOptions:
    fields = {field.name: field.type for field in msgspec.structs.fields(SimulatedOptions)}
    parsed = {}
    for name, text in options.items():
        if name not in fields:
            raise BackendConfigError(f"backend_options: {name!r:.64} is not known; allowed: {', '.join(fields)}")
        try:
            parsed[name] = msgspec.convert(text, fields[name], strict=False)
        except msgspec.ValidationError as error:
            raise BackendConfigError(f"backend_options: {name}={text!r:.64} is not allowed; {error}") from error
    result = SimulatedOptions(**parsed)
    if result.eos_token_id >= result.vocab_size:
        allowed = f"0 to {result.vocab_size - 1}"
        raise BackendConfigError(
            f"backend_options: eos_token_id={result.eos_token_id} is not allowed; allowed: {allowed}"
        )
    return result


def _describe_model(model: str, options: SimulatedOptions) -> _Model:
    """Read the checkpoint's config.json where ``model`` is a directory; else take the options."""
    path = Path(model)
    if not model or not (path.is_dir() or "/" in model):
        return _Model(options.vocab_size, (options.eos_token_id,), options.context_length)
    try:
        config = msgspec.convert(json.loads((path / "config.json").read_bytes()), _CheckpointConfig)
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"model: {model!r:.64}: its config.json cannot be read: {error}") from error
    eos = config.eos_token_id
    eos_token_ids = tuple(sorted(set(eos if isinstance(eos, list) else [] if eos is None else [eos])))
    if any(not 0 <= token < config.vocab_size for token in eos_token_ids) or len(eos_token_ids) >= config.vocab_size:
        raise ModelFilesError(f"model: {model!r:.64}: eos_token_id {eos!r:.64} is not within the vocabulary")
    return _Model(config.vocab_size, eos_token_ids, config.max_position_embeddings)


def _check_at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise BackendConfigError(f"{field}: {value} is not allowed; allowed: {least} or more")


def _max_model_len(asked: int, context_length: int) -> int:
    if asked < 0:
        raise BackendConfigError(
            f"max_model_len: {asked} is not allowed; allowed: 1 to {context_length}, or 0 for all of the context"
        )
    if asked > context_length:
        raise BackendConfigError(f"max_model_len: {asked} is over the model's context; allowed: 1 to {context_length}")
    return asked or context_length


def _num_blocks(config: BackendConfig, max_model_len: int) -> int:
    for_one = -(-max_model_len // config.block_size)
    if not config.num_kv_blocks:
        return max(for_one, min(for_one * config.max_num_seqs, _MAX_DEFAULT_BLOCKS))
    if config.num_kv_blocks < for_one:
        raise BackendConfigError(
            f"num_kv_blocks: {config.num_kv_blocks} cannot hold one request of {max_model_len} tokens; "
            f"allowed: {for_one} or more"
        )
    return config.num_kv_blocks


def _num_host_blocks(config: BackendConfig, num_blocks: int) -> int:
    if config.swap_space_mib == AUTOMATIC_SWAP_SPACE:
        return num_blocks
    space, block_bytes = config.swap_space_mib << 20, config.block_size * _TOKEN_BYTES
    if 0 < space < block_bytes:
        raise BackendConfigError(
            f"swap_space_mib: {config.swap_space_mib} is not allowed; one block takes {block_bytes} bytes, so allowed: "
            f"0 (no swapping), -1 (automatic), {-(-block_bytes >> 20)} or more"
        )
    return min(space // block_bytes, _MAX_HOST_BLOCKS)


def _max_speculative_tokens(config: BackendConfig, options: SimulatedOptions) -> int:
    """Whoever proposes, it is simulated."""
    wanted = 0 if config.speculation == "off" else config.num_speculative_tokens
    return options.max_speculative_tokens or wanted


def _swap_us_per_block(options: SimulatedOptions, block_size: int) -> float:
    if options.swap_us_per_block is not None:
        return options.swap_us_per_block
    return block_size * _TOKEN_BYTES / _SWAP_BYTES_PER_US


def _wait_until(deadline: float) -> None:
    """Sleep, then spin for the last moment, because a sleep may overshoot by the timer's slack."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN_SECONDS:
        time.sleep(remaining - _SPIN_SECONDS)
    while time.perf_counter() < deadline:
        pass
