"""The flags of ``headway plan``."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headway_lab.simulate.options import HardwareFileSetting, HardwareSetting, ModelSetting, check_model
from headway_lab.workload.lengths import NOTATION, check_lengths
from headway_lab.workload.requests import MOST_OBJECTIVE_MS, Objectives

FAST: Literal["fast"] = "fast"
EACH_GAP: Literal["each"] = "each"
MEAN_GAP: Literal["mean"] = "mean"


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Load, objectives, devices and output of a plan."""

    rate: Annotated[float, Meta(gt=0, le=1e5, description="requests per second that the plan is for")]
    ttft_slo_ms: Annotated[
        int, Meta(ge=1, le=MOST_OBJECTIVE_MS, description="objective of the time to the first token, in ms")
    ]
    itl_slo_ms: Annotated[int, Meta(ge=1, le=MOST_OBJECTIVE_MS, description="objective of each further gap, in ms")]
    gaps: Annotated[
        Literal["each", "mean"],
        Meta(
            description="each: every gap of a request keeps --itl-slo-ms, the hand-off's too, as goodput counts elsewhere; "
            "mean: their mean does, as in DistServe (TPOT)"
        ),
    ] = EACH_GAP
    attainment: Annotated[
        float, Meta(ge=0.01, le=0.999, description="share of the requests that keep both objectives")
    ] = 0.9
    model: ModelSetting = "llama-3-8b"
    hardware: HardwareSetting = "h100"
    hardware_file: HardwareFileSetting = ""
    devices: Annotated[int, Meta(ge=1, le=4096, description="most devices in all")] = 64
    devices_per_node: Annotated[
        int, Meta(ge=1, le=64, description="devices that a fast link connects; tensor parallelism stays among them")
    ] = 8
    most_stages: Annotated[
        int, Meta(ge=1, le=16, description="most stages of a pipeline; 1 beside --devices-per-node 1: one device each")
    ] = 16
    interconnect: Annotated[
        Literal["fast", "slow"],
        Meta(
            description="fast: keys and values go between any two nodes; slow: executors for prefill and decode share "
            "nodes, stage by stage"
        ),
    ] = FAST
    transfer_bandwidth_gb_s: Annotated[
        float,
        Meta(ge=0, le=1e6, description="GB/s from node to node; 0: 50 if fast (400 Gbit/s), 3.125 if slow (25 Gbit/s)"),
    ] = 0.0
    prompt_tokens: Annotated[str, Meta(description=f"a prompt's tokens: {NOTATION}")] = "512"
    output_tokens: Annotated[str, Meta(description="an answer's tokens, in the same notation")] = "128"
    variation: Annotated[
        float,
        Meta(
            ge=0.01,
            le=100,
            description="standard deviation of the gaps between arrivals, over their mean; 1: Poisson, above: bursts",
        ),
    ] = 1.0
    num_requests: Annotated[
        int, Meta(ge=50, le=4096, description="fewest requests of a trial; where answers are long, it takes more")
    ] = 300
    max_num_batched_tokens: Annotated[
        int, Meta(ge=16, le=1 << 20, description="the schedulers' tokens per step; see headway scheduler")
    ] = 2048
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=4096, description="an executor's most running requests; see headway scheduler")
    ] = 256
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens per KV block, a power of two")] = 16
    seed: Annotated[int, Meta(ge=0, lt=1 << 62, description="seed of all random draws")] = 0
    json: Annotated[str, Meta(description="write the plan to this file, with every trial")] = ""
    deployment: Annotated[
        str, Meta(description="write what was found to this TOML file, for headway serve and headway cluster")
    ] = ""
    png: Annotated[str, Meta(description="draw the plan to this file; needs matplotlib")] = ""

    @property
    def objectives(self) -> Objectives:
        """The objectives of all requests."""
        return Objectives(ttft_slo_ms=self.ttft_slo_ms, itl_slo_ms=self.itl_slo_ms)

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line that begins with the field's name.
        """
        check_lengths(prompt_tokens=self.prompt_tokens, output_tokens=self.output_tokens)
        check_model(self.model, self.hardware_file)
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size: {self.block_size} is not allowed; allowed: a power of two")
