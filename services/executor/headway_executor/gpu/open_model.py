"""A model that is open on a device: its memory, its rows, one step.

Owns: the order of a step's launches. Must not know: how a model is opened, epochs, how a kernel computes.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import torch

from headway_executor.backend import NO_ADAPTERS, BackendConfig, BackendConfigError, NewRow, StepBatch, StepResult
from headway_executor.constraints.rows import ConstrainedRows, StepMasks
from headway_executor.device_moves import Mark as MovesMark
from headway_executor.gpu.block_mover import open_pool
from headway_executor.gpu.decoder import Decoder
from headway_executor.gpu.device_rows import DeviceRows
from headway_executor.gpu.device_sampler import DeviceSampler, DrawnTokens
from headway_executor.gpu.device_weights import QuantizationKind
from headway_executor.gpu.graphs import LaunchSize, StepGraphs, StepSizes
from headway_executor.gpu.loading import load_decoder
from headway_executor.gpu.prompt_reader import PromptReader
from headway_executor.gpu.readback import Readback
from headway_executor.gpu.runtime import Mark, Runtime
from headway_executor.gpu.step_columns import StepShape, shape_of
from headway_executor.gpu.step_log import StepLog
from headway_executor.gpu.step_upload import StepUpload
from headway_executor.kv_pool import CODES, num_pool_blocks, stored_block
from headway_executor.model_settings import ModelSettings
from headway_executor.models.adapted import StepAdapters
from headway_executor.models.adapters import ModelAdapters
from headway_executor.models.loading import TensorSource
from headway_executor.prompt_logprobs import PromptReports
from headway_executor.refusals import Refusals, with_refusals
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.sampling import SamplingParams
from headway_proto.step import RowPromptLogprobs

_QUANTIZATIONS: dict[str, QuantizationKind | None] = {"none": None, "int8": "int8", "int4": "int4", "fp8": "fp8"}
_ALIGNMENT = 16
_POOL_SHARE = 0.94
"""The pool's share of the memory that the largest step leaves; the rest is for the graphs."""


