"""The load that options describe: its requests, and when they come."""

from collections.abc import Sequence
from typing import Self

import msgspec

from headway.flags.settings import ConfigurationError
from headway_lab.workload.arrivals import Arrivals, ClosedArrivals, OpenArrivals, gamma_times
from headway_lab.workload.lengths import parse_lengths
from headway_lab.workload.options import LoadOptions
from headway_lab.workload.requests import (
    ARRIVALS,
    PlannedRequest,
    WorkloadShape,
    cut_note,
    draw_requests,
    parse_tenants,
    rng_of,
)
from headway_lab.workload.trace import read_trace

_POISSON_VARIATION = 1.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests in the order of sending; ``times_s`` is None if users wait for answers."""

    options: LoadOptions
    requests: Sequence[PlannedRequest]
    times_s: Sequence[float] | None
    context_length: int

    @property
    def asked_requests_per_s(self) -> float | None:
        """The rate of open arrivals, or of a trace."""
        if self.times_s is None:
            return None
        if not self.options.trace:
            return self.options.rate
        span_s = self.times_s[-1] - self.times_s[0]
        return (len(self.times_s) - 1) / span_s if span_s else None

    @property
    def title(self) -> str:
        """How many requests there are, and how they arrive, in a few words."""
        count = len(self.requests)
        cut = cut_note(self.requests, self.context_length)
        return f"{count} request{'s' * (count != 1)}{cut}, {self._arrivals_title}"

    @property
    def _arrivals_title(self) -> str:
        options = self.options
        if options.trace:
            return f"trace {options.trace}"
        if options.arrivals == "closed":
            return f"{options.users} users" + f" who think for {options.think_s:g} s" * (options.think_s > 0)
        return f"{options.arrivals} arrivals at {options.rate:g}/s"

    def arrivals(self) -> Arrivals:
        """Return a fresh source of the requests."""
        if self.times_s is None:
            return ClosedArrivals(self.requests, self.options.users, self.options.think_s, self.options.ramp_s)
        return OpenArrivals(self.requests, self.times_s)

    def share(self, index: int, count: int) -> Self:
        """Return a client's every ``count``-th request, and its share of the users."""
        users = len(range(index, self.options.users, count))
        return msgspec.structs.replace(
            self,
            options=msgspec.structs.replace(self.options, users=users) if self.times_s is None else self.options,
            requests=self.requests[index::count],
            times_s=None if self.times_s is None else self.times_s[index::count],
        )


def make_load(options: LoadOptions, context_length: int) -> Load:
    """Draw the load, or read its trace. Drawn requests are cut to the context.

    Raises:
        ConfigurationError: the load does not fit the model, or the trace is unusable.
    """
    if options.trace:
        requests, times_s = read_trace(options.trace, options.objectives)
        if options.warmup_requests >= len(requests):
            raise ConfigurationError(
                f"--warmup-requests: {options.warmup_requests} is not allowed; "
                f"allowed: fewer than the trace has, {len(requests)}"
            )
        return Load(options=options, requests=requests, times_s=times_s, context_length=context_length)
    if options.prefix_tokens > context_length - 2:
        raise ConfigurationError(
            f"--prefix-tokens: {options.prefix_tokens} is not allowed; allowed: at most {max(context_length - 2, 0)}, "
            "so that a prompt and an answer fit beside it"
        )
    shape = WorkloadShape(
        num_requests=options.num_requests,
        prompt=parse_lengths(options.prompt_tokens),
        output=parse_lengths(options.output_tokens),
        num_prefixes=options.prefixes,
        num_prefix_tokens=options.prefix_tokens,
        tenants=parse_tenants(options.tenants, options.objectives),
        objectives=options.objectives,
    )
    requests = draw_requests(shape, context_length, options.seed)
    return Load(options=options, requests=requests, times_s=_arrival_times(options), context_length=context_length)


def _arrival_times(options: LoadOptions) -> list[float] | None:
    if options.arrivals == "closed":
        return None
    variation = options.variation if options.arrivals == "gamma" else _POISSON_VARIATION
    times: list[float] = gamma_times(
        rng_of(options.seed, ARRIVALS), options.num_requests, options.rate, variation
    ).tolist()
    return times
