"""The reference backend: any supported model in torch, on a CPU or a CUDA device.

Owns: opening a model, token ids, one step. Must not know: epochs, the forward pass.

The option ``kernels`` chooses torch operators ("eager") or the CPU kernels ("compiled", float32 or int8). "auto" takes
the kernels if it can.
"""

import time
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.backend import (
    NO_ADAPTERS,
    BackendConfig,
    BackendConfigError,
    NewRow,
    ReadAdapter,
    StepBatch,
    StepResult,
)
from headway_executor.backends.following import FollowingModel
from headway_executor.backends.joining import joined, num_lanes_of, parting_on_error, slowest
from headway_executor.backends.torch_encoder import OpenEncoder, open_encoder
from headway_executor.backends.torch_loading import checked, draft_block_bytes, draft_proposer, load
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.host.device_errors import translating
from headway_executor.models.adapters import ModelAdapters
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.bert import is_encoder
from headway_executor.models.forward import ForwardPass, Int64Array, StepRows, step_rows
from headway_executor.models.model_settings import (
    ModelSettings,
    device_of,
    draft_settings_of,
    require_full_precision,
    settings_of,
)
from headway_executor.models.sentence_pooling import default_pooling
from headway_executor.ranks.group import RankGroup
from headway_executor.sampling.constraints.rows import ConstrainedRows, compiler_for
from headway_executor.sampling.drawn_tokens import DrawnTokensOut, drawn_channel
from headway_executor.sampling.pooling import PooledPart, PooledRows, whole_result, without
from headway_executor.sampling.prompt_logprobs import PromptReports, run_ahead
from headway_executor.sampling.refusals import Refusals, with_refusals
from headway_executor.sampling.sampler import SampledTokens, Sampler
from headway_executor.sampling.speculation.ngram import PromptLookup
from headway_executor.sampling.speculation.proposer import Asked, Proposer
from headway_executor.sampling.speculation.told import Telling, Told, proposals_channel
from headway_executor.sampling.speculation.verification import (
    asked_of,
    counting,
    num_accepted,
    proposal_places,
    result_of,
    with_proposals,
)
from headway_executor.setting_checks import TORCH, check_settings
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.pooling import POOL_LAST
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo, RowError, RowLogprobs, RowPromptLogprobs