class OpenModel:
    """A model on a device. ``checkpoint`` is read at once; ``adapters`` None: the model takes none."""

    def __init__(
        self,
        config: BackendConfig,
        settings: ModelSettings,
        checkpoint: TensorSource,
        runtime: Runtime,
        constraints: ConstrainedRows,
        adapters: StepAdapters | None,
    ) -> None:
        model_config, dtype, max_model_len = settings
        self.runtime = runtime
        self._constraints = constraints
        self._adapters = adapters
        self._unread: deque[tuple[Mark, StepMasks, DrawnTokens]] = deque()
        self._config = config
        self._model_config = model_config
        self._dtype = dtype
        self._max_model_len = max_model_len
        max_num_rows = config.max_num_seqs
        self._upload = StepUpload(runtime, max_num_rows)
        self._rows = DeviceRows(
            runtime, max_num_rows=max_num_rows, max_model_len=max_model_len, block_size=config.block_size
        )
        self._sampler = DeviceSampler(runtime, vocab_size=model_config.vocab_size, max_num_rows=max_num_rows)
        self._refusals = Refusals(model_config.vocab_size)
        self._prompts = PromptReports()
        self._prompt_reader = PromptReader(runtime, vocab_size=model_config.vocab_size, max_num_rows=max_num_rows)
        weights = load_decoder(
            model_config,
            checkpoint,
            max_model_len=max_model_len,
            dtype=dtype,
            device=runtime.device,
            quantization=_QUANTIZATIONS[config.quantization],
            adapters=adapters,
            max_num_tokens=config.max_num_batched_tokens,
            progress=lambda done, total: config.progress("loading layers", done, total),
        )
        max_num_tokens = config.max_num_batched_tokens
        self._decoder = Decoder(
            model_config,
            weights,
            self._rows,
            self._upload.views,
            max_num_tokens=max_num_tokens,
            dtype=dtype,
            is_coded=config.kv_cache_dtype == CODES,
        )
        self._readback = Readback() if runtime.is_cuda else None
        self._swap_ends: Readback | None = None
        self._last_ended: Mark | None = None
        self._step_log = StepLog(Path(config.options["step_log"])) if "step_log" in config.options else None
        self._sizes = self._step_sizes(recorded=False)

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return self._pool.shape[1]

    def prepare(self, *, record_graphs: bool) -> None:
        """The largest step leaves the memory for the pool."""
        config = self._config
        self._open_pool(1, swap_space_mib=0)
        self._graphs = StepGraphs(self.runtime)
        if self.runtime.is_cuda:
            config.progress("trying the largest step", 0, 1)
            self.try_largest_step()
        num_blocks = num_pool_blocks(
            config,
            max_model_len=self._max_model_len,
            block_bytes=self._pool.nbytes,
            device=self.runtime.device,
            device_share=_POOL_SHARE,
        )
        self._open_pool(num_blocks, swap_space_mib=config.swap_space_mib)
        if record_graphs:
            self._upload.clear()  # The recording may run the step.
            self._sizes = self._step_sizes(recorded=True)
            self._graphs.record(
                self._forward,
                self._sizes.recorded(),
                lambda done, total: config.progress("recording graphs", done, total),
            )
            self._take_memory_again()

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """See ``ExecutorBackend.execute``."""
        self.mover.before_step(batch)
        started = self.runtime.mark()
        try:
            build = self._run(batch)
        finally:
            number = self.mover.after_step()
        ended, before = self.runtime.mark(), self._last_ended
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

    def when_moved(self, swapped_out: MovesMark | None) -> Future[None] | None:
        """The future of a swap-out; a thread of its own waits, because what follows must not delay results."""
        if swapped_out is None:
            return None
        if self._swap_ends is None:
            self._swap_ends = Readback()
        return self._swap_ends.when_reached(self.runtime.mark(), swapped_out.synchronize)

    def _run(self, batch: StepBatch) -> Callable[[], StepResult]:
        """The returned function builds the result once the device is done."""
        if len(batch.finished_rows):
            self._forget(batch.finished_rows)
        new_rows = self._admit(batch.new_rows) if batch.new_rows else ()
        self._rows.apply(new_rows, batch.new_blocks)
        self._prompts.begin_step(batch)
        shape = shape_of(batch)
        if shape.num_tokens > self._config.max_num_batched_tokens:
            raise ValueError(
                f"a step of {shape.num_tokens} tokens; this backend was opened for {self._config.max_num_batched_tokens}"
            )
        if not shape.num_rows:
            return _nothing_drawn
        sampled_rows = batch.rows[batch.samples != 0]
        has_drawn = self._may_draw(shape, sampled_rows)
        self._launch(batch, shape, draws=has_drawn)
        chunks = self._prompts.chunks(batch)
        prompts = _no_prompts
        if chunks:
            counts = batch.num_scheduled_tokens
            prompts = self._prompt_reader.launch(self._decoder, self._rows.token_store, chunks, counts)
        if not shape.num_sampled:
            return lambda: StepResult(sampled_token_ids=EMPTY_COLUMN, prompt_logprobs=prompts())
        drawn = self._sampler.drawn(sampled_rows) if has_drawn else self._sampled(sampled_rows)
        refused = self._refusals.among(sampled_rows)

        def build() -> StepResult:
            token_ids, logprobs, errors = drawn.collect()
            token_ids, errors = with_refusals(sampled_rows, token_ids, errors, refused)
            return StepResult(sampled_token_ids=token_ids, logprobs=logprobs, errors=errors, prompt_logprobs=prompts())

        return build

    def _may_draw(self, shape: StepShape, sampled_rows: Int32Array) -> bool:
        """Whether a launch may have the draws behind it: the host has nothing to say in between."""
        return (
            not shape.has_chunks
            and shape.num_sampled == shape.num_rows
            and not self._constraints.are_any()
            and self._sampler.is_greedy(sampled_rows)
        )

    def _sampled(self, rows: Int32Array) -> DrawnTokens:
        logits = self._decoder.logits(len(rows))
        masks = self._masks(rows)
        drawn = self._sampler.sample(logits, rows, self._upload.views, self._rows.token_store, masks)
        if len(masks):
            self._unread.append((self.runtime.mark(), masks, drawn))
        return drawn

    def loaded_adapters(self) -> ModelAdapters:
        """Those that rows may name. Raises ``BackendConfigError``: the model takes none."""
        if self._adapters is None:
            raise BackendConfigError(NO_ADAPTERS)
        return self._adapters.adapters

    def _forget(self, rows: Int32Array) -> None:
        self._refusals.forget(rows)
        self._sampler.forget(rows)
        self._constraints.forget(rows)
        if self._adapters is not None:
            self._adapters.adapters.leave(rows)

    def _admit(self, new_rows: tuple[NewRow, ...]) -> tuple[NewRow, ...]:
        admitted = tuple(
            [msgspec.structs.replace(new, token_ids=self._refusals.admit(new.row, new.token_ids)) for new in new_rows]
        )
        self._refusals.add(self._sampler.add_rows(admitted))
        for new in admitted:
            self._constraints.add(new.row, new.sampling.constraint, new.token_ids[new.num_prompt_tokens :])
            why_not = "" if self._adapters is None else self._adapters.adapters.enter(new.row, new.adapter)
            if why_not:
                self._refusals.add({new.row: why_not})
        return admitted

    def _masks(self, sampled_rows: Int32Array) -> StepMasks:
        """Wait for earlier draws of constrained rows, while the device runs this step."""
        while self._unread:
            reached, masks, drawn = self._unread.popleft()
            reached.wait()
            masks.advance(drawn.token_ids())
        masks = self._constraints.masks(sampled_rows)
        self._refusals.add(masks.failures)
        return masks

    def close(self) -> None:
        """Give back threads, files and pinned memory; call it once."""
        self._constraints.close()
        self.mover.close()
        if self._swap_ends is not None:
            self._swap_ends.close()
        if self._readback is not None:
            self._readback.close()
        if self._step_log is not None:
            self._step_log.close()

    def _launch(self, batch: StepBatch, shape: StepShape, *, draws: bool = False) -> None:
        size = self._sizes.of(shape, draws=draws)
        self._upload.send(batch, shape, size.num_rows)
        if self._adapters is not None:
            self._adapters.begin(np.repeat(batch.rows, batch.num_scheduled_tokens), self.runtime.device)
        # No graph has what adapters add.
        has_adapters = self._adapters is not None and bool(self._adapters.groups)
        if has_adapters or not self._graphs.launch(size):
            self._forward(size)

    def _step_sizes(self, *, recorded: bool) -> StepSizes:
        return StepSizes(
            max_num_rows=self._config.max_num_seqs,
            max_num_tokens=self._config.max_num_batched_tokens,
            recorded=recorded,
            alignment=_ALIGNMENT if self.runtime.is_cuda else 1,
        )

    def _forward(self, size: LaunchSize) -> None:
        self._decoder.run(
            self._pool,
            size.num_tokens,
            size.num_rows,
            has_decodes=size.has_decodes,
            has_chunks=size.has_chunks,
        )
        if size.draws:
            logits = self._decoder.logits(size.num_rows)
            self._sampler.draw_likeliest(logits, self._upload.views, self._rows.token_store)

    def _open_pool(self, num_blocks: int, *, swap_space_mib: int) -> None:
        config = self._model_config
        shape = (2 * config.num_kv_heads, self._config.block_size, config.head_dim)
        self._pool, self.mover = open_pool(
            self.runtime,
            stored_block(self._config.kv_cache_dtype, shape, self._dtype),
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            swap_space_mib=swap_space_mib,
            host_memory=self._config.host_memory,
        )

    def _take_memory_again(self) -> None:
        """Recording gives back what torch kept of the largest step, which the first steps would have to take anew."""
        try:
            self.try_largest_step()
        except torch.OutOfMemoryError:
            self._config.warn("beside its graphs, the device has no memory for the largest step: steps will be smaller")

    def try_largest_step(self) -> None:
        """Run the largest step in block 0: this compiles, and torch keeps its memory."""
        config = self._config
        counts = _largest_step(config.max_num_batched_tokens, config.max_num_seqs, self._max_model_len)
        rows = np.arange(len(counts), dtype=np.int32)
        batch = StepBatch(
            step=0,
            finished_rows=EMPTY_COLUMN,
            new_rows=(),
            new_blocks=np.empty((2, 0), dtype=np.int32),
            rows=rows,
            num_scheduled_tokens=counts,
            num_computed_tokens=np.zeros_like(counts),
            samples=np.ones_like(counts),
            block_table=np.empty((0, 0), dtype=np.int32),
        )
        shape = shape_of(batch)
        new = NewRow(
            row=0,
            token_ids=np.zeros(1, dtype=np.int32),
            num_prompt_tokens=1,
            num_computed_tokens=0,
            sampling=SamplingParams(),
        )
        self._rows.apply((new,), np.zeros((2, 1), dtype=np.int32))
        self._launch(batch, shape)
        self._prompt_reader.try_largest(self._decoder, self._rows.token_store, shape.num_tokens)
        self._sampler.try_largest(
            self._decoder.logits(shape.num_sampled), rows, self._upload.views, self._rows.token_store
        )
        self.runtime.mark().wait()


def _nothing_drawn() -> StepResult:
    return StepResult(sampled_token_ids=EMPTY_COLUMN)


def _no_prompts() -> tuple[RowPromptLogprobs, ...]:
    return ()


def _largest_step(max_num_tokens: int, max_num_rows: int, max_model_len: int) -> Int32Array:
    num_rows = min(max_num_rows, max_num_tokens)
    num_tokens = min(max_num_tokens, num_rows * max_model_len)
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
    counts[: num_tokens % num_rows] += 1
    return counts
