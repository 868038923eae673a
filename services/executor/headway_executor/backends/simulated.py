"""The simulated backend: a hash draws tokens, a formula gives the time, a mirror checks the KV cache.

Owns: rows, injected failures. Must not know: epochs.
"""

import os
import signal
import time
from typing import ClassVar
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_executor.backend import (
    BackendConfig,
    DeviceLostError,
    NewRow,
    ReadAdapter,
    StepBatch,
    StepOutOfMemoryError,
    StepResult,
)
from headway_executor.simulated.pool import SimulatedPool
from headway_executor.simulated.settings import SimulatedOptions, settings_of
from headway_executor.simulated.token_hash import EMBEDDING_SIZE, Hashes, TokenHash, mix, mix_tokens
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import Int32Array, encode_floats
from headway_proto.pooling import POOL_LAST
from headway_proto.sampling import NO_LOGPROBS
from headway_proto.step import ERRORED_ROW, BackendInfo, RowError, RowLogprobs, RowPromptLogprobs, RowVector
from headway_proto.wording import shown

_SPIN_SECONDS = 100e-6
_PROPOSAL_SALT = 0xD1B54A32D192ED03


class SimulatedBackend:
    """An ``ExecutorBackend`` without a model. Its steps take microseconds and need no thread.

    As one of several stages it announces a lane for each, and takes its share of a step's time. Tokens are the same.
    """

    executes_inline: ClassVar[bool] = True
    every_rank_draws: ClassVar[bool] = True

    def __init__(self) -> None:
        self._options = SimulatedOptions()
        self._pool: SimulatedPool | None = None
        self._swap_us_per_block = 0.0
        self._move_time_us = 0
        self._poison: dict[int, Int32Array] = {}
        self._prompts: dict[int, NewRow] = {}
        self._pooled: dict[int, NewRow] = {}
        self._stale_rows: set[int] = set()
        self._adapters: dict[str, LoadedAdapter] = {}
        self._not_loaded: dict[int, str] = {}
        self._num_stages = 1

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``. ``config.model`` is a directory or just a name."""
        settings = settings_of(config)
        self._options = settings.options
        self._num_stages = config.place.pipeline_parallel
        self._hash = TokenHash(
            vocab_size=settings.vocab_size,
            eos_token_ids=settings.eos_token_ids,
            eos_probability=self._options.eos_probability,
            model_seed=config.seed & 0xFFFF_FFFF_FFFF_FFFF,
        )
        # The hash of every prefix of every row: one for each token, one for none, one for a token drawn at the very
        # end.
        self._prefixes = np.zeros((config.max_num_seqs, settings.max_model_len + 2), dtype=np.uint64)
        self._salts = np.zeros(config.max_num_seqs, dtype=np.uint64)
        self._last_tokens = np.zeros(config.max_num_seqs, dtype=np.int32)
        self._masked: dict[int, tuple[int, frozenset[int]]] = {}
        self._num_logprobs: dict[int, int] = {}
        self._pool = SimulatedPool(settings.num_blocks, settings.num_host_blocks, config.block_size, config.host_memory)
        self._swap_us_per_block = settings.swap_us_per_block
        return BackendInfo(
            backend="simulated",
            device="none",
            dtype="none",
            model_name=settings.model_name,
            model_fingerprint=f"simulated-{settings.vocab_size}-{config.seed}-{self._options.eos_probability}",
            num_blocks=settings.num_blocks,
            block_size=config.block_size,
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
            eos_token_ids=settings.eos_token_ids,
            max_num_rows=config.max_num_seqs,
            num_host_blocks=settings.num_host_blocks,
            swap_us_per_block=self._swap_us_per_block if settings.num_host_blocks else 0.0,
            supports_prompt_logprobs=True,
            max_speculative_tokens=settings.max_speculative_tokens if self._num_stages == 1 else 0,
            num_lanes=self._num_stages,
            supports_adapters=True,
            adapters=tuple([self.load_adapter(self.read_adapter(*named)) for named in config.adapters.items()]),
            embedding_size=EMBEDDING_SIZE,
            default_pooling=POOL_LAST,
        )

    @property
    def token_hash(self) -> TokenHash:
        """The function that draws tokens."""
        return self._hash

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``ExecutorBackend.execute``. Raises ``CacheMismatch`` and the injected errors."""
        started = time.perf_counter()
        assert self._pool is not None
        move_time_us, self._move_time_us = self._move_time_us, 0
        for row in batch.finished_rows.tolist():
            self._forget(row)
        for new_row in batch.new_rows:
            self._admit(new_row)
        self._stale_rows.update(batch.stale_rows.tolist())
        reached = batch.num_computed_tokens + batch.num_scheduled_tokens
        total = int(batch.num_scheduled_tokens.sum())
        if self._options.oom_over_tokens is not None and total > self._options.oom_over_tokens:
            raise StepOutOfMemoryError(total, f"simulated, over {self._options.oom_over_tokens}")
        self._inject(batch)
        if self._options.verify_kv:
            known = self._without_stale_rows(batch)
            self._pool.check_partial_blocks(known, self._prefixes)
            self._pool.write(batch, self._prefixes, total)
            self._pool.check_full_blocks(known, self._prefixes)
        sampling = batch.samples != 0
        result = self._sample(batch.rows[sampling], reached[sampling])
        if batch.num_speculative_tokens is not None:
            result = self._speculate(batch, batch.num_speculative_tokens, reached, result)
            assert result.accepted_tokens is not None
            total += int(result.accepted_tokens[1].sum())
        microseconds = self._step_time_us(total, len(batch.rows), int(reached.sum())) / self._num_stages
        if self._options.real_time:
            _wait_until(started + microseconds * 1e-6)
        return msgspec.structs.replace(
            result,
            device_time_us=round(microseconds),
            move_time_us=move_time_us,
            prompt_logprobs=self._report_prompts(batch) if self._prompts else (),
            vectors=self._make_vectors(batch.rows[sampling], result) if self._pooled else (),
        )

    def _inject(self, batch: StepBatch) -> None:
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
        self._move_time_us += round(microseconds)

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        started = time.perf_counter()
        assert self._pool is not None
        self._pool.load(contents, blocks)
        microseconds = self._swap_us_per_block * len(blocks)
        if self._options.real_time:
            _wait_until(started + microseconds * 1e-6)
        self._move_time_us += round(microseconds)

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """See ``AdapterBackend.read_adapter``. ``directory`` is just a name: no file is read."""
        return ReadAdapter(LoadedAdapter(name, directory, f"{crc32(directory.encode()):016x}"))

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``."""
        self._adapters[read.adapter.name] = read.adapter
        return read.adapter

    def unload_adapter(self, name: str) -> None:
        """See ``AdapterBackend.unload_adapter``."""
        self._adapters.pop(name, None)

    def close(self) -> None:
        """See ``ExecutorBackend.close``."""
        self._pool = None

    def _admit(self, new_row: NewRow) -> None:
        row, sampling = new_row.row, new_row.sampling
        self._prefixes[row, : len(new_row.token_ids) + 1] = self._hash.prefixes(new_row.token_ids)
        self._last_tokens[row] = new_row.token_ids[-1]
        self._salts[row] = self._hash.salt(sampling)
        if new_row.adapter:
            # Keys and values are others, so the blocks' contents are.
            self._prefixes[row, : len(new_row.token_ids) + 1] += np.uint64(crc32(new_row.adapter.encode()) << 16)
            if new_row.adapter not in {adapter.identity for adapter in self._adapters.values()}:
                self._not_loaded[row] = f"simulated: adapter {shown(new_row.adapter)} is not loaded"
        if sampling.min_tokens > 0 and sampling.stop_token_ids:
            end = new_row.num_prompt_tokens + sampling.min_tokens
            self._masked[row] = (end, frozenset(sampling.stop_token_ids))
        if sampling.logprobs != NO_LOGPROBS:
            self._num_logprobs[row] = sampling.logprobs
        if sampling.prompt_logprobs != NO_LOGPROBS:
            self._prompts[row] = new_row
        if new_row.pooling:
            self._pooled[row] = new_row

    def _forget(self, row: int) -> None:
        self._stale_rows.discard(row)
        of_rows = (self._masked, self._num_logprobs, self._prompts, self._pooled, self._poison, self._not_loaded)
        for columns in of_rows:
            columns.pop(row, None)

    def _without_stale_rows(self, batch: StepBatch) -> StepBatch:
        if not self._stale_rows:
            return batch
        known = ~np.isin(batch.rows, list(self._stale_rows))
        return msgspec.structs.replace(
            batch, rows=batch.rows[known], num_computed_tokens=batch.num_computed_tokens[known]
        )

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

    def _make_vectors(self, sampling: Int32Array, result: StepResult) -> tuple[RowVector, ...]:
        failed = {error.row for error in result.errors}
        return tuple(
            [
                RowVector(row, encode_floats(self._hash.vector(self._pooled[row].token_ids, self._pooled[row].pooling)))
                for row in sampling.tolist()
                if row in self._pooled and row not in failed
            ]
        )

    def _sample(self, rows: Int32Array, positions: Int32Array) -> StepResult:
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
        if self._not_loaded:
            messages |= {row: self._not_loaded[row] for row in rows.tolist() if row in self._not_loaded}
            tokens[np.isin(rows, list(self._not_loaded))] = ERRORED_ROW
        errors = tuple(RowError(row, message) for row, message in sorted(messages.items()))
        self._prefixes[rows, positions + 1] = prefixes + mix_tokens(tokens, positions)
        self._last_tokens[rows] = tokens
        logprobs = self._invent_logprobs(rows, tokens, prefixes) if self._num_logprobs else ()
        return StepResult(sampled_token_ids=tokens, logprobs=logprobs, errors=errors)

    def _speculate(
        self, batch: StepBatch, num_allowed: Int32Array, reached: Int32Array, first: StepResult
    ) -> StepResult:
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
        chances = mix(prefixes ^ np.uint64(_PROPOSAL_SALT)) >> np.uint64(11)
        right: NDArray[np.bool_] = chances.astype(np.float64) * 2.0**-53 < self._options.speculative_acceptance
        return right

    def _write_proposals(
        self, batch: StepBatch, rows: Int32Array, positions: Int32Array, proposed: Int32Array, accepted: Int32Array
    ) -> None:
        assert self._pool is not None
        for row, start, count, num_right in zip(
            rows.tolist(), positions.tolist(), proposed.tolist(), accepted.tolist(), strict=True
        ):
            places = np.arange(start, start + count)
            hashes = self._prefixes[row, places + 1].copy()
            hashes[num_right:] = mix(hashes[num_right:] + np.uint64(_PROPOSAL_SALT))
            self._pool.write_at(batch.block_table[row], places, hashes)

    def _apply_masks(self, rows: Int32Array, positions: Int32Array, prefixes: Hashes, tokens: Int32Array) -> None:
        for place, row in enumerate(rows.tolist()):
            end, excluded = self._masked.get(row, (0, frozenset()))
            if positions[place] < end and int(tokens[place]) in excluded:
                prefix, salt = int(prefixes[place]), int(self._salts[row])
                is_possible = self._hash.leaves_any(excluded)
                tokens[place] = self._hash.next_token_except(prefix, salt, excluded) if is_possible else ERRORED_ROW

    def _invent_logprobs(self, rows: Int32Array, tokens: Int32Array, prefixes: Hashes) -> tuple[RowLogprobs, ...]:
        """The sampled token is the likeliest."""
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


def _wait_until(deadline: float) -> None:
    """Spin at the end, because a sleep may overshoot."""
    remaining = deadline - time.perf_counter()
    if remaining > _SPIN_SECONDS:
        time.sleep(remaining - _SPIN_SECONDS)
    while time.perf_counter() < deadline:
        pass