class TorchBackend:
    """The ``ExecutorBackend`` for torch."""

    def __init__(self) -> None:
        self._model: _OpenModel | FollowingModel | OpenEncoder | None = None
        self._group: RankGroup | None = None
        self._move_time_us = 0

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``."""
        device = device_of(config)
        check_settings(config, TORCH)
        require_full_precision()
        directory = Path(config.model)
        if is_encoder(directory):
            self._model, info = open_encoder(config, device)
            return info
        settings = settings_of(config, device)
        draft: ModelSettings | None = None
        block_bytes_beside = 0
        if config.speculation == "draft" and config.place.rank == 0:
            draft = draft_settings_of(config, settings.model_config, settings.max_model_len)
            block_bytes_beside = draft_block_bytes(config, draft, settings.dtype, device)
        self._group = joined(config, TORCH)
        with (
            parting_on_error(self._group),
            torch.inference_mode(),
            Checkpoint(directory, config.progress, config.place.size) as checkpoint,
        ):
            settings = checked(checkpoint, settings, config)
            model_config, dtype, max_model_len = settings
            forward = load(config, settings, checkpoint, device, self._group, block_bytes_beside)
            fingerprint = checkpoint.fingerprint()
            for name, adapter in config.adapters.items():
                assert forward.adapters is not None  # the settings are checked
                forward.adapters.load(forward.adapters.read(name, adapter))
            if forward.has_slow_start:
                _warm_up(forward, max_model_len)
            swap_us_per_block = slowest(forward.pool.measure_swap_us(), self._group)
            supports_constraints = False
            if config.place.rank == 0:
                opened = _drawing(config, settings, forward, device, self._group, draft)
                supports_constraints = opened.constraints.is_supported
                self._model = opened
            else:
                assert self._group is not None
                self._model = _following(config, settings, forward, self._group)
        pool, adapters, states = forward.pool, forward.adapters, forward.states
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
            max_num_rows=config.max_num_seqs if states is None else states.num_rows,
            num_host_blocks=pool.num_host_blocks,
            swap_us_per_block=swap_us_per_block,
            supports_prompt_logprobs=True,
            supports_constraints=supports_constraints,
            max_speculative_tokens=0 if config.speculation == "off" else config.num_speculative_tokens,
            num_lanes=num_lanes_of(config),
            supports_adapters=adapters is not None,
            adapters=() if adapters is None else adapters.loaded,
            embedding_size=0 if model_config.names.projections else model_config.hidden_size,
            default_pooling=default_pooling(directory, POOL_LAST),
            generates=model_config.has_head,
            keeps_states=states is not None,
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

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """See ``AdapterBackend.read_adapter``."""
        return self._adapters.read(name, directory)

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``."""
        with translating():
            return self._adapters.load(read)

    def unload_adapter(self, name: str) -> None:
        """See ``AdapterBackend.unload_adapter``."""
        self._adapters.unload(name)

    def close(self) -> None:
        """See ``ExecutorBackend.close``."""
        if isinstance(self._model, _OpenModel):
            self._model.constraints.close()
        self._model = None
        if self._group is not None:
            self._group.close()
        self._group = None

    @property
    def group(self) -> RankGroup | None:
        """The other ranks of this executor, once open."""
        return self._group

    @property
    def _adapters(self) -> ModelAdapters:
        opened = self._opened
        if isinstance(opened, OpenEncoder) or opened.forward.adapters is None:
            raise BackendConfigError(NO_ADAPTERS)
        return opened.forward.adapters

    @property
    def _opened(self) -> "_OpenModel | FollowingModel | OpenEncoder":
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
        others: DrawnTokensOut | None,
    ) -> None:
        self.forward = forward
        self._adapters = forward.adapters
        self.constraints = constraints
        self._device = device
        self._sampler = sampler
        self._token_ids = torch.zeros((config.max_num_seqs, max_model_len + 1), dtype=torch.int32, device=device)
        self._refusals = Refusals(sampler.vocab_size)
        self._prompts = PromptReports()
        self._pooled = PooledRows()
        self._proposer = proposer
        self._others = others

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
        if self._adapters is not None:
            self._adapters.leave(batch.finished_rows)
        for new in batch.new_rows:
            self._add_row(new)
        self._prompts.begin_step(batch)
        self._pooled.begin_step(batch)
        if self._proposer is not None:
            self._proposer.follow(batch)
        if not len(batch.rows):
            return StepResult(sampled_token_ids=EMPTY_COLUMN)
        part = self._pooled.part_of(batch)
        result = self._generate(batch) if part is None else self._pool(batch, part)
        elapsed_us = (time.perf_counter_ns() - started) // 1000
        return msgspec.structs.replace(result, device_time_us=elapsed_us)

    def _pool(self, batch: StepBatch, part: PooledPart) -> StepResult:
        """A step with pooled rows: first the others, which may be waited for."""
        rest = without(batch, part)
        result = self._generate(rest) if len(rest.rows) else StepResult(sampled_token_ids=EMPTY_COLUMN)
        refused = self._refusals.among(batch.rows)
        vectors, errors = self._pooled.run(part, self.forward, self._token_ids, refused)
        return whole_result(rest, result, part, vectors, errors)

    def _generate(self, batch: StepBatch) -> StepResult:
        return self._run(batch) if batch.num_speculative_tokens is None else self._speculate(batch)

    def _run(self, batch: StepBatch) -> StepResult:
        drawn: Int32Array = EMPTY_COLUMN
        logprobs: tuple[RowLogprobs, ...] = ()
        errors: tuple[RowError, ...] = ()
        sampling = np.flatnonzero(batch.samples)
        sampled_rows = batch.rows[sampling]
        rows = step_rows(batch)
        logits, prompt_logprobs = self._forward(batch, rows)
        if len(sampling):
            assert logits is not None
            numbers, positions = rows.numbers[sampling], (rows.num_computed + rows.num_new)[sampling]
            sampled, drawn = self._draw(logits, numbers, positions)
            self._token_ids[numbers, positions] = sampled.token_ids.clamp(min=0).to(torch.int32)
            self._tell_others(numbers, positions, drawn, len(drawn))
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
        self._tell_others(draws.numbers[kept], draws.positions[kept], drawn[kept], len(drawn))
        self._proposer.settle(asked, counts, accepted)
        result = result_of(drawn, sampled.logprobs, sampled.errors, kept, draws, asked, counts, accepted)
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

    def _tell_others(self, numbers: Int64Array, positions: Int64Array, drawn: Int32Array, num_draws: int) -> None:
        if self._others is not None:
            self._others.tell(numbers, positions, drawn, num_draws)

    def _proposals(self, asked: Asked, counts: Int64Array) -> Int32Array:
        rows, positions = (torch.from_numpy(part).to(self._device) for part in proposal_places(asked, counts))
        stored: Int32Array = self._token_ids[rows, positions].cpu().numpy()
        return stored

    def _add_row(self, new: NewRow) -> None:
        row = new.row
        token_ids = self._refusals.admit(row, new.token_ids)
        self.constraints.add(row, new.sampling.constraint, token_ids[new.num_prompt_tokens :])
        self._token_ids[row, : len(token_ids)] = torch.from_numpy(token_ids.astype(np.int32))
        self._sampler.add_row(row, new.sampling, new.num_prompt_tokens)
        if self._adapters is not None:
            why_not = self._adapters.enter(row, new.adapter)
            if why_not:
                self._refusals.add({row: why_not})


