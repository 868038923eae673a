"""Totals that the scheduler keeps for operators.

Owns: the counters. Must not know: who reads them.
"""

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

import msgspec


class PreemptionMode(StrEnum):
    """What became of the tokens that a preempted request had computed."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class PreemptionReason(StrEnum):
    """Why a request lost its row."""

    NO_BLOCK = "no_block"
    HIGHER_CLASS = "higher_class"
    LATE_FIRST_TOKEN = "late_first_token"  # noqa: S105 - a reason, not a secret
    RUN_ALONE = "run_alone"

    @property
    def is_for_another(self) -> bool:
        """Whether it makes way for one that waits."""
        return self in {PreemptionReason.HIGHER_CLASS, PreemptionReason.LATE_FIRST_TOKEN}


class Preemption(NamedTuple):
    """A kind of preemption."""

    mode: PreemptionMode
    reason: PreemptionReason


class WasteReason(StrEnum):
    """Why tokens were computed for nothing.

    ``RECOMPUTE`` and ``NEW_EPOCH``: they are computed a second time, because their request was preempted or a new executor
    knows nothing of it; counted when it starts again, without what it finds in the cache or on the host. ``SURPLUS``: drawn
    by steps that were in flight when their request ended, or behind its last token. Proposals that were wrong are not
    among these: ``num_draft_tokens`` less ``num_accepted_tokens``.
    """

    RECOMPUTE = "recompute"
    NEW_EPOCH = "new_epoch"
    SURPLUS = "surplus"


class SchedulerCounters(msgspec.Struct):
    """Totals since the process started; prompt and prefix tokens count when a request is first admitted.

    A request admitted again, after a preemption or with a new executor, mostly finds its own blocks. What it finds
    counts in ``num_prefix_resumed_tokens`` and nowhere else, or the hit rate would rise with every preemption.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_prefix_resumed_tokens: int = 0
    num_evicted_blocks: int = 0
    device_us: int = 0
    """What all steps have taken on the device, as the executor told."""
    num_drafts: int = 0
    """How often tokens were proposed for a request in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    preemptions: Counter[Preemption] = msgspec.field(default_factory=Counter)
    """``num_preemptions`` by kind."""
    wasted_tokens: Counter[WasteReason] = msgspec.field(default_factory=Counter)
