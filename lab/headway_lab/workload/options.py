"""The flags of a load. Must not know: what serves it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headway.flags.configuration import Layer
from headway.flags.settings import ConfigurationError
from headway_lab.workload.lengths import NOTATION, check_lengths
from headway_lab.workload.requests import MOST_OBJECTIVE_MS, TENANT_NOTATION, Objectives, parse_tenants


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests there are, and when they come."""

    arrivals: Annotated[
        Literal["closed", "poisson", "gamma"],
        Meta(
            description="closed: users wait for their answers; poisson and gamma: requests come at --rate, with gamma in bursts"
        ),
    ] = "closed"
    users: Annotated[int, Meta(ge=1, le=1 << 20, description="users of closed arrivals")] = 32
    think_s: Annotated[float, Meta(ge=0, le=1e6, description="pause of a user after an answer, in seconds")] = 0.0
    ramp_s: Annotated[float, Meta(ge=0, le=1e6, description="users of closed arrivals start over this time")] = 0.0
    rate: Annotated[float, Meta(gt=0, le=1e6, description="requests per second of poisson and gamma arrivals")] = 1.0
    variation: Annotated[
        float,
        Meta(ge=0.01, le=100, description="standard deviation of the gaps of gamma arrivals, over their mean"),
    ] = 3.0
    trace: Annotated[
        str, Meta(description="requests from a JSON Lines file with arrival_s, prompt_tokens and output_tokens")
    ] = ""
    num_requests: Annotated[int, Meta(ge=1, le=1 << 24, description="requests in all")] = 512
    warmup_requests: Annotated[int, Meta(ge=0, description="leave the first N out of latencies and throughput")] = 0
    prompt_tokens: Annotated[str, Meta(description=f"a prompt's own tokens: {NOTATION}")] = "512"
    output_tokens: Annotated[str, Meta(description="an answer's tokens, in the same notation")] = "128"
    prefixes: Annotated[int, Meta(ge=1, le=1 << 20, description="different shared beginnings of prompts")] = 1
    prefix_tokens: Annotated[int, Meta(ge=0, le=1 << 20, description="tokens of a shared beginning; 0: none")] = 0
    tenants: Annotated[
        dict[str, str],
        Meta(
            description="the share of the requests that each tenant sends (of open arrivals, of the rate), and perhaps its "
            f"priority and objectives: {TENANT_NOTATION}, as chat=3:high:500:50"
        ),
    ] = {}
    ttft_slo_ms: Annotated[
        int, Meta(ge=0, le=MOST_OBJECTIVE_MS, description="objective of the time to the first token, in ms; 0: none")
    ] = 0
    itl_slo_ms: Annotated[
        int, Meta(ge=0, le=MOST_OBJECTIVE_MS, description="objective of each further gap, in ms; 0: none")
    ] = 0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62, description="seed of all random draws")] = 0

    @property
    def objectives(self) -> Objectives:
        """The objectives of requests that name none."""
        return Objectives(ttft_slo_ms=self.ttft_slo_ms, itl_slo_ms=self.itl_slo_ms)

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line that begins with the field's name.
        """
        check_lengths(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
        try:
            parse_tenants(self.tenants)
        except ValueError as error:
            raise ValueError(f"tenants: {error}") from None
        if self.warmup_requests >= self.num_requests and not self.trace:
            raise ValueError(
                f"warmup_requests: {self.warmup_requests} is not allowed; "
                f"allowed: fewer than num_requests, {self.num_requests}"
            )


def check_rate(given: Layer, options: LoadOptions) -> None:
    """Check that a rate that was asked for is one that the load has.

    Raises:
        ConfigurationError: it has none, or the trace says when requests come.
    """
    for name in ("arrivals", "rate", "variation"):
        if name not in given:
            continue
        flag = given[name].origin
        if options.trace:
            raise ConfigurationError(
                f"{flag}: is not allowed beside --trace, which has the arrivals; allowed: one of them"
            )
        if options.arrivals == "closed" and name != "arrivals":
            raise ConfigurationError(
                f"{flag}: is not allowed with closed arrivals, whose users wait for their answers; allowed: with "
                "--arrivals poisson or gamma"
            )
        if options.arrivals == "poisson" and name == "variation":
            raise ConfigurationError(f"{flag}: is not allowed with poisson arrivals; allowed: with --arrivals gamma")