def _drawing(
    config: BackendConfig,
    settings: ModelSettings,
    forward: ForwardPass,
    device: torch.device,
    group: RankGroup | None,
    draft: ModelSettings | None,
) -> _OpenModel:
    model_config: ModelConfig = settings.model_config
    compiler = compiler_for(
        Path(config.model), vocab_size=model_config.vocab_size, eos_token_ids=model_config.eos_token_ids
    )
    sampler = Sampler(vocab_size=model_config.vocab_size, max_num_rows=config.max_num_seqs, device=device)
    sampler.add_row(0, SamplingParams(temperature=0.0), 1)
    draft_model: Proposer | None = None
    if draft is not None:
        draft_model = draft_proposer(config, draft._replace(dtype=settings.dtype), forward.pool, device, sampler)
    proposer = _proposer(config, group, draft_model)
    others = None if group is None else DrawnTokensOut(drawn_channel(group, config))
    constraints = ConstrainedRows(compiler)
    return _OpenModel(config, forward, settings.max_model_len, device, sampler, constraints, proposer, others)


def _following(
    config: BackendConfig, settings: ModelSettings, forward: ForwardPass, group: RankGroup
) -> FollowingModel:
    proposer = _proposer(config, group, None)
    return FollowingModel(
        config,
        forward,
        drawn_channel(group, config),
        proposer,
        max_model_len=settings.max_model_len,
        vocab_size=settings.model_config.vocab_size,
    )


def _proposer(config: BackendConfig, group: RankGroup | None, draft: Proposer | None) -> Proposer | None:
    """What proposes tokens on this rank; ``draft``: of rank 0, which tells the others what it proposes."""
    if config.speculation != "draft":
        return PromptLookup() if config.speculation == "ngram" else None
    if group is None:
        return draft
    channel = proposals_channel(group, config)
    return Told(channel) if draft is None else Telling(draft, channel)


def _warm_up(forward: ForwardPass, max_model_len: int) -> None:
    """The first request must not pay one-time costs."""
    num_tokens = min(forward.pool.block_size, max_model_len)
    token_ids = torch.zeros((1, num_tokens), dtype=torch.int32, device=forward.pool.layers.device)
    for computed, new in ((0, num_tokens - 1), (num_tokens - 1, 1)):
        if new:
            first = np.zeros(1, dtype=np.int64)
            rows = StepRows(first, first + new, first + computed, np.zeros((1, 1), np.int32), first + new - 1)
            forward.run(rows, token_ids)
