"""Totals for operators.

Owns: the counters. Must not know: who reads them.
"""

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

import msgspec


class PreemptionMode(StrEnum):
    """What happened to a preempted request's computed tokens."""

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
        """Whether the row went to a waiting request."""
        return self in {PreemptionReason.HIGHER_CLASS, PreemptionReason.LATE_FIRST_TOKEN}


class Preemption(NamedTuple):
    """A kind of preemption."""

    mode: PreemptionMode
    reason: PreemptionReason


class WasteReason(StrEnum):
    """Why tokens were computed for nothing.

    ``RECOMPUTE`` and ``NEW_EPOCH``: computed again after a preemption or with a new executor; counted at the restart,
    less what the cache or the host still has. ``SURPLUS``: drawn after the request's last token.
    """

    RECOMPUTE = "recompute"
    NEW_EPOCH = "new_epoch"
    SURPLUS = "surplus"


class SchedulerCounters(msgspec.Struct):
    """Totals since the process started; prompt and prefix tokens count at a request's first admission.

    When admitted again, it finds its own blocks. These count only in ``num_prefix_resumed_tokens``, or preemptions
    would raise the hit rate.
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
    """Device time of all steps, as the executor reported it."""
    num_drafts: int = 0
    """How often tokens were proposed for a request in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_offloaded_blocks: int = 0
    """Blocks of prefixes that were copied to the host."""
    num_restored_tokens: int = 0
    """Tokens of prefixes that came back from there instead of being computed."""
    num_exported_blocks: int = 0
    """Blocks that were copied to the host for another executor."""
    num_pulled_tokens: int = 0
    """Tokens that came from a host pool, of another executor or of an earlier epoch, instead of being computed."""
    num_stale_pulls: int = 0
    """Requests whose pulled blocks were not right, so that they were computed again."""
    preemptions: Counter[Preemption] = msgspec.field(default_factory=Counter)
    """``num_preemptions`` by kind."""
    wasted_tokens: Counter[WasteReason] = msgspec.field(default_factory=Counter)
