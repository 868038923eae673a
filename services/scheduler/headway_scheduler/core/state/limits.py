"""What bounds the scheduler: the operator's settings and what the executor can hold.

Owns: the settings of the core. Must not know: where they come from.
"""

import msgspec

from headway_proto.step import BackendInfo


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's settings.

    ``max_num_batched_tokens`` tokens per step; ``max_num_seqs`` requests at once; ``max_steps_in_flight`` steps sent
    and not yet answered; ``max_num_waiting`` requests in the queue, of ``max_waiting_tokens`` tokens in all, and
    ``max_tenant_waiting`` and ``max_tenant_waiting_tokens`` of each tenant, where 0 is no limit; ``order`` a name in ``ORDERS``; ``batching`` a name in
    ``BATCHING_POLICIES``; ``reserve`` a name in ``RESERVATIONS``, or "auto" for the batching policy's own; ``budget`` a name
    in ``TOKEN_BUDGETS``; ``preemption`` a name in ``PREEMPTIONS``.

    ``aging_s``: seconds after which a request that waits, or a prompt of which nothing runs, may be promoted.
    ``tenant_weights``: shares under the order ``fair``, 1 for tenants that are not named. ``default_ttft_slo_ms`` and ``default_itl_slo_ms``: objectives of requests
    that name none, 0 for none. ``shed_late``: requests that can no longer meet the objective on their first token are ended
    before they start. ``prefix_aware``: of requests that the order hardly tells apart, the one with the longest
    cached prefix starts first. ``prefix_cache_scope``: "shared", or "tenant" if requests of different tenants shall not
    share cached blocks. ``prefix_wait_tokens``: a request does not start while another computes so many tokens of its prompt
    or more that it could then find cached; 0: it never waits for that. ``max_speculating_seqs``: nobody speculates while more
    requests decode.
    """

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_steps_in_flight: int = 2
    max_num_waiting: int = 4096
    max_waiting_tokens: int = 1 << 24
    max_tenant_waiting: int = 0
    max_tenant_waiting_tokens: int = 0
    order: str = "fcfs"
    batching: str = "chunked"
    reserve: str = "auto"
    budget: str = "fixed"
    preemption: str = "auto"
    aging_s: float = 30.0
    tenant_weights: dict[str, float] = {}
    default_ttft_slo_ms: int = 0
    default_itl_slo_ms: int = 0
    shed_late: bool = False
    enable_prefix_caching: bool = True
    prefix_aware: bool = False
    prefix_cache_scope: str = "shared"
    prefix_wait_tokens: int = 128
    max_speculating_seqs: int = 32


class ExecutorCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What the executor can hold.

    ``num_blocks`` blocks of ``block_size`` tokens; requests of ``max_model_len`` tokens; ``max_num_rows`` requests at once;
    ``num_host_blocks`` blocks beside the device, into which others can be swapped out, at ``swap_us_per_block`` microseconds each way, 0 if unknown;
    ``max_num_batched_tokens`` tokens in one step, 0 if it sets no limit. ``supports_prompt_logprobs``: whether it reports log
    probabilities of prompts; ``supports_constraints``: whether outputs may be constrained; ``max_speculative_tokens`` tokens
    that it proposes for a row in one step, 0 if it does not speculate.
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

    @classmethod
    def of(cls, info: BackendInfo) -> "ExecutorCapacity":
        """That of an executor that announces ``info``, where everything here has the same name."""
        return cls(**{name: getattr(info, name) for name in cls.__struct_fields__})

    @property
    def max_request_tokens(self) -> int:
        """The most tokens one request may come to: its last token needs no place in the pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)

    def most_batched_tokens(self, wanted: int) -> int:
        """The token budget of a step that the operator sets at ``wanted``."""
        return min(wanted, self.max_num_batched_tokens) if self.max_num_batched_tokens else wanted
