"""The scheduler's configuration.

Owns: the settings, their defaults, help and ranges. Must not know: flags, files, environment variables.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from headway_process.addresses import check_link_address, check_metrics_address
from headway_process.ranges import check_ranges
from headway_process.settings import ExitWithParent, LogFormat, LogLevel, MetricsAddress, MetricsTokenFile
from headway_proto.wording import shown
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.choosing.policies import AUTO, POLICIES, PlacementSettings
from headway_scheduler.core.choosing.roles import roles_of
from headway_scheduler.core.memory.preemption import OFFLOADS, PREEMPTIONS
from headway_scheduler.core.policies.batching import BATCHING_POLICIES
from headway_scheduler.core.policies.reservations import RESERVATIONS
from headway_scheduler.core.policies.token_budget import TOKEN_BUDGETS
from headway_scheduler.core.state.limits import SchedulerLimits

if TYPE_CHECKING:
    OrderName: TypeAlias = str
    BatchingName: TypeAlias = str
    ReserveName: TypeAlias = str
    BudgetName: TypeAlias = str
    PreemptionName: TypeAlias = str
    OffloadName: TypeAlias = str
    PlacementName: TypeAlias = str
else:
    # A new policy is one file and one entry in its registry.
    OrderName = Literal[tuple(ORDERS)]
    BatchingName = Literal[tuple(BATCHING_POLICIES)]
    ReserveName = Literal[("auto", *RESERVATIONS)]
    BudgetName = Literal[tuple(TOKEN_BUDGETS)]
    PreemptionName = Literal[tuple(PREEMPTIONS)]
    OffloadName = Literal[tuple(OFFLOADS)]
    PlacementName = Literal[(AUTO, *POLICIES)]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Durations in seconds."""

    step_address: Annotated[
        str, Meta(description="ZeroMQ address to bind for the executor: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50052"
    ingress_address: Annotated[
        str, Meta(description="ZeroMQ address to bind for gateways: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50053"
    max_executors: Annotated[
        int, Meta(description="executors that work at the same time; any further one is a spare")
    ] = 1
    roles: Annotated[
        str,
        Meta(
            description="what each executor is for, by number, with commas: prefill, decode or both; those beyond the list "
            "are for both"
        ),
    ] = ""
    placement: Annotated[
        PlacementName,
        Meta(
            description="where requests run: aggregated (roles are ignored), disaggregated (by role), hybrid (by objectives, "
            "roles are preferences); auto: hybrid with default objectives, else by the roles, if there are any"
        ),
    ] = AUTO
    max_num_batched_tokens: Annotated[int, Meta(description="token budget of one step")] = 2048
    max_num_seqs: Annotated[int, Meta(description="requests that may run at once")] = 256
    max_steps_in_flight: Annotated[
        int,
        Meta(
            description="most steps sent and not yet answered; 0: one more than the executor works on at a time, which is "
            "one for each stage of its pipeline"
        ),
    ] = 0
    max_num_waiting: Annotated[int, Meta(description="requests that may wait; more are RESOURCE_EXHAUSTED")] = 4096
    max_waiting_tokens: Annotated[
        int, Meta(description="tokens of all requests that wait; more are RESOURCE_EXHAUSTED; 0: no limit")
    ] = 1 << 24
    max_tenant_waiting: Annotated[
        int, Meta(description="requests of one tenant that may wait; more are RESOURCE_EXHAUSTED; 0: no limit")
    ] = 0
    max_tenant_waiting_tokens: Annotated[
        int, Meta(description="tokens of one tenant's requests that wait; more are RESOURCE_EXHAUSTED; 0: no limit")
    ] = 0
    order: Annotated[
        OrderName,
        Meta(description="which request is served first: see docs/policies.md"),
    ] = "fcfs"
    batching: Annotated[
        BatchingName,
        Meta(description="which prompts and decodes share a step: see docs/policies.md"),
    ] = "chunked"
    reserve: Annotated[
        ReserveName,
        Meta(
            description="memory that must be free before a request starts: for its first chunk (none), its prompt, all of "
            "max_tokens (full), or its predicted length; auto: the batching policy's own choice"
        ),
    ] = "auto"
    budget: Annotated[
        BudgetName,
        Meta(
            description="prompt tokens in a step with decodes: up to max_num_batched_tokens (fixed), or as many as keep "
            "itl_slo_ms (slo)"
        ),
    ] = "fixed"
    preemption: Annotated[
        PreemptionName,
        Meta(description="what a preempted request does: compute again, swap to the host, or what costs less (auto)"),
    ] = "auto"
    prefix_offload: Annotated[
        OffloadName,
        Meta(
            description="copy prefixes that requests leave behind into the executor's swap space, and bring them back "
            "instead of computing them: never, always, or where that is known to be cheaper"
        ),
    ] = "off"
    aging_s: Annotated[float, Meta(description="seconds after which a waiting request may overtake the order")] = 30.0
    tenant_weights: Annotated[
        dict[str, float], Meta(description="shares of tenants with order fair, NAME=WEIGHT; other tenants have 1")
    ] = {}
    default_ttft_slo_ms: Annotated[
        int, Meta(description="ttft_slo_ms of requests without one: time to the first token; 0: no objective")
    ] = 0
    default_itl_slo_ms: Annotated[
        int, Meta(description="itl_slo_ms of requests without one: gap between tokens; 0: no objective")
    ] = 0
    shed_late: Annotated[
        bool,
        Meta(description="refuse a waiting request that can no longer meet ttft_slo_ms (RESOURCE_EXHAUSTED)"),
    ] = False
    max_decode_only_steps: Annotated[
        int,
        Meta(
            description="after so many steps in a row that only decoded while a prompt waited, the next request is urgent, "
            "and no inter-token objective keeps it out; 0: never"
        ),
    ] = 0
    protect_itl: Annotated[
        bool,
        Meta(
            description="let running requests and prompts of lower classes sit out a step that would make one of a higher "
            "class miss its itl_slo_ms"
        ),
    ] = False
    prefix_aware: Annotated[
        bool, Meta(description="of the next few requests, start the one with the longest cached prefix")
    ] = False
    prefix_wait_tokens: Annotated[
        int,
        Meta(
            description="a request waits while another one computes a common prefix of at least so many tokens, to share it; "
            "0: it does not wait"
        ),
    ] = 128
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of common prefixes")] = True
    prefix_cache_scope: Annotated[
        Literal["shared", "tenant"],
        Meta(
            description="which cached blocks a request may use: all, or only its tenant's. With tenant, no tenant can learn "
            "from response times what others have sent"
        ),
    ] = "shared"
    max_speculating_seqs: Annotated[
        int,
        Meta(description="no request speculates while more than this decode; 0: never; the executor must support it"),
    ] = 32
    max_adapters: Annotated[
        int,
        Meta(
            description="different adapters that requests may run with at once; requests with others wait, and requests "
            "without one are not counted"
        ),
    ] = 16
    curve_keys: Annotated[
        str,
        Meta(
            description="directory with scheduler.key_secret and, in executors/ and gateways/, the public keys that may "
            "connect to the step link and to the ingress"
        ),
    ] = ""
    flight_log: Annotated[
        str,
        Meta(
            description="directory for a record of every request and decision, for headway replay, explain and timeline. It "
            "holds token ids of prompts and answers, which this user and callers with the role admin can read"
        ),
    ] = ""
    flight_log_mib: Annotated[int, Meta(description="most MiB in flight_log; the oldest files are deleted first")] = 256
    grace_s: Annotated[float, Meta(description="seconds for running requests to finish after SIGTERM")] = 10.0
    metrics_address: MetricsAddress = ""
    metrics_token_file: MetricsTokenFile = ""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    exit_with_parent: ExitWithParent = False

    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "max_num_batched_tokens": (1, 1 << 24),
        "max_num_seqs": (1, 1 << 16),
        "max_executors": (1, 64),
        "max_steps_in_flight": (0, 16),
        "max_num_waiting": (1, 1 << 24),
        "max_waiting_tokens": (0, 1 << 40),
        "max_tenant_waiting": (0, 1 << 24),
        "max_tenant_waiting_tokens": (0, 1 << 40),
        "prefix_wait_tokens": (0, 1 << 24),
        "default_ttft_slo_ms": (0, 1 << 30),
        "default_itl_slo_ms": (0, 1 << 30),
        "flight_log_mib": (1, 1 << 20),
        "max_decode_only_steps": (0, 1 << 24),
        "max_speculating_seqs": (0, 1 << 16),
        "max_adapters": (1, 1 << 16),
        "grace_s": (0, math.inf),
        "aging_s": (0, math.inf),
    }

    def validate(self) -> None:
        """Check the values.

        Raises:
            ValueError: one line with the field, its value (cut at 64 characters) and what is allowed.
        """
        check_ranges(self)
        roles_of(self.roles, self.max_executors)
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"tenant_weights: {shown(tenant)}={weight} is not allowed; allowed: weights above 0")
        for field in ("step_address", "ingress_address"):
            check_link_address(field, getattr(self, field), has_keys=bool(self.curve_keys), least_port=0)
        check_metrics_address(self.metrics_address, self.metrics_token_file)
        if self.curve_keys and not (Path(self.curve_keys) / "scheduler.key_secret").is_file():
            raise ValueError(
                f"curve_keys: {shown(self.curve_keys)} is not allowed; allowed: a directory with scheduler.key_secret"
            )

    def placement_settings(self) -> PlacementSettings:
        """Return the settings of placement."""
        return PlacementSettings(self.placement, roles_of(self.roles, self.max_executors))

    def limits(self) -> SchedulerLimits:
        """Return the core's settings."""
        return SchedulerLimits(**{name: getattr(self, name) for name in SchedulerLimits.__struct_fields__})
