"""One workload at any rate: the same requests and the same pattern of arrivals, closer together or farther apart.

So two rates differ in nothing but the rate, and a search over rates sees no other chance.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from headway_lab.workload.arrivals import gamma_times
from headway_lab.workload.lengths import parse_lengths
from headway_lab.workload.requests import ARRIVALS, Objectives, PlannedRequest, WorkloadShape, draw_requests, rng_of

MOST_REQUESTS = 8192


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """``unit_times_s``: arrivals at one request per second, float64, shape ``[requests]``."""

    requests: Sequence[PlannedRequest]
    unit_times_s: NDArray[np.float64]
    objectives: Objectives
    seed: int

    def times_s(self, rate: float, num_requests: int) -> NDArray[np.float64]:
        """Return the first arrivals at ``rate`` per second, float64, shape ``[num_requests]``."""
        return self.unit_times_s[:num_requests] / rate

    @property
    def cut_share(self) -> float:
        """The share of the requests that were drawn longer than the context."""
        return float(np.mean([request.is_cut for request in self.requests]))

    @property
    def mean_prompt_tokens(self) -> float:
        """Of all requests."""
        return float(np.mean([request.num_prompt_tokens for request in self.requests]))

    @property
    def mean_output_tokens(self) -> float:
        """Of all requests."""
        return float(np.mean([request.num_output_tokens for request in self.requests]))

    @property
    def mean_tokens_of_a_decode(self) -> float:
        """What a running request holds at a random moment: its prompt, and half of an answer, where long ones weigh more."""
        outputs = np.array([request.num_output_tokens for request in self.requests], dtype=np.float64)
        return self.mean_prompt_tokens + float(np.square(outputs).sum() / outputs.sum()) / 2


def make_workload(
    *,
    prompt_tokens: str,
    output_tokens: str,
    variation: float,
    objectives: Objectives,
    context_length: int,
    seed: int,
) -> Workload:
    """Draw the requests, cut to the context, and a pattern of arrivals with gaps of this variation."""
    shape = WorkloadShape(
        num_requests=MOST_REQUESTS,
        prompt=parse_lengths(prompt_tokens),
        output=parse_lengths(output_tokens),
        objectives=objectives,
    )
    return Workload(
        requests=draw_requests(shape, context_length, seed),
        unit_times_s=gamma_times(rng_of(seed, ARRIVALS), MOST_REQUESTS, 1.0, variation),
        objectives=objectives,
        seed=seed,
    )
