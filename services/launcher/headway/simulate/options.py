"""The flags of ``headway simulate`` but for the scheduler's own.

Owns: what can be simulated, defaults, help and allowed ranges. Must not know: how any of it is simulated.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from headway.simulate.lengths import NOTATION, parse_lengths
from headway.simulate.workload import parse_tenants

ModelName: TypeAlias = Literal["llama-2-7b", "llama-3-8b", "llama-2-70b", "llama-3-70b"]
HardwareName: TypeAlias = Literal["a100-80g", "h100", "h200"]


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Device, workload and output of a simulation."""

    model: Annotated[ModelName, Meta(description="the model's dimensions, in bfloat16")] = "llama-3-8b"
    hardware: Annotated[HardwareName, Meta(description="the accelerator, in its SXM form")] = "h100"
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=64, description="devices that share the model over NVLink, a power of two")
    ] = 1
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens per KV block, a power of two")] = 16
    num_kv_blocks: Annotated[int, Meta(ge=0, le=1 << 24, description="KV blocks; 0: what fits beside the weights")] = 0
    max_model_len: Annotated[
        int, Meta(ge=0, le=1 << 24, description="tokens per request at most; 0: the model's context")
    ] = 0
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
    prefixes: Annotated[int, Meta(ge=1, le=1 << 20, description="different shared beginnings of prompts")] = 1
    prefix_tokens: Annotated[int, Meta(ge=0, le=1 << 20, description="tokens of a shared beginning; 0: none")] = 0
    tenants: Annotated[
        dict[str, str], Meta(description="who sends: a name, a share and perhaps a priority, as chat=3:high")
    ] = {}
    seed: Annotated[int, Meta(ge=0, lt=1 << 62, description="of everything that is drawn")] = 0
    sweep_budget: Annotated[
        tuple[int, ...], Meta(description="a case per value of max_num_batched_tokens, and the knee among them")
    ] = ()
    compare: Annotated[
        dict[str, str], Meta(description="a case per value of one of the scheduler's limits, as order=fcfs,priority")
    ] = {}
    json: Annotated[str, Meta(description="write the result to this file, with every request and step")] = ""
    png: Annotated[str, Meta(description="draw the result to this file; needs matplotlib")] = ""

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
        for field in ("tensor_parallel", "block_size"):
            value = getattr(self, field)
            if value & (value - 1):
                raise ValueError(f"{field}: {value} is not allowed; allowed: a power of two")
        if self.warmup_requests >= self.num_requests and not self.trace:
            raise ValueError(
                f"warmup_requests: {self.warmup_requests} is not allowed; "
                f"allowed: fewer than num_requests, {self.num_requests}"
            )
