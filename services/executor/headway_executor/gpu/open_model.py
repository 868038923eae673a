"""A model that is open on a device: its memory, its rows, one step.

Owns: the order of a step's launches. Must not know: how a model is opened, epochs, how a kernel computes.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from headway_executor.backend import NO_ADAPTERS, BackendConfig, BackendConfigError, StepBatch, StepResult
from headway_executor.constraints.rows import ConstrainedRows
from headway_executor.device_moves import Mark as MovesMark
from headway_executor.gpu.block_mover import BlockMover
from headway_executor.gpu.chunk_library import OPTION, OWN_KERNEL, LibraryChoice
from headway_executor.gpu.decoder import Decoder
from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.gpu.device_model import DeviceModel
from headway_executor.gpu.device_rows import DeviceRows
from headway_executor.gpu.device_sampler import DeviceSampler, DrawnTokens
from headway_executor.gpu.device_weights import Activations, QuantizationKind
from headway_executor.gpu.draft import DeviceDraftPass
from headway_executor.gpu.graphs import LaunchSize, most_recorded_tokens
from headway_executor.gpu.largest_step import any_row, largest_step
from headway_executor.gpu.loading import load_decoder
from headway_executor.gpu.prompt_reader import PromptReader
from headway_executor.gpu.readback import Readback
from headway_executor.gpu.running_rows import RunningRows
from headway_executor.gpu.runtime import Mark, Runtime
from headway_executor.gpu.speculation import DeviceSpeculation, Drafted, LookedUp, SpeculativeStep, most_rows_of
from headway_executor.gpu.step_columns import StepShape, shape_of
from headway_executor.gpu.step_log import StepLog
from headway_executor.gpu.step_upload import StepUpload
from headway_executor.gpu.tuning_file import AUTO, tunings_of
from headway_executor.host_pool import HostBytes
from headway_executor.kv_pool import CODES, num_pool_blocks, stored_block
from headway_executor.model_settings import ModelSettings
from headway_executor.models.adapters import ModelAdapters
from headway_executor.models.loading import TensorSource
from headway_executor.prompt_logprobs import PromptReports
from headway_executor.refusals import Refusals, with_refusals
from headway_executor.setting_checks import TRITON, option_of
from headway_executor.speculation.draft_model import DraftModel
from headway_kernels.gpu.skinny_linear import MOST_TOKENS
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.step import RowPromptLogprobs

_QUANTIZATIONS: dict[str, QuantizationKind | None] = {"none": None, "int8": "int8", "int4": "int4", "fp8": "fp8"}
_ACTIVATIONS: dict[str, Activations] = {"auto": "auto", "exact": "exact", "fp8": "fp8"}
_POOL_SHARE = 0.94
"""The pool's share of the memory that the largest step leaves; the rest is for the graphs."""


class ModelFiles(NamedTuple):
    """A model to load: what is known of it, and its tensors, which are read at once."""

    settings: ModelSettings
    weights: TensorSource


