"""Which kinds of rows share a step: the batching policies by name.

Owns: the policies and their registry. Must not know: rows, blocks, queues, or who is served first.

A policy answers with ``StepRules``, one of a few frozen objects, whenever what its answer may depend on has changed;
the scheduler looks at them once per step, never per row, and does the rest. Who is served first is the order's affair,
how much memory a request must find free the reservation's.

- ``static``: requests start together when nothing runs, and nobody joins once the first of them decodes (the baseline
  of every paper since: Yu et al., Orca, OSDI 2022, section 3, figure 3). The prompts of a batch may take several steps,
  since a step has a token budget. A member that is preempted starts again with the next batch.
- ``orca``: iteration-level scheduling (Orca, OSDI 2022, Algorithm 1). ``max_bs`` is ``max_num_seqs``, ``n_workers`` is
  ``max_steps_in_flight``, a K/V slot is a place in a block. A request is part of one batch in flight at a time, so
  ``n_workers`` batches of different requests alternate, as pipeline stages want them.
- ``prefill_first``: vLLM's first generation (Kwon et al., SOSP 2023; the scheduler of its V0 engine): whole prompts, in
  steps of their own, before any decode.
- ``chunked``: decodes first, prompts in chunks of what they leave (Agrawal et al., Sarathi-Serve, OSDI 2024, section 4:
  stall-free batching).
- ``split_fuse``: decodes and pieces of prompts composed to fill the budget exactly (Holmes et al., DeepSpeed-FastGen,
  arXiv:2401.08671, 2024: Dynamic SplitFuse). A waiting prompt is cut where budget or memory ends, where ``chunked`` lets it
  wait; so by default it reserves nothing.

Progress: the request that is served first among those that run can always have the next block, since it may preempt
all others, and alone it fits; so what must never happen is that it is not asked for ever. Decodes that are held back
for prompts are therefore served before the next prompt once one of them has found no block, and a prompt cut short by
memory that has nothing to run leaves the step to the decodes.

What no paper has to settle because its steps have no token budget: a whole prompt starts only in a step with room for
all of it; one that is longer than any step starts in a step of its own and goes on in the following ones.
"""

from enum import Enum
from typing import NamedTuple, Protocol


class PromptCut(Enum):
    """Where a waiting prompt may be cut to get into a step."""

    NOWHERE = "nowhere"
    AT_BUDGET = "at the end of the token budget"
    AT_BUDGET_OR_MEMORY = "at the end of the token budget or of the free blocks"

    def first_chunk(self, num_left: int, *, budget: int, step_budget: int, room: int) -> int:
        """How many of the ``num_left`` tokens of a waiting prompt may run in a step; 0 or less: it has to wait.

        ``budget`` is what is left of ``step_budget``, in tokens; ``room`` the tokens that blocks are free for.
        """
        chunk = min(num_left, budget)
        if self is PromptCut.NOWHERE:
            return chunk if chunk == min(num_left, step_budget) else 0
        return min(chunk, room) if self is PromptCut.AT_BUDGET_OR_MEMORY else chunk


class StepRules(NamedTuple):
    """What may run in one step. ``admits``: waiting requests may start. ``prompts_run_alone``: while there is a prompt
    to run, decodes sit out, unless one of them already waits for a block. ``cut``: where a waiting prompt may be cut.
    """

    admits: bool = True
    prompts_run_alone: bool = False
    cut: PromptCut = PromptCut.AT_BUDGET


class BatchingPolicy(Protocol):
    """What the scheduler asks of a policy.

    ``overlaps_own_steps``: a request may be part of a step before the step before it has returned.
    ``reservation``: the name of the reservation that the policy was published with.
    """

    @property
    def overlaps_own_steps(self) -> bool: ...  # noqa: D102 - told above

    @property
    def reservation(self) -> str: ...  # noqa: D102 - told above

    def rules(self, *, any_decoded: bool) -> StepRules:
        """The rules of the steps to come. ``any_decoded``: a decode has run since the last time that nothing ran."""


class SameEveryStep(NamedTuple):
    """A policy whose rules do not depend on anything."""

    every_step: StepRules
    overlaps_own_steps: bool = True
    reservation: str = "prompt"

    def rules(self, *, any_decoded: bool) -> StepRules:
        """The rules of the steps to come."""
        del any_decoded
        return self.every_step


class BatchByBatch(NamedTuple):
    """A policy that lets requests in until the first of a batch decodes, and then not before the last has ended."""

    gathering: StepRules
    running: StepRules
    overlaps_own_steps: bool = True
    reservation: str = "prompt"

    def rules(self, *, any_decoded: bool) -> StepRules:
        """The rules of the steps to come."""
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
