"""What an executor can do at best, from its costs alone, so that most searches need not be done.

- *Alone*: a request that meets nobody. Load only makes it slower, so an executor that misses an objective alone needs no
  search.
- *Ceiling*: about the highest rate, with steps as full as memory, ``max_num_seqs`` and the objective on gaps allow.
"""

from typing import NamedTuple

import numpy as np

from headway_lab.plan.instance import FloatArray, Instance, Phase
from headway_lab.plan.options import MEAN_GAP
from headway_lab.plan.workload import Workload
from headway_lab.simulate.device import pass_stages
from headway_lab.simulate.roofline import StepTime

CEILING_MARGIN = 1.15
"""An executor whose ceiling is so far below another one's goodput is not tried. Mean lengths make the ceiling; a run of
other lengths may do a little better."""
_HALVINGS = 16
_SHORTER_STEPS = 5
_MOST_SEEN = 256
"""Requests that stand for all."""


class Alone(NamedTuple):
    """Latencies in seconds of requests that meet nobody, float64, shape ``[requests]``; zeros for what is not its work."""

    first_s: FloatArray
    gap_s: FloatArray


def alone(instance: Instance, workload: Workload, gaps: str, transfer_token_s: float) -> Alone:
    """Return the latencies of the first requests. ``gaps``: see ``PlanOptions``.

    ``transfer_token_s``: a hand-off's seconds per token of the prompt.
    """
    requests = workload.requests[:_MOST_SEEN]
    first_s, gap_s = np.zeros(len(requests)), np.zeros(len(requests))
    for place, request in enumerate(requests):
        prompt, num_gaps = request.num_prompt_tokens, request.num_output_tokens - 1
        if instance.phase is not Phase.DECODE:
            first_s[place] = _prompt_s(instance, prompt)[0]
        if instance.phase is Phase.PREFILL or not num_gaps:
            continue
        # The first gap has the hand-off, and the last one the longest context.
        transfer_s = prompt * transfer_token_s * (instance.phase is Phase.DECODE)
        earliest_s, latest_s = (_decode_s(instance, 1, prompt + count)[0] for count in (1, num_gaps))
        if gaps == MEAN_GAP:
            gap_s[place] = (earliest_s + latest_s) / 2 + transfer_s / num_gaps
        else:
            gap_s[place] = max(transfer_s + earliest_s, latest_s)
    return Alone(first_s, gap_s)


def ceiling(instance: Instance, workload: Workload) -> float:
    """Return about the most requests per second, without a margin."""
    if instance.phase is Phase.PREFILL:
        return _prefill_ceiling(instance, workload)
    decode = _decode_ceiling(instance, workload)
    return decode if instance.phase is Phase.DECODE else _shared_ceiling(instance, workload, decode)


def _prefill_ceiling(instance: Instance, workload: Workload) -> float:
    """Full steps of prompts of the mean length, each as soon as the slowest stage is free."""
    prompt = max(round(workload.mean_prompt_tokens), 1)
    budget = instance.limits.max_num_batched_tokens
    if prompt >= budget:
        return 1.0 / _prompt_s(instance, prompt)[1]
    num_prompts = budget // prompt
    _, interval_s = _step_s(instance, [prompt] * num_prompts, [0] * num_prompts, num_prompts)
    return num_prompts / interval_s


def _decode_ceiling(instance: Instance, workload: Workload) -> float:
    """The rate at which the fullest batch that keeps the objective is always full."""
    num_decodes = workload.mean_output_tokens - (instance.phase is Phase.DECODE)
    if num_decodes <= 0:
        return float("inf")
    num_rows = fullest_batch(instance, workload)
    latency_s, interval_s = _decode_s(instance, num_rows, round(workload.mean_tokens_of_a_decode))
    num_batches = instance.num_batches
    return num_batches * num_rows / max(latency_s, num_batches * interval_s) / num_decodes


def _shared_ceiling(instance: Instance, workload: Workload, most: float) -> float:
    """The rate at which steps within the objective on gaps hold all that arrives meanwhile, by the best length of steps."""
    if most == float("inf"):
        return _prefill_ceiling(instance, workload)
    limit_s = workload.objectives.limits_s[1]
    return max(_rate_of_steps(instance, workload, most, limit_s / 2**halved) for halved in range(_SHORTER_STEPS))


def _rate_of_steps(instance: Instance, workload: Workload, most: float, step_s: float) -> float:
    """The highest of rates up to ``most`` at which what ``step_s`` seconds bring is done in a step as long.

    At r requests per second, that is the prompts of ``r * step_s`` requests, and a token of each of those under way. A
    pipeline has a step of each lane under way, with a share of them.
    """
    prompt = max(round(workload.mean_prompt_tokens), 1)
    held = round(workload.mean_tokens_of_a_decode)
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        share = rate / instance.num_batches
        num_decodes = round(share * step_s * (workload.mean_output_tokens - 1))
        num_tokens = max(round(share * step_s * prompt), 1)
        chunks = [prompt] * (num_tokens // prompt) + [num_tokens % prompt] * (num_tokens % prompt > 0)
        computed = [held] * num_decodes + [0] * len(chunks)
        latency_s, _ = _step_s(instance, [1] * num_decodes + chunks, computed, num_decodes)
        fits = latency_s <= step_s and num_tokens <= instance.limits.max_num_batched_tokens
        low, high = (rate, high) if fits else (low, rate)
    return high


def fullest_batch(instance: Instance, workload: Workload) -> int:
    """Return the most decodes of a step, at least 1: by rows, memory and the objective on gaps."""
    num_tokens = workload.mean_tokens_of_a_decode
    pool_tokens = instance.capacity.num_blocks * instance.capacity.block_size
    most_rows = min(instance.limits.max_num_seqs, int(pool_tokens / num_tokens))
    low, high = 1, max(most_rows // instance.num_batches, 1)
    limit_s = workload.objectives.limits_s[1]
    while low < high:
        middle = (low + high + 1) // 2
        fits = _decode_s(instance, middle, round(num_tokens))[0] <= limit_s
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _prompt_s(instance: Instance, num_tokens: int) -> tuple[float, float]:
    """Return a prompt's latency, and how long it keeps the slowest stage busy."""
    budget = instance.limits.max_num_batched_tokens
    free_s = [0.0] * instance.degrees.pipeline_parallel
    latency_s = busy_s = 0.0
    for start in range(0, num_tokens, budget):
        chunk = min(budget, num_tokens - start)
        time = _step_time(instance, [chunk], [start], int(start + chunk == num_tokens))
        latency_s = pass_stages(free_s, time, free_s[0]) if time.stages_s else latency_s + time.total_s
        busy_s += max(time.stages_s, default=time.total_s)
    return latency_s, busy_s


def _decode_s(instance: Instance, num_rows: int, num_tokens: int) -> tuple[float, float]:
    """Return the latency of a step of equal rows that hold so many tokens, and its slowest stage's part."""
    return _step_s(instance, [1] * num_rows, [num_tokens - 1] * num_rows, num_rows)


def _step_s(instance: Instance, scheduled: list[int], computed: list[int], num_samples: int) -> tuple[float, float]:
    time = _step_time(instance, scheduled, computed, num_samples)
    return time.total_s, max(time.stages_s, default=time.total_s)


def _step_time(instance: Instance, scheduled: list[int], computed: list[int], num_samples: int) -> StepTime:
    rows = np.array(scheduled, dtype=np.int32), np.array(computed, dtype=np.int32)
    return instance.roofline.step_time(*rows, num_samples)
