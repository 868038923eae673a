"""A model that is open on a device: one step, from its diff to what it drew.

Owns: the order of a step's launches, and what is built of their results. Must not know: how a model is opened, epochs,
how a kernel computes.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np

from headway_executor.backend import NO_ADAPTERS, BackendConfigError, ReadAdapter, StepBatch, StepResult
from headway_executor.constraints.rows import ConstrainedRows
from headway_executor.device_moves import Mark as MovesMark
from headway_executor.gpu.block_mover import BlockMover
from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.device_sampler import DrawnTokens
from headway_executor.gpu.draft import DeviceDraftPass
from headway_executor.gpu.readback import Readback
from headway_executor.gpu.running_rows import RunningRows
from headway_executor.gpu.runtime import Mark
from headway_executor.gpu.speculation import DeviceSpeculation, Drafted, LookedUp, SpeculativeStep
from headway_executor.gpu.step_columns import StepShape, shape_of
from headway_executor.gpu.step_log import StepLog
from headway_executor.host_pool import HostBytes
from headway_executor.models.adapters import ModelAdapters
from headway_executor.prompt_logprobs import PromptReports
from headway_executor.refusals import Refusals, with_refusals
from headway_executor.speculation.draft_model import DraftModel
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.step import RowPromptLogprobs


class OpenModel:
    """Runs the steps of ``parts``, whose pools are open; ``mover`` has the moves of their blocks."""

    def __init__(self, parts: DeviceParts, mover: BlockMover, constraints: ConstrainedRows) -> None:
        config = parts.config
        self.parts = parts
        self.mover = mover
        adapters = None if parts.adapters is None else parts.adapters.adapters
        self._running = RunningRows(Refusals(parts.vocab_size), parts.sampler, constraints, adapters)
        self._prompts = PromptReports()
        self._speculation = _speculation_over(parts)
        self._readback = Readback() if parts.runtime.is_cuda else None
        self._swap_ends: Readback | None = None
        self._last_ended: Mark | None = None
        self._step_log = StepLog(Path(config.options["step_log"])) if "step_log" in config.options else None

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """See ``ExecutorBackend.execute``."""
        self.mover.before_step(batch)
        started = self.parts.runtime.mark()
        try:
            build = self._run(batch)
        finally:
            number = self.mover.after_step()
        ended, before = self.parts.runtime.mark(), self._last_ended
        self._last_ended = ended

        def timed() -> StepResult:
            device_time_us = ended.microseconds_since(started)
            if self._step_log is not None:
                idle_us = None if before is None else started.microseconds_since(before)
                self._step_log.add(batch, device_time_us=device_time_us, idle_us=idle_us)
            return msgspec.structs.replace(
                build(), device_time_us=device_time_us, move_time_us=self.mover.move_time_us(number)
            )

        return timed() if self._readback is None else self._readback.when_reached(ended, timed)

    def _when_moved(self, swapped_out: MovesMark | None) -> Future[None] | None:
        """The future of a swap-out; a thread of its own waits, because what follows must not delay results."""
        if swapped_out is None:
            return None
        if self._swap_ends is None:
            self._swap_ends = Readback()
        return self._swap_ends.when_reached(self.parts.runtime.mark(), swapped_out.synchronize)

    def _run(self, batch: StepBatch) -> Callable[[], StepResult]:
        """The returned function builds the result once the device is done."""
        self._begin(batch)
        if not len(batch.rows):
            return _nothing_drawn
        step: SpeculativeStep | None = None
        if self._speculation is not None and batch.num_speculative_tokens is not None:
            step = self._speculation.propose(batch, frozenset(self._running.refusals.among(batch.rows)))
            batch = step.batch
        shape = shape_of(batch)
        sampled_rows = batch.rows[batch.samples != 0]
        has_drawn = self._may_draw(shape, sampled_rows)
        self.parts.launch(batch, shape, draws=has_drawn)
        prompts = self._read_prompts(batch)
        if not shape.num_sampled:
            return lambda: StepResult(sampled_token_ids=EMPTY_COLUMN, prompt_logprobs=prompts())
        drawn = self.parts.sampler.drawn(sampled_rows) if has_drawn else self._sampled(sampled_rows)
        if self._speculation is not None:
            self._speculation.proposer.draw(batch, drawn, self.parts.runtime.mark())
        refused = self._running.refusals.among(sampled_rows)

        def build() -> StepResult:
            token_ids, logprobs, errors = drawn.collect()
            rows, result = sampled_rows, StepResult(sampled_token_ids=token_ids, logprobs=logprobs, errors=errors)
            if step is not None:
                rows, result = step.result(token_ids, logprobs, errors)
            token_ids, errors = with_refusals(rows, result.sampled_token_ids, result.errors, refused)
            return msgspec.structs.replace(
                result, sampled_token_ids=token_ids, errors=errors, prompt_logprobs=prompts()
            )

        return build

    def _begin(self, batch: StepBatch) -> None:
        """Take in what the step changes."""
        num_tokens = int(batch.num_scheduled_tokens.sum())
        if len(batch.finished_rows):
            self._running.leave(batch.finished_rows)
        new_rows = self._running.enter(batch.new_rows) if batch.new_rows else ()
        self.parts.rows.apply(new_rows, batch.new_blocks)
        self._prompts.begin_step(batch)
        if self._speculation is not None:
            self._speculation.proposer.follow(batch, new_rows)
        if num_tokens > self.parts.config.max_num_batched_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens; this backend was opened for {self.parts.config.max_num_batched_tokens}"
            )

    def _may_draw(self, shape: StepShape, sampled_rows: Int32Array) -> bool:
        """Whether a launch may have the draws behind it: the host has nothing to say in between."""
        return (
            not shape.has_chunks
            and shape.num_sampled == shape.num_rows
            and self._running.are_unmasked()
            and self.parts.sampler.is_greedy(sampled_rows)
        )

    def _read_prompts(self, batch: StepBatch) -> Callable[[], tuple[RowPromptLogprobs, ...]]:
        parts, chunks = self.parts, self._prompts.chunks(batch)
        if not chunks:
            return _no_prompts
        counts = batch.num_scheduled_tokens
        return parts.prompt_reader.launch(parts.target.decoder, parts.rows.token_store, chunks, counts)

    def _sampled(self, rows: Int32Array) -> DrawnTokens:
        parts = self.parts
        logits = parts.target.decoder.logits(len(rows))
        masks = self._running.masks(rows)
        drawn = parts.sampler.sample(logits, rows, parts.upload.views, parts.rows.token_store, masks)
        if len(masks):
            self._running.expect(parts.runtime.mark(), masks, drawn)
        return drawn

    @property
    def adapters(self) -> ModelAdapters:
        """Those of its rows. Raises ``BackendConfigError``: it takes none."""
        if self.parts.adapters is None:
            raise BackendConfigError(NO_ADAPTERS)
        return self.parts.adapters.adapters

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``. Before the first one, steps of rows with adapters are recorded."""
        adapters = self.adapters
        # Behind the steps that are launched, and before the next one sends its own.
        self.parts.record(adapted=True)
        return adapters.load(read)

    def close(self) -> None:
        """Give back threads, files and pinned memory; call it once."""
        self._running.close()
        self.mover.close()
        if self._swap_ends is not None:
            self._swap_ends.close()
        if self._readback is not None:
            self._readback.close()
        if self._step_log is not None:
            self._step_log.close()

    def move(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Future[None] | None:
        """See ``ExecutorBackend.move_blocks``."""
        if self._speculation is not None:
            self._speculation.proposer.forget_blocks(np.concatenate((copies[1], swap_in[1])))
        return self._when_moved(self.mover.move(copies=copies, swap_out=swap_out, swap_in=swap_in))

    def load(self, contents: HostBytes, blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        if self._speculation is not None:
            self._speculation.proposer.forget_blocks(blocks)
        self.mover.load(contents, blocks)


def _speculation_over(parts: DeviceParts) -> DeviceSpeculation | None:
    config, store = parts.config, parts.rows.token_store
    if config.speculation == "off":
        return None
    proposer: LookedUp | Drafted = LookedUp(parts.runtime, store)
    if parts.draft is not None:
        run = DeviceDraftPass(parts.draft, parts.upload, parts.sampler, config.max_num_batched_tokens)
        draft = DraftModel(
            run,
            max_model_len=parts.draft_model_len,
            num_blocks=parts.target.num_blocks,
            block_size=config.block_size,
        )
        proposer = Drafted(parts.runtime, store, draft)
    return DeviceSpeculation(proposer, most_rows=parts.most_rows, most_tokens=config.max_num_batched_tokens)


def _nothing_drawn() -> StepResult:
    return StepResult(sampled_token_ids=EMPTY_COLUMN)


def _no_prompts() -> tuple[RowPromptLogprobs, ...]:
    return ()
