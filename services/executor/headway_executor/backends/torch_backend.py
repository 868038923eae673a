"""The reference backend: any supported model in torch, on a CPU or a CUDA device.

Owns: opening a model, token ids, one step. Must not know: epochs, the forward pass.

The option ``kernels`` chooses torch operators ("eager") or the CPU kernels ("compiled", float32 or int8). "auto" takes
the kernels if it can.
"""

import math
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import BackendConfig, BackendConfigError, StepBatch, StepResult
from headway_executor.constraints.rows import ConstrainedRows, compiler_for
from headway_executor.device_errors import translating
from headway_executor.host_pool import num_host_blocks
from headway_executor.kv_pool import KvPool, block_bytes_of, num_pool_blocks
from headway_executor.model_settings import (
    ModelSettings,
    device_of,
    draft_settings_of,
    settings_of,
)
from headway_executor.models.compiled import CompiledModel, library_for, load_compiled
from headway_executor.models.config import ModelConfig
from headway_executor.models.eager import EagerModel, load_eager
from headway_executor.models.forward import ForwardPass, Int64Array, StepRows, last_tokens
from headway_executor.models.loading import as_stored, check_tensors
from headway_executor.prompt_logprobs import PromptReports, run_ahead
from headway_executor.refusals import Refusals, with_refusals
from headway_executor.sampler import SampledTokens, Sampler
from headway_executor.setting_checks import TORCH, check_settings, option_of
from headway_executor.speculation.draft_model import DraftModel
from headway_executor.speculation.ngram import PromptLookup
from headway_executor.speculation.proposer import Asked, Proposer
from headway_executor.speculation.verification import asked_of, counting, num_accepted, result_of, with_proposals
from headway_executor.weights import Checkpoint
from headway_kernels.cpu.library import CpuLibrary
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo, RowError, RowLogprobs, RowPromptLogprobs

_PARAMETERS_PER_THREAD = 16_000_000


class TorchBackend:
    """The ``ExecutorBackend`` for torch."""

    def __init__(self) -> None:
        self._model: _OpenModel | None = None
        self._move_time_us = 0

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``."""
        device = device_of(config)
        check_settings(config, TORCH)
        _check_threads(config.num_threads)
        directory = Path(config.model)
        settings = settings_of(config, device)
        draft: ModelSettings | None = None
        block_bytes_beside = 0
        if config.speculation == "draft":
            draft = draft_settings_of(config, settings.model_config, settings.max_model_len)
            block_bytes_beside = block_bytes_of(draft.model_config, config.block_size, settings.dtype)
        with torch.inference_mode(), Checkpoint(directory) as checkpoint:
            settings = _checked(checkpoint, settings, config)
            model_config, dtype, max_model_len = settings
            forward = _load(config, settings, checkpoint, device, block_bytes_beside)
            fingerprint = checkpoint.fingerprint()
            compiler = compiler_for(
                directory, vocab_size=model_config.vocab_size, eos_token_ids=model_config.eos_token_ids
            )
            constraints = ConstrainedRows(compiler)
            sampler = Sampler(vocab_size=model_config.vocab_size, max_num_rows=config.max_num_seqs, device=device)
            proposer: Proposer | None = PromptLookup() if config.speculation == "ngram" else None
            if draft is not None:
                proposer = _draft_proposer(config, draft._replace(dtype=dtype), forward.pool, device, sampler)
            self._model = _OpenModel(config, forward, max_model_len, device, sampler, constraints, proposer)
            self._model.warm_up()
            swap_us_per_block = forward.pool.measure_swap_us()
        pool = forward.pool
        return BackendInfo(
            backend="torch",
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            model_name=directory.resolve().name,
            model_fingerprint=fingerprint,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            max_num_rows=config.max_num_seqs,
            num_host_blocks=pool.num_host_blocks,
            swap_us_per_block=swap_us_per_block,
            supports_prompt_logprobs=True,
            supports_constraints=constraints.is_supported,
            max_speculative_tokens=0 if config.speculation == "off" else config.num_speculative_tokens,
        )

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``ExecutorBackend.execute``."""
        move_time_us, self._move_time_us = self._move_time_us, 0
        with translating(batch), torch.inference_mode():
            result = self._opened.execute(batch)
        return msgspec.structs.replace(result, move_time_us=move_time_us) if move_time_us else result

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """See ``ExecutorBackend.move_blocks``."""
        started = time.perf_counter_ns()
        with translating(), torch.inference_mode():
            self._opened.move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in)
        self._move_time_us += (time.perf_counter_ns() - started) // 1000

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        started = time.perf_counter_ns()
        with translating(), torch.inference_mode():
            self._opened.load_blocks(contents, blocks)
        self._move_time_us += (time.perf_counter_ns() - started) // 1000

    def close(self) -> None:
        """See ``ExecutorBackend.close``."""
        if self._model is not None:
            self._model.constraints.close()
            self._model = None

    @property
    def _opened(self) -> "_OpenModel":
        if self._model is None:
            raise RuntimeError("the backend is not open")
        return self._model


