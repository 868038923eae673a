"""The batching policies by name: which kinds of rows share a step.

Owns: the policies and their registry. Must not know: rows, blocks, queues, or the service order.

- ``static``: requests start together when nothing runs, and none joins once the first decodes (the baseline of Yu et
  al., Orca, OSDI 2022, section 3, figure 3). Prompts may take several steps. A preempted request starts again with the
  next batch.
- ``orca``: iteration-level scheduling (Orca, Algorithm 1). ``max_bs`` is ``max_num_seqs``, ``n_workers`` is
  ``max_steps_in_flight``, a K/V slot is a place in a block. A request is in one batch in flight, so batches alternate,
  as pipeline stages need.
- ``prefill_first``: whole prompts, in their own steps, before any decode (Kwon et al., SOSP 2023; vLLM's V0 engine).
- ``chunked``: decodes first, then chunks of prompts (Agrawal et al., Sarathi-Serve, OSDI 2024, section 4).
- ``split_fuse``: decodes and pieces of prompts fill the budget exactly (Holmes et al., DeepSpeed-FastGen,
  arXiv:2401.08671, 2024). A waiting prompt is also cut where memory ends, so by default the policy reserves nothing.

Progress: the first running request can always have its next block, since it may preempt all others and fits alone. So
decodes must not be held back for ever. Once one lacks a block, decodes run before the next prompt. They also run if
memory leaves a step no prompt.

The papers have no token budget. Here a whole prompt starts only in a step with room for it. A prompt longer than any
step starts in its own step and goes on in the next.
"""

from enum import Enum
from typing import NamedTuple, Protocol


class PromptCut(Enum):
    """Where a waiting prompt may be cut."""

    NOWHERE = "nowhere"
    AT_BUDGET = "at the end of the token budget"
    AT_BUDGET_OR_MEMORY = "at the end of the token budget or of the free blocks"

    def first_chunk(self, num_left: int, *, budget: int, step_budget: int, room: int) -> int:
        """Return how many of ``num_left`` prompt tokens may run; 0 or less: it waits.

        ``budget`` is the rest of ``step_budget``, ``room`` the tokens that free blocks hold.
        """
        chunk = min(num_left, budget)
        if self is PromptCut.NOWHERE:
            return chunk if chunk == min(num_left, step_budget) else 0
        return min(chunk, room) if self is PromptCut.AT_BUDGET_OR_MEMORY else chunk


class StepRules(NamedTuple):
    """``admits``: waiting requests may start. ``prompts_run_alone``: decodes sit out while a prompt can run, unless one
    waits for a block. ``cut``: where a waiting prompt may be cut.
    """

    admits: bool = True
    prompts_run_alone: bool = False
    cut: PromptCut = PromptCut.AT_BUDGET


class BatchingPolicy(Protocol):
    """``overlaps_own_steps``: a request may join a step before its last one has returned. ``reservation``: the default
    one.
    """

    @property
    def overlaps_own_steps(self) -> bool: ...

    @property
    def reservation(self) -> str: ...

    def rules(self, *, any_decoded: bool) -> StepRules:
        """Return the rules of the next steps. ``any_decoded``: a decode has run since nothing ran."""


class SameEveryStep(NamedTuple):
    """The same rules for every step."""

    every_step: StepRules
    overlaps_own_steps: bool = True
    reservation: str = "prompt"

    def rules(self, *, any_decoded: bool) -> StepRules:
        del any_decoded
        return self.every_step


class BatchByBatch(NamedTuple):
    """No request starts between the first decode and the last end."""

    gathering: StepRules
    running: StepRules
    overlaps_own_steps: bool = True
    reservation: str = "prompt"

    def rules(self, *, any_decoded: bool) -> StepRules:
        return self.running if any_decoded else self.gathering


BATCHING_POLICIES: dict[str, BatchingPolicy] = {
    "static": BatchByBatch(
        gathering=StepRules(prompts_run_alone=True, cut=PromptCut.NOWHERE),
        running=StepRules(admits=False, prompts_run_alone=True, cut=PromptCut.NOWHERE),
        reservation="full",
    ),
    "orca": SameEveryStep(
        every_step=StepRules(cut=PromptCut.NOWHERE),
        overlaps_own_steps=False,
        reservation="full",
    ),
    "prefill_first": SameEveryStep(every_step=StepRules(prompts_run_alone=True, cut=PromptCut.NOWHERE)),
    "chunked": SameEveryStep(every_step=StepRules()),
    "split_fuse": SameEveryStep(every_step=StepRules(cut=PromptCut.AT_BUDGET_OR_MEMORY), reservation="none"),
}
