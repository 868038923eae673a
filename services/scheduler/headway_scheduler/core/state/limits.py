"""The operator's settings and the executor's capacity.

Owns: the core's settings. Must not know: where they come from.
"""

import msgspec

from headway_proto.pooling import NO_POOLING
from headway_proto.step import BackendInfo


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """``docs/settings.md`` explains each. Policies are names in their registries."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_steps_in_flight: int = 0
    max_num_waiting: int = 4096
    max_waiting_tokens: int = 1 << 24
    max_tenant_waiting: int = 0
    max_tenant_waiting_tokens: int = 0
    order: str = "fcfs"
    batching: str = "chunked"
    reserve: str = "auto"
    budget: str = "fixed"
    preemption: str = "auto"
    prefix_offload: str = "off"
    aging_s: float = 30.0
    tenant_weights: dict[str, float] = {}
    default_ttft_slo_ms: int = 0
    default_itl_slo_ms: int = 0
    shed_late: bool = False
    protect_itl: bool = False
    max_decode_only_steps: int = 0
    enable_prefix_caching: bool = True
    prefix_aware: bool = False
    prefix_cache_scope: str = "shared"
    prefix_wait_tokens: int = 128
    max_speculating_seqs: int = 32
    max_adapters: int = 16

    def fitting(self, capacity: "ExecutorCapacity") -> "SchedulerLimits":
        """The same, without what an executor cannot do: where rows keep states, no row may begin with another's blocks."""
        return msgspec.structs.replace(self, enable_prefix_caching=False) if capacity.keeps_states else self

    def steps_in_flight(self, num_lanes: int) -> int:
        """The most steps sent to an executor and not answered; by default one more than it can work on at a time."""
        return self.max_steps_in_flight or num_lanes + 1


class ExecutorCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor announces.

    Zeros: ``swap_us_per_block`` (one way) unknown, ``max_num_batched_tokens`` unlimited, ``max_speculative_tokens``
    (per row and step) no speculation. ``host_pool``, ``block_addresses``, ``num_lanes`` and what follows: see
    ``BackendInfo``.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_rows: int
    num_host_blocks: int = 0
    swap_us_per_block: float = 0.0
    max_num_batched_tokens: int = 0
    supports_prompt_logprobs: bool = False
    supports_constraints: bool = False
    max_speculative_tokens: int = 0
    host_pool: str = ""
    block_addresses: tuple[str, ...] = ()
    num_lanes: int = 1
    supports_adapters: bool = False
    embedding_size: int = 0
    default_pooling: int = NO_POOLING
    generates: bool = True
    keeps_states: bool = False

    @classmethod
    def of(cls, info: BackendInfo) -> "ExecutorCapacity":
        """The capacity in ``info``."""
        return cls(**{name: getattr(info, name) for name in cls.__struct_fields__})

    @property
    def max_request_tokens(self) -> int:
        """The most tokens of one request; the last needs no place in the pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def most_batched_tokens(self, wanted: int) -> int:
        """The token budget if the operator wants ``wanted``."""
        return min(wanted, self.max_num_batched_tokens) if self.max_num_batched_tokens else wanted
