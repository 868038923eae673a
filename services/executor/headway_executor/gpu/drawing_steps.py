"""The steps of a device that draws tokens: what is launched for one, from its diff to what it drew.

Owns: the order of a step's launches, and what is built of their results. Must not know: when that is built, epochs, how a
kernel computes.
"""

from collections.abc import Callable

import msgspec

from headway_executor.backend import StepBatch, StepResult
from headway_executor.gpu.device_parts import DeviceParts
from headway_executor.gpu.device_sampler import DrawnTokens
from headway_executor.gpu.device_stage import DeviceStage
from headway_executor.gpu.open_model import nothing_drawn
from headway_executor.gpu.proposers import speculation_over
from headway_executor.gpu.running_rows import RunningRows
from headway_executor.gpu.speculation import SpeculativeStep
from headway_executor.gpu.step_columns import StepShape, shape_of
from headway_executor.gpu.tokens_among_mates import TokensAmongMates
from headway_executor.sampling.constraints.rows import ConstrainedRows
from headway_executor.sampling.drawn_tokens import DrawnTokensOut
from headway_executor.sampling.prompt_logprobs import PromptReports
from headway_executor.sampling.refusals import Refusals, with_refusals
from headway_proto.columns import EMPTY_COLUMN, Int32Array
from headway_proto.step import RowPromptLogprobs


class DrawingSteps:
    """A ``StepLauncher``. ``mates`` and ``others``: to whom it gives what it drew, on the device or from the host, or None."""

    def __init__(
        self,
        parts: DeviceParts,
        stage: DeviceStage,
        constraints: ConstrainedRows,
        mates: TokensAmongMates | None,
        others: DrawnTokensOut | None,
    ) -> None:
        self._parts = parts
        self._stage = stage
        self._mates = mates
        self._others = others
        self._running = RunningRows(Refusals(parts.vocab_size), parts.sampler, constraints, parts.adapters.adapters)
        self._prompts = PromptReports()
        self._speculation = speculation_over(parts)

    def run(self, batch: StepBatch) -> Callable[[], StepResult]:
        """See ``StepLauncher``."""
        self._begin(batch)
        if not len(batch.rows):
            return nothing_drawn
        step: SpeculativeStep | None = None
        if self._speculation is not None and batch.num_speculative_tokens is not None:
            step = self._speculation.propose(batch, frozenset(self._running.refusals.among(batch.rows)))
            batch = step.batch
        shape = shape_of(batch)
        sampled_rows = batch.rows[batch.samples != 0]
        has_drawn = self._may_draw(shape, sampled_rows)
        self._stage.receive(shape.num_tokens)
        self._parts.launch(batch, shape, draws=has_drawn)
        prompts = self._read_prompts(batch)
        if not shape.num_sampled:
            return lambda: StepResult(sampled_token_ids=EMPTY_COLUMN, prompt_logprobs=prompts())
        drawn = self._parts.sampler.drawn(sampled_rows) if has_drawn else self._sampled(sampled_rows)
        if self._mates is not None:
            self._mates.share(shape.num_sampled)
        if self._speculation is not None:
            self._speculation.proposer.draw(batch, drawn.token_ids, self._parts.runtime.mark())
        refused = self._running.refusals.among(sampled_rows)
        tell_others = self._telling(batch)

        def build() -> StepResult:
            token_ids, logprobs, errors = drawn.collect()
            tell_others(token_ids)
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
        if len(batch.finished_rows):
            self._running.leave(batch.finished_rows)
        new_rows = self._running.enter(batch.new_rows) if batch.new_rows else ()
        self._parts.rows.apply(new_rows, batch.new_blocks)
        self._prompts.begin_step(batch)
        if self._speculation is not None:
            self._speculation.proposer.follow(batch, new_rows)

    def _may_draw(self, shape: StepShape, sampled_rows: Int32Array) -> bool:
        """Whether a launch may have the draws behind it: the host has nothing to say in between."""
        return (
            not shape.has_chunks
            and shape.num_sampled == shape.num_rows
            and self._running.are_unmasked()
            and self._parts.sampler.is_greedy(sampled_rows)
        )

    def _read_prompts(self, batch: StepBatch) -> Callable[[], tuple[RowPromptLogprobs, ...]]:
        parts, chunks = self._parts, self._prompts.chunks(batch)
        if not chunks:
            return _no_prompts
        counts = batch.num_scheduled_tokens
        return parts.prompt_reader.launch(parts.target.decoder, parts.rows.token_store, chunks, counts)

    def _sampled(self, rows: Int32Array) -> DrawnTokens:
        parts = self._parts
        logits = parts.target.decoder.logits(len(rows))
        masks = self._running.masks(rows)
        drawn = parts.sampler.sample(logits, rows, parts.upload.views, parts.rows.token_store, masks)
        if len(masks):
            self._running.expect(parts.runtime.mark(), masks, drawn)
        return drawn

    def _telling(self, batch: StepBatch) -> Callable[[Int32Array], None]:
        """What tells the other ranks the tokens that this step draws."""
        others = self._others
        if others is None:
            return _tell_nobody
        draws = batch.samples != 0
        rows, positions = batch.rows[draws], (batch.num_computed_tokens + batch.num_scheduled_tokens)[draws]
        return lambda token_ids: others.tell(rows, positions, token_ids, len(token_ids))

    def forget_blocks(self, blocks: Int32Array) -> None:
        """See ``StepLauncher``."""
        if self._speculation is not None:
            self._speculation.proposer.forget_blocks(blocks)

    def close(self) -> None:
        """See ``StepLauncher``."""
        self._running.close()


def _no_prompts() -> tuple[RowPromptLogprobs, ...]:
    return ()


def _tell_nobody(token_ids: Int32Array) -> None:
    """There are no other ranks."""
