"""Totals that the scheduler keeps for operators.

Owns: the counters. Must not know: who reads them.
"""

import msgspec


class SchedulerCounters(msgspec.Struct):
    """Totals since the process started; prompt and prefix tokens count at admission."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_swapped_out_blocks: int = 0
