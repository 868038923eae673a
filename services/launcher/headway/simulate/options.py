"""The flags of ``headway simulate`` but for the scheduler's own.

Owns: what can be simulated, defaults, help and allowed ranges. Must not know: how any of it is simulated.
"""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from headway.simulate.device import SLOWDOWN_NOTATION, parse_slowdowns
from headway.simulate.hardware import ACCELERATORS
from headway.simulate.lengths import NOTATION, parse_lengths
from headway.simulate.model_shapes import MODEL_SHAPES
from headway.simulate.workload import MOST_OBJECTIVE_MS, TENANT_NOTATION, Objectives, parse_tenants

MEASURED_MODEL = "measured"

if TYPE_CHECKING:
    ModelName: TypeAlias = str
    HardwareName: TypeAlias = str
else:
    # What exists is told in one place each.
    ModelName = Literal[(*MODEL_SHAPES, MEASURED_MODEL)]
    HardwareName = Literal[tuple(ACCELERATORS)]


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Device, workload and output of a simulation."""

    model: Annotated[
        ModelName, Meta(description="the model's dimensions, in bfloat16; measured: the one in --hardware-file")
    ] = "llama-3-8b"
    hardware: Annotated[
        HardwareName,
        Meta(description="the accelerator, in its SXM form; compute-bound: one where only arithmetic counts"),
    ] = "h100"
    hardware_file: Annotated[
        str, Meta(description="an accelerator from a JSON file instead, as benchmarks/step_time_fit.py writes it")
    ] = ""
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=64, description="devices that share the model over NVLink, a power of two")
    ] = 1
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens per KV block, a power of two")] = 16
    num_kv_blocks: Annotated[int, Meta(ge=0, le=1 << 24, description="KV blocks; 0: what fits beside the weights")] = 0
    max_model_len: Annotated[
        int, Meta(ge=0, le=1 << 24, description="tokens per request at most; 0: the model's context")
    ] = 0
    host_blocks: Annotated[
        int, Meta(ge=0, le=1 << 24, description="KV blocks on the host that others can be swapped out into")
    ] = 0
    host_bandwidth_gb_s: Annotated[
        float, Meta(ge=0, le=1e6, description="GB/s between each device and the host; 0: the accelerator's")
    ] = 0.0
    noise: Annotated[
        float, Meta(ge=0, le=10, description="standard deviation of step times over their mean, drawn by --seed")
    ] = 0.0
    slowdown: Annotated[
        tuple[str, ...], Meta(description=f"steps take longer from a time on: {SLOWDOWN_NOTATION}, as 30:1.5")
    ] = ()
    arrivals: Annotated[
        Literal["closed", "poisson", "gamma"],
        Meta(description="closed: users who wait for their answer; poisson and gamma: at --rate, the latter in bursts"),
    ] = "closed"
    users: Annotated[int, Meta(ge=1, le=1 << 20, description="users of closed arrivals")] = 32
    think_s: Annotated[float, Meta(ge=0, le=1e6, description="pause of a user after an answer, in seconds")] = 0.0
    rate: Annotated[float, Meta(gt=0, le=1e6, description="requests per second of poisson and gamma arrivals")] = 1.0
    variation: Annotated[
        float,
        Meta(ge=0.01, le=100, description="of gamma arrivals: standard deviation of the gaps over their mean"),
    ] = 3.0
    trace: Annotated[
        str, Meta(description="requests from a JSON Lines file with arrival_s, prompt_tokens and output_tokens")
    ] = ""
    num_requests: Annotated[int, Meta(ge=1, le=1 << 24, description="requests in all")] = 512
    warmup_requests: Annotated[int, Meta(ge=0, description="leave the first N out of latencies and throughput")] = 0
    prompt_tokens: Annotated[str, Meta(description=f"a prompt's own tokens: {NOTATION}")] = "512"
    output_tokens: Annotated[str, Meta(description="an answer's tokens, in the same notation")] = "128"
    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="limit that is sent with each request, so that the scheduler does not know where an answer stops; "
            "0: the answer's length",
        ),
    ] = 0
    prefixes: Annotated[int, Meta(ge=1, le=1 << 20, description="different shared beginnings of prompts")] = 1
    prefix_tokens: Annotated[int, Meta(ge=0, le=1 << 20, description="tokens of a shared beginning; 0: none")] = 0
    tenants: Annotated[
        dict[str, str],
        Meta(
            description="who sends which share of the requests (of open arrivals, of the rate), and perhaps with which "
            f"priority and objectives: {TENANT_NOTATION}, as chat=3:high:500:50"
        ),
    ] = {}
    ttft_slo_ms: Annotated[
        int, Meta(ge=0, le=MOST_OBJECTIVE_MS, description="objective of the time to the first token, in ms; 0: none")
    ] = 0
    itl_slo_ms: Annotated[
        int, Meta(ge=0, le=MOST_OBJECTIVE_MS, description="objective of each further gap, in ms; 0: none")
    ] = 0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62, description="of everything that is drawn")] = 0
    sweep_budget: Annotated[
        tuple[int, ...], Meta(description="a case per value of max_num_batched_tokens, and the knee among them")
    ] = ()
    compare: Annotated[
        dict[str, str],
        Meta(
            description="a case per value of one of the scheduler's limits, as order=fcfs,priority; alone: static, orca "
            "and chunked batching as published, beside the published figures"
        ),
    ] = {}
    json: Annotated[str, Meta(description="write the result to this file, with every request and step")] = ""
    png: Annotated[str, Meta(description="draw the result to this file; needs matplotlib")] = ""

    @property
    def objectives(self) -> Objectives:
        """Those of a request that names none of its own."""
        return Objectives(ttft_slo_ms=self.ttft_slo_ms, itl_slo_ms=self.itl_slo_ms)

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line that begins with the field's name.
        """
        for field in ("prompt_tokens", "output_tokens"):
            try:
                parse_lengths(getattr(self, field))
            except ValueError as error:
                raise ValueError(f"{field}: {error}") from None
        try:
            parse_tenants(self.tenants)
        except ValueError as error:
            raise ValueError(f"tenants: {error}") from None
        try:
            parse_slowdowns(self.slowdown)
        except ValueError as error:
            raise ValueError(f"slowdown: {error}") from None
        if self.model == MEASURED_MODEL and not self.hardware_file:
            raise ValueError(f"model: {self.model} is not allowed without --hardware-file; allowed: another model")
        for field in ("tensor_parallel", "block_size"):
            value = getattr(self, field)
            if value & (value - 1):
                raise ValueError(f"{field}: {value} is not allowed; allowed: a power of two")
        if self.warmup_requests >= self.num_requests and not self.trace:
            raise ValueError(
                f"warmup_requests: {self.warmup_requests} is not allowed; "
                f"allowed: fewer than num_requests, {self.num_requests}"
            )