class _OpenModel:
    def __init__(
        self,
        config: BackendConfig,
        forward: ForwardPass,
        max_model_len: int,
        device: torch.device,
        sampler: Sampler,
        constraints: ConstrainedRows,
        proposer: Proposer | None,
    ) -> None:
        self.forward = forward
        self.constraints = constraints
        self._device = device
        self._sampler = sampler
        self._token_ids = torch.zeros((config.max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        self._refusals = Refusals(sampler.vocab_size)
        self._prompts = PromptReports()
        self._proposer = proposer

    def warm_up(self) -> None:
        """The first request must not pay one-time costs."""
        num_tokens = min(self.forward.pool.block_size, self._token_ids.shape[1] - 1)
        self._sampler.add_row(0, SamplingParams(temperature=0.0), num_tokens)
        for computed, new in ((0, num_tokens - 1), (num_tokens - 1, 1)):
            if new:
                first = np.zeros(1, dtype=np.int64)
                rows = StepRows(first, first + new, first + computed, np.zeros((1, 1), np.int32), first + new - 1)
                self.forward.run(rows, self._token_ids)

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        self.forward.pool.move(copies=copies, swap_out=swap_out, swap_in=swap_in)
        if self._proposer is not None:
            self._proposer.forget_blocks(np.concatenate((copies[1], swap_in[1])))

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        self.forward.pool.load_blocks(contents, blocks)
        if self._proposer is not None:
            self._proposer.forget_blocks(blocks)

    def execute(self, batch: StepBatch) -> StepResult:
        started = time.perf_counter_ns()
        self._refusals.forget(batch.finished_rows)
        self.constraints.forget(batch.finished_rows)
        for new in batch.new_rows:
            self._add_row(new.row, new.token_ids, new.num_prompt_tokens, new.sampling)
        self._prompts.begin_step(batch)
        if self._proposer is not None:
            self._proposer.follow(batch)
        if not len(batch.rows):
            return StepResult(sampled_token_ids=EMPTY_COLUMN)
        result = self._run(batch) if batch.num_speculative_tokens is None else self._speculate(batch)
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        return msgspec.structs.replace(result, device_time_us=elapsed_us)

    def _run(self, batch: StepBatch) -> StepResult:
        drawn: Int32Array = EMPTY_COLUMN
        logprobs: tuple[RowLogprobs, ...] = ()
        errors: tuple[RowError, ...] = ()
        sampling = np.flatnonzero(batch.samples)
        sampled_rows = batch.rows[sampling]
        rows = StepRows(
            numbers=batch.rows.astype(np.int64),
            num_new=batch.num_scheduled_tokens.astype(np.int64),
            num_computed=batch.num_computed_tokens.astype(np.int64),
            tables=batch.block_table[batch.rows],
            wanted=last_tokens(batch.num_scheduled_tokens.astype(np.int64))[sampling],
        )
        logits, prompt_logprobs = self._forward(batch, rows)
        if len(sampling):
            assert logits is not None
            numbers, positions = rows.numbers[sampling], (rows.num_computed + rows.num_new)[sampling]
            sampled, drawn = self._draw(logits, numbers, positions)
            self._token_ids[numbers, positions] = sampled.token_ids.clamp(min=0).to(torch.int32)
            logprobs, errors = sampled.logprobs, sampled.errors
        drawn, errors = with_refusals(sampled_rows, drawn, errors, self._refusals.among(sampled_rows))
        return StepResult(sampled_token_ids=drawn, logprobs=logprobs, errors=errors, prompt_logprobs=prompt_logprobs)

    def _speculate(self, batch: StepBatch) -> StepResult:
        assert batch.num_speculative_tokens is not None
        assert self._proposer is not None
        asked = asked_of(batch, batch.num_speculative_tokens, frozenset(self._refusals.among(batch.rows)))
        counts = self._proposer.propose(asked, self._token_ids)
        if not counts.any():
            none = np.zeros((3, len(counts)), dtype=np.int32)
            none[0] = asked.numbers
            return msgspec.structs.replace(self._run(batch), accepted_tokens=none)
        proposals = self._proposals(asked, counts)
        rows, draws = with_proposals(batch, asked, counts)
        logits, prompt_logprobs = self._forward(batch, rows)
        assert logits is not None
        sampled, drawn = self._draw(logits, draws.numbers, draws.positions)
        accepted = num_accepted(drawn, draws, asked, proposals, counts)
        kept = counting(draws, asked, accepted)
        right = sampled.token_ids[torch.from_numpy(kept).to(self._device)].clamp(min=0).to(torch.int32)
        self._token_ids[draws.numbers[kept], draws.positions[kept]] = right
        self._proposer.settle(asked, counts, accepted)
        result = result_of(sampled, kept, draws, asked, counts, accepted)
        drawn, errors = with_refusals(
            draws.numbers[kept].astype(np.int32),
            result.sampled_token_ids,
            result.errors,
            self._refusals.among(batch.rows),
        )
        return msgspec.structs.replace(result, sampled_token_ids=drawn, errors=errors, prompt_logprobs=prompt_logprobs)

    def _forward(self, batch: StepBatch, rows: StepRows) -> tuple[Tensor | None, tuple[RowPromptLogprobs, ...]]:
        reports: tuple[RowPromptLogprobs, ...] = ()
        chunks = self._prompts.chunks(batch)
        if chunks:
            vocab_size = self._sampler.vocab_size
            rows, reports = run_ahead(self.forward, rows, self._token_ids, chunks, vocab_size=vocab_size)
        return (self.forward.run(rows, self._token_ids) if len(rows.numbers) else None), reports

    def _draw(self, logits: Tensor, numbers: Int64Array, positions: Int64Array) -> tuple[SampledTokens, Int32Array]:
        """Only an unconstrained row may occur twice."""
        masks = self.constraints.masks(numbers.astype(np.int32))
        self._refusals.add(masks.failures)
        rows, places = (torch.from_numpy(column).to(self._device) for column in (numbers, positions))
        sampled = self._sampler.sample(logits, rows, places, self._token_ids, masks)
        drawn: Int32Array = sampled.token_ids.to("cpu", torch.int32).numpy()
        masks.advance(drawn)
        return sampled, drawn

    def _proposals(self, asked: Asked, counts: Int64Array) -> Int32Array:
        owner = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
        rows, positions = asked.numbers[owner], asked.num_tokens[owner] + places
        stored: Int32Array = (
            self._token_ids[torch.from_numpy(rows).to(self._device), torch.from_numpy(positions).to(self._device)]
            .cpu()
            .numpy()
        )
        return stored

    def _add_row(self, row: int, token_ids: Int32Array, num_prompt_tokens: int, sampling: SamplingParams) -> None:
        token_ids = self._refusals.admit(row, token_ids)
        self.constraints.add(row, sampling.constraint, token_ids[num_prompt_tokens:])
        self._token_ids[row, : len(token_ids)] = torch.from_numpy(token_ids.astype(np.int32))
        self._sampler.add_row(row, sampling, num_prompt_tokens)


def _check_threads(num_threads: int) -> None:
    if num_threads < 0:
        raise BackendConfigError(f"num_threads {num_threads} is not allowed; allowed: 0 (as the model needs) or more")


def _threads_that_pay(num_parameters: int) -> int:
    """In a small model, threads wait longer than they work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, num_parameters // _PARAMETERS_PER_THREAD))


def _load(
    config: BackendConfig,
    settings: ModelSettings,
    checkpoint: Checkpoint,
    device: torch.device,
    block_bytes_beside: int = 0,
) -> ForwardPass:
    """The draft model's blocks take ``block_bytes_beside``."""
    model_config, dtype, max_model_len = settings
    num_threads = config.num_threads or _threads_that_pay(checkpoint.num_parameters)
    library = _kernels(config, model_config, dtype, device)
    if library is None:
        torch.set_num_threads(num_threads)
        decoder = load_eager(model_config, checkpoint, max_model_len=max_model_len, dtype=dtype, device=device)
        block_shape: tuple[int, ...] = (2 * model_config.num_kv_heads, config.block_size, model_config.head_dim)
        return EagerModel(model_config, decoder, _pool(config, settings, block_shape, device, block_bytes_beside))
    # Torch's threads spin for a while after each operator; this would disturb the threads of the kernels.
    torch.set_num_threads(1)
    compiled = load_compiled(
        model_config,
        checkpoint,
        library,
        quantization=config.quantization,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_threads=num_threads,
    )
    return CompiledModel(compiled, _pool(config, settings, (compiled.block_floats,), device, block_bytes_beside))


def _draft_proposer(
    config: BackendConfig, draft: ModelSettings, pool: KvPool, device: torch.device, sampler: Sampler
) -> DraftModel:
    own = msgspec.structs.replace(
        config,
        model=config.draft_model,
        num_kv_blocks=pool.num_blocks,
        swap_space_mib=0,
        host_memory=lambda *_: None,
    )
    with Checkpoint(Path(config.draft_model)) as checkpoint:
        forward = _load(own, _checked(checkpoint, draft, own), checkpoint, device)
    return DraftModel(forward, sampler, draft.max_model_len)


def _checked(checkpoint: Checkpoint, settings: ModelSettings, config: BackendConfig) -> ModelSettings:
    check_tensors(settings.model_config, checkpoint)
    return settings._replace(model_config=as_stored(settings.model_config, checkpoint, config.warn))


def _kernels(
    config: BackendConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CpuLibrary | None:
    asked = option_of(config, TORCH, "kernels")
    library = None if asked == "eager" else library_for(model_config, device, dtype)
    if library is None:
        missing = "needs the CPU kernels: installed, on a processor they know, dtype float32, device cpu"
        if asked == "compiled":
            raise BackendConfigError(f"backend_options kernels 'compiled' {missing}; allowed here: auto, eager")
        if config.quantization == "int8":
            raise BackendConfigError(f"quantization 'int8' {missing}; allowed here: none")
    return library


def _pool(
    config: BackendConfig,
    settings: ModelSettings,
    block_shape: tuple[int, ...],
    device: torch.device,
    block_bytes_beside: int,
) -> KvPool:
    model_config, dtype, max_model_len = settings
    block_bytes = model_config.num_layers * math.prod(block_shape) * dtype.itemsize
    num_blocks = num_pool_blocks(
        config, max_model_len=max_model_len, block_bytes=block_bytes + block_bytes_beside, device=device
    )
    return KvPool(
        num_layers=model_config.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        block_shape=block_shape,
        dtype=dtype,
        device=device,
        num_host_blocks=num_host_blocks(
            swap_space_mib=config.swap_space_mib, block_bytes=block_bytes, num_device_blocks=num_blocks, device=device
        ),
        host_memory=config.host_memory,
    )
