"""Totals that the scheduler keeps for operators.

Owns: the counters. Must not know: who reads them.
"""

import msgspec


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