class OpenModel:
    """A model on a device; ``adapters`` None: it takes none; ``draft`` None: no model proposes tokens."""

    def __init__(
        self,
        config: BackendConfig,
        files: ModelFiles,
        runtime: Runtime,
        constraints: ConstrainedRows,
        adapters: ModelAdapters | None,
        draft: ModelFiles | None,
    ) -> None:
        model_config, _, max_model_len = files.settings
        self.runtime = runtime
        self._config = config
        self._max_model_len = max_model_len
        self._tunings = tunings_of(config.options.get("tuning", AUTO), runtime.device)
        max_num_rows, vocab_size = config.max_num_seqs, model_config.vocab_size
        num_proposals = 0 if config.speculation == "off" else config.num_speculative_tokens
        self._most_rows = most_rows_of(max_num_rows, config.max_num_batched_tokens, num_proposals)
        self._adapters: DeviceAdapters | None = None
        if adapters is not None:
            most_tokens = most_recorded_tokens(self._most_rows, config.max_num_batched_tokens)
            self._adapters = DeviceAdapters(
                adapters, model_config, runtime, max_num_rows=self._most_rows, most_tokens=most_tokens
            )
        self._upload = StepUpload(runtime, self._most_rows)
        self._rows = DeviceRows(
            runtime, max_num_rows=max_num_rows, max_model_len=max_model_len, block_size=config.block_size
        )
        self._sampler = DeviceSampler(
            runtime, vocab_size=vocab_size, max_num_rows=max_num_rows, max_num_draws=self._most_rows
        )
        self._running = RunningRows(Refusals(vocab_size), self._sampler, constraints, adapters)
        self._prompts = PromptReports()
        self._prompt_reader = PromptReader(runtime, vocab_size=vocab_size, max_num_rows=max_num_rows)
        self._target = self._loaded(files, self._most_rows, self._adapters, option_of(config, TRITON, OPTION))
        self._draft_model_len = 0 if draft is None else draft.settings.max_model_len
        self._draft = None if draft is None else self._loaded(draft, max_num_rows, None, OWN_KERNEL)
        self._speculation: DeviceSpeculation | None = None
        self._readback = Readback() if runtime.is_cuda else None
        self._swap_ends: Readback | None = None
        self._last_ended: Mark | None = None
        self._step_log = StepLog(Path(config.options["step_log"])) if "step_log" in config.options else None

    @property
    def num_blocks(self) -> int:
        """Of the pool."""
        return self._target.pool.shape[1]

    def prepare(self, *, record_graphs: bool) -> None:
        """The largest step leaves the memory for the pool."""
        config = self._config
        self._open_pools(1, swap_space_mib=0)
        if self.runtime.is_cuda:
            config.progress("trying the largest step", 0, 1)
            self.try_largest_step()
        num_blocks = num_pool_blocks(
            config,
            max_model_len=self._max_model_len,
            block_bytes=sum(model.block_bytes for model in self._both),
            device=self.runtime.device,
            device_share=_POOL_SHARE,
        )
        self._open_pools(num_blocks, swap_space_mib=config.swap_space_mib)
        self._speculation = self._speculating()
        if record_graphs:
            self._upload.clear()  # The recording may run the step.
            for model in self._both:
                model.record(self._said_recording)
            if self._adapters is not None and self._adapters.adapters.loaded:
                self._target.record_adapted(self._said_recording)
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

    def _when_moved(self, swapped_out: MovesMark | None) -> Future[None] | None:
        """The future of a swap-out; a thread of its own waits, because what follows must not delay results."""
        if swapped_out is None:
            return None
        if self._swap_ends is None:
            self._swap_ends = Readback()
        return self._swap_ends.when_reached(self.runtime.mark(), swapped_out.synchronize)

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
        self._launch(batch, shape, draws=has_drawn)
        chunks = self._prompts.chunks(batch)
        prompts = _no_prompts
        if chunks:
            counts = batch.num_scheduled_tokens
            prompts = self._prompt_reader.launch(self._target.decoder, self._rows.token_store, chunks, counts)
        if not shape.num_sampled:
            return lambda: StepResult(sampled_token_ids=EMPTY_COLUMN, prompt_logprobs=prompts())
        drawn = self._sampler.drawn(sampled_rows) if has_drawn else self._sampled(sampled_rows)
        if self._speculation is not None:
            self._speculation.proposer.draw(batch, drawn, self.runtime.mark())
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
        self._rows.apply(new_rows, batch.new_blocks)
        self._prompts.begin_step(batch)
        if self._speculation is not None:
            self._speculation.proposer.follow(batch, new_rows)
        if num_tokens > self._config.max_num_batched_tokens:
            raise ValueError(
                f"a step of {num_tokens} tokens; this backend was opened for {self._config.max_num_batched_tokens}"
            )

    def _may_draw(self, shape: StepShape, sampled_rows: Int32Array) -> bool:
        """Whether a launch may have the draws behind it: the host has nothing to say in between."""
        return (
            not shape.has_chunks
            and shape.num_sampled == shape.num_rows
            and self._running.are_unmasked()
            and self._sampler.is_greedy(sampled_rows)
        )

    def _sampled(self, rows: Int32Array) -> DrawnTokens:
        logits = self._target.decoder.logits(len(rows))
        masks = self._running.masks(rows)
        drawn = self._sampler.sample(logits, rows, self._upload.views, self._rows.token_store, masks)
        if len(masks):
            self._running.expect(self.runtime.mark(), masks, drawn)
        return drawn

    def load_adapter(self, name: str, directory: str) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``. Before the first one, steps of rows with adapters are recorded."""
        if self._adapters is None:
            raise BackendConfigError(NO_ADAPTERS)
        # Behind the steps that are launched, and before the next one sends its own.
        self._upload.clear()
        self._adapters.clear()
        self._target.record_adapted(self._said_recording)
        return self._adapters.adapters.load(name, directory)

    def unload_adapter(self, name: str) -> None:
        """See ``AdapterBackend.unload_adapter``."""
        if self._adapters is None:
            raise BackendConfigError(NO_ADAPTERS)
        self._adapters.adapters.unload(name)

    def _said_recording(self, done: int, total: int) -> None:
        self._config.progress("recording graphs", done, total)

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

    def _launch(self, batch: StepBatch, shape: StepShape, *, draws: bool = False) -> None:
        size = self._target.size_of(shape, draws=draws)
        if self._adapters is not None:
            self._adapters.begin(np.repeat(batch.rows, batch.num_scheduled_tokens), size.num_tokens)
            size = size._replace(is_adapted=self._adapters.are_any)
        self._upload.send(batch, shape, size.num_rows)
        self._target.launch(size, batch)

    @property
    def _both(self) -> tuple[DeviceModel, ...]:
        return (self._target,) if self._draft is None else (self._target, self._draft)

    def _loaded(
        self, files: ModelFiles, most_rows: int, adapters: DeviceAdapters | None, chunk_attention: str
    ) -> DeviceModel:
        """A model over the rows and columns of this one."""
        config, (model_config, dtype, max_model_len) = self._config, files.settings
        weights = load_decoder(
            model_config,
            files.weights,
            max_model_len=max_model_len,
            dtype=dtype,
            tunings=self._tunings,
            quantization=_QUANTIZATIONS[config.quantization],
            activations=_ACTIVATIONS[option_of(config, TRITON, "activations")],
            adapters=adapters,
            max_num_tokens=config.max_num_batched_tokens,
            progress=lambda done, total: config.progress("loading layers", done, total),
        )
        is_coded = config.kv_cache_dtype == CODES
        tuning = self._tunings.of_attention(model_config.head_dim, dtype, is_coded=is_coded)
        decoder = Decoder(
            model_config,
            weights,
            self._rows,
            self._upload.views,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_rows=most_rows,
            dtype=dtype,
            tuning=tuning,
            long_attention=LibraryChoice(
                model_config,
                dtype,
                tuning,
                self.runtime.device,
                block_size=config.block_size,
                is_coded=is_coded,
                said=config.warn,
            ).of(chunk_attention, config.max_num_batched_tokens),
        )
        shape = (2 * model_config.num_kv_heads, config.block_size, model_config.head_dim)
        sampler, views, store = self._sampler, self._upload.views, self._rows.token_store
        return DeviceModel(
            self.runtime,
            decoder,
            stored_block(config.kv_cache_dtype, shape, dtype),
            most_rows=most_rows,
            most_tokens=config.max_num_batched_tokens,
            draw=lambda logits: sampler.draw_likeliest(logits, views, store),
            adapters=adapters,
        )

    def _open_pools(self, num_blocks: int, *, swap_space_mib: int) -> None:
        self.mover: BlockMover = self._target.open_pool(
            num_blocks, swap_space_mib=swap_space_mib, host_memory=self._config.host_memory
        )
        if self._draft is not None:
            # Its blocks are never moved: what it has lost it computes again.
            self._draft.open_pool(num_blocks, swap_space_mib=0, host_memory=lambda *_: None)

    def _speculating(self) -> DeviceSpeculation | None:
        config, store = self._config, self._rows.token_store
        if config.speculation == "off":
            return None
        proposer: LookedUp | Drafted = LookedUp(self.runtime, store)
        if self._draft is not None:
            run = DeviceDraftPass(self._draft, self._upload, self._sampler, config.max_num_batched_tokens)
            draft = DraftModel(
                run,
                max_model_len=self._draft_model_len,
                num_blocks=self.num_blocks,
                block_size=config.block_size,
            )
            proposer = Drafted(self.runtime, store, draft)
        return DeviceSpeculation(proposer, most_rows=self._most_rows, most_tokens=config.max_num_batched_tokens)

    def _take_memory_again(self) -> None:
        """Recording gives back what torch kept of the largest step, which the first steps would have to take anew."""
        try:
            self.try_largest_step()
        except torch.OutOfMemoryError:
            self._config.warn("beside its graphs, the device has no memory for the largest step: steps will be smaller")

    def try_largest_step(self) -> None:
        """Run the largest step in block 0: this compiles, and torch keeps its memory."""
        config = self._config
        batch = largest_step(
            most_tokens=config.max_num_batched_tokens,
            most_rows=self._most_rows,
            max_num_seqs=config.max_num_seqs,
            max_model_len=self._max_model_len,
        )
        shape = shape_of(batch)
        self._rows.apply((any_row(),), np.zeros((2, 1), dtype=np.int32))
        if self._target.decoder.has_long_attention:
            self._try_long_chunk()
        self._launch(batch, shape)
        if self._draft is not None:
            self._draft.forward(self._draft.size_of(shape._replace(num_rows=min(shape.num_rows, config.max_num_seqs))))
        if self._adapters is not None:
            self._try_adapters()
        decoder = self._target.decoder
        self._prompt_reader.try_largest(decoder, self._rows.token_store, shape.num_tokens)
        self._sampler.try_largest(
            decoder.logits(shape.num_sampled), batch.rows, self._upload.views, self._rows.token_store
        )
        self.runtime.mark().wait()

    def _try_long_chunk(self) -> None:
        """Among many rows, no chunk is long."""
        most_tokens, max_num_seqs = self._config.max_num_batched_tokens, self._config.max_num_seqs
        batch = largest_step(
            most_tokens=most_tokens, most_rows=1, max_num_seqs=max_num_seqs, max_model_len=self._max_model_len
        )
        self._launch(batch, shape_of(batch))

    def _try_adapters(self) -> None:
        """Behind the gates and ups of few tokens to which an adapter adds lies no activation, which takes other kernels."""
        for num_tokens in {1, min(MOST_TOKENS, self._config.max_num_batched_tokens)}:
            num_rows = min(num_tokens, self._most_rows)
            size = LaunchSize(num_tokens, num_rows, has_decodes=True, has_chunks=False, is_adapted=True)
            self._target.forward(size)


def _nothing_drawn() -> StepResult:
    return StepResult(sampled_token_ids=EMPTY_COLUMN)


def _no_prompts() -> tuple[RowPromptLogprobs, ...]:
    return ()
