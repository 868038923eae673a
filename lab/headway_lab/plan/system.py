"""A whole system in two runs: executors for prefill, hand-offs, and executors for decode, as DistServe's simulator does.

Each executor for prefill sends its hand-offs one after the other over a link of its own. Of requests, the next executor
in turn gets the next one.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from headway_lab.percentiles import Percentiles, percentiles, rounded
from headway_lab.plan.goodput import WARM_UP_SHARE, BoolArray, Goal, Trial, keeps_up, requests_to_settle, share_counted
from headway_lab.plan.instance import FloatArray, Instance, Phase, Run
from headway_lab.workload.requests import PlannedRequest

_MS = 1e3


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """A system at a rate, in requests per second. Shares from 0 to 1 kept the objectives; times in milliseconds.

    ``ttft_share`` and ``itl_share``: each objective alone. ``decode_step_ms``: the mean step that decodes. ``keeps_up``: see
    ``Trial``. ``ttft_ms``: waits for the first token; ``gap_ms``: every gap, that of the hand-off too. ``hand_off_ms``: the
    mean time from a first token to the moment when the keys and values are where the answer is decoded, with the wait for
    the link. ``bubble_shares``: of the executors of each phase.
    """

    rate: float
    num_requests: int
    share: float
    ttft_share: float
    itl_share: float
    decode_step_ms: float
    keeps_up: bool
    ttft_ms: Percentiles
    gap_ms: Percentiles
    hand_off_ms: float
    bubble_shares: dict[str, float]

    def meets(self, attainment: float) -> bool:
        """Whether the system can bear the rate for long."""
        return self.keeps_up and self.share >= attainment


def check_split(
    prefill: Instance, num_prefill: int, decode: Instance, num_decode: int, goal: Goal, rate: float
) -> Check:
    """Run executors for prefill and for decode together."""
    num_requests = requests_to_settle({Phase.PREFILL, Phase.DECODE}, goal, rate)
    requests, times_s = goal.workload.requests[:num_requests], goal.workload.times_s(rate, num_requests)
    seed = goal.workload.seed
    first = prefill.run(requests, times_s, seed, num_prefill)
    came_s = times_s + first.first_s
    ready_s = handed_over(requests, came_s, num_prefill, goal.transfer_token_s)
    places = np.flatnonzero(np.isfinite(ready_s))
    chosen = [requests[place] for place in places.tolist()]
    rest = decode.run(chosen, ready_s[places], seed, num_decode)
    is_handed = np.array([one.num_output_tokens > 1 for one in chosen])
    keeps_itl = np.zeros(num_requests, dtype=np.bool_)
    handed_s = is_handed * (ready_s[places] - came_s[places] + rest.first_s)
    keeps_itl[places] = goal.keeps_gaps(chosen, rest, handed_s)
    keeps_pace = keeps_up(times_s, first.first_s) and keeps_up(ready_s[places], rest.first_s)
    keeps_ttft = first.first_s <= goal.workload.objectives.limits_s[0]
    gaps = rest._replace(
        single_gaps_s=np.concatenate((rest.single_gaps_s, handed_s[is_handed])),
        gap_owners=places[np.concatenate((rest.gap_owners, np.flatnonzero(is_handed)))],
    )
    way_s = (ready_s[places] - came_s[places])[is_handed]
    return Check(
        **_shared_figures(rate, keeps_ttft, keeps_itl, first.first_s, gaps),
        keeps_up=keeps_pace,
        hand_off_ms=rounded(float(np.mean(way_s)) * _MS) if len(way_s) else 0.0,
        bubble_shares={Phase.PREFILL.value: first.bubble_share, Phase.DECODE.value: rest.bubble_share},
    )


def check_together(instance: Instance, num_executors: int, goal: Goal, rate: float) -> Check:
    """Run executors that do everything."""
    num_requests = requests_to_settle({Phase.BOTH}, goal, rate)
    requests, times_s = goal.workload.requests[:num_requests], goal.workload.times_s(rate, num_requests)
    run = instance.run(requests, times_s, goal.workload.seed, num_executors)
    keeps_ttft = run.first_s <= goal.workload.objectives.limits_s[0]
    keeps_itl = goal.keeps_gaps(requests, run)
    return Check(
        **_shared_figures(rate, keeps_ttft, keeps_itl, run.first_s, run),
        keeps_up=keeps_up(times_s, run.first_s),
        hand_off_ms=0.0,
        bubble_shares={Phase.BOTH.value: run.bubble_share},
    )


def trial_of(check: Check) -> Trial:
    """Return a check as a trial of its rate."""
    return Trial(rate=check.rate, num_requests=check.num_requests, share=check.share, keeps_up=check.keeps_up)


def handed_over(
    requests: Sequence[PlannedRequest], came_s: FloatArray, num_links: int, transfer_token_s: float
) -> FloatArray:
    """Return when each request's keys and values have arrived; infinite if its first token has not come."""
    ready_s = np.full(len(requests), np.inf)
    free_s = [0.0] * num_links
    for place in np.argsort(came_s, kind="stable"):
        if not np.isfinite(came_s[place]):
            break
        if requests[place].num_output_tokens == 1:
            ready_s[place] = came_s[place]
            continue
        link = place % num_links
        free_s[link] = max(free_s[link], came_s[place]) + requests[place].num_prompt_tokens * transfer_token_s
        ready_s[place] = free_s[link]
    return ready_s


def _shared_figures(
    rate: float, keeps_ttft: BoolArray, keeps_itl: BoolArray, first_s: FloatArray, run: Run
) -> dict[str, Any]:
    """Return what every check has. ``run``: the one that decodes."""
    num_warm_up = len(first_s) // WARM_UP_SHARE
    return {
        "rate": rounded(rate),
        "num_requests": len(first_s),
        "share": share_counted(keeps_ttft & keeps_itl),
        "ttft_share": share_counted(keeps_ttft),
        "itl_share": share_counted(keeps_itl),
        "decode_step_ms": rounded(run.mean_step_s * _MS),
        "ttft_ms": percentiles(first_s[num_warm_up:] * _MS),
        "gap_ms": percentiles(run.single_gaps_s[run.gap_owners >= num_warm_up] * _MS),
    }
