"""The flags of ``headway simulate`` except the scheduler's."""

from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from headway_lab.simulate.device import SLOWDOWN_NOTATION, parse_slowdowns
from headway_lab.simulate.hardware import ACCELERATORS
from headway_lab.simulate.model_shapes import MODEL_SHAPES
from headway_lab.workload.options import LoadOptions
from headway_proto.wording import shown
from headway_scheduler.core.choosing.roles import Role, roles_of

MEASURED_MODEL = "measured"

if TYPE_CHECKING:
    ModelName: TypeAlias = str
    HardwareName: TypeAlias = str
else:
    # The registries are the only lists of names.
    ModelName = Literal[(*MODEL_SHAPES, MEASURED_MODEL)]
    HardwareName = Literal[tuple(ACCELERATORS)]

ModelSetting: TypeAlias = Annotated[
    ModelName, Meta(description="the model's dimensions, in bfloat16; measured: the one in --hardware-file")
]
HardwareSetting: TypeAlias = Annotated[
    HardwareName,
    Meta(description="the accelerator, in its SXM form; compute-bound: one where only arithmetic counts"),
]
HardwareFileSetting: TypeAlias = Annotated[
    str, Meta(description="an accelerator from a JSON file instead, as benchmarks/step_time_fit.py writes it")
]


def check_model(model: str, hardware_file: str) -> None:
    """Check that a measured model comes with its file.

    Raises:
        ValueError: one line that begins with the field's name.
    """
    if model == MEASURED_MODEL and not hardware_file:
        raise ValueError(f"model: {model} is not allowed without --hardware-file; allowed: another model")


class SimulationOptions(LoadOptions, frozen=True, kw_only=True):
    """Load, device and output of a simulation."""

    model: ModelSetting = "llama-3-8b"
    hardware: HardwareSetting = "h100"
    hardware_file: HardwareFileSetting = ""
    tensor_parallel: Annotated[
        int, Meta(ge=1, le=64, description="devices that share the model over NVLink, a power of two")
    ] = 1
    pipeline_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=16,
            description="stages of --tensor-parallel devices each; divides the layers. The scheduler divides "
            "the requests that decode among as many lanes",
        ),
    ] = 1
    executors: Annotated[
        int, Meta(ge=1, le=256, description="executors behind one scheduler, each with its own devices")
    ] = 1
    replicas: Annotated[
        bool,
        Meta(description="beside --executors: as many replicas with a scheduler each, which get the requests in turn"),
    ] = False
    roles: Annotated[
        str,
        Meta(
            description="beside --executors: what each is for, by number, with commas: prefill, decode or both; those beyond "
            "the list are for both"
        ),
    ] = ""
    transfer_bandwidth_gb_s: Annotated[
        float,
        Meta(ge=0, le=1e6, description="GB/s between the devices of two executors; 0: the accelerator's link"),
    ] = 0.0
    transfer_latency_us: Annotated[
        float, Meta(ge=0, le=1e9, description="microseconds before the first byte of a pull arrives")
    ] = 0.0
    transfer_direct: Annotated[
        bool,
        Meta(description="blocks go from device to device, as over RDMA, and not by way of main memory"),
    ] = False
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens per KV block, a power of two")] = 16
    num_kv_blocks: Annotated[
        int, Meta(ge=0, le=1 << 24, description="KV blocks; 0: as many as fit beside the weights")
    ] = 0
    max_model_len: Annotated[
        int, Meta(ge=0, le=1 << 24, description="most tokens per request; 0: the model's context")
    ] = 0
    host_blocks: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="KV blocks on the host, for swapping out; 0: none, or where requests are handed off as many as on "
            "the device",
        ),
    ] = 0
    host_bandwidth_gb_s: Annotated[
        float, Meta(ge=0, le=1e6, description="GB/s between each device and the host; 0: the accelerator's")
    ] = 0.0
    num_speculative_tokens: Annotated[
        int,
        Meta(ge=0, le=64, description="most tokens that the device proposes for a request in one step; 0: none"),
    ] = 0
    speculative_acceptance: Annotated[
        float, Meta(ge=0, le=1, description="probability that a proposed token is right if those before it were")
    ] = 0.7
    noise: Annotated[float, Meta(ge=0, le=10, description="standard deviation of step times over their mean")] = 0.0
    slowdown: Annotated[
        tuple[str, ...], Meta(description=f"steps take longer from a time on: {SLOWDOWN_NOTATION}, as 30:1.5")
    ] = ()
    max_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=1 << 24,
            description="limit that is sent with each request, so that the scheduler does not know where an answer stops; "
            "0: the answer's length",
        ),
    ] = 0
    sweep_budget: Annotated[
        tuple[int, ...], Meta(description="a case per value of max_num_batched_tokens, and the knee among them")
    ] = ()
    compare: Annotated[
        dict[str, str],
        Meta(
            description="a case per value of one of the scheduler's limits or of placement, as order=fcfs,priority; alone: static, orca "
            "and chunked batching as published, beside the published figures"
        ),
    ] = msgspec.field(default_factory=dict)
    json: Annotated[str, Meta(description="write the result to this file, with every request and step")] = ""
    png: Annotated[str, Meta(description="draw the result to this file; needs matplotlib")] = ""

    def validate(self) -> None:
        """See ``LoadOptions.validate``."""
        super().validate()
        try:
            parse_slowdowns(self.slowdown)
        except ValueError as error:
            raise ValueError(f"slowdown: {error}") from None
        check_model(self.model, self.hardware_file)
        if self.replicas and self.executors == 1:
            raise ValueError("replicas: true is not allowed with one executor; allowed: --executors of 2 or more")
        if self.roles and self.executors == 1:
            raise ValueError(
                f"roles: {shown(self.roles)} is not allowed with one executor; allowed: --executors of 2 or more"
            )
        if self.roles and self.replicas:
            raise ValueError(f"roles: {shown(self.roles)} is not allowed beside --replicas; allowed: one of them")
        roles_of(self.roles, self.executors)
        for field in ("tensor_parallel", "block_size"):
            value = getattr(self, field)
            if value & (value - 1):
                raise ValueError(f"{field}: {value} is not allowed; allowed: a power of two")

    @property
    def executor_roles(self) -> tuple[Role, ...]:
        """The role of each executor."""
        given = roles_of(self.roles, self.executors)
        return given + (Role.BOTH,) * (self.executors - len(given))
