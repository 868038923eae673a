"""The scheduler's configuration.

Owns: the settings, their defaults, help and allowed ranges. Must not know: flags, files, environment variables.
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
from headway_scheduler.core.admission.orders import ORDERS
from headway_scheduler.core.memory.preemption import PREEMPTIONS
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
else:
    # The registries are the only lists of names, so that a new policy is one file and one entry.
    OrderName = Literal[tuple(ORDERS)]
    BatchingName = Literal[tuple(BATCHING_POLICIES)]
    ReserveName = Literal[("auto", *RESERVATIONS)]
    BudgetName = Literal[tuple(TOKEN_BUDGETS)]
    PreemptionName = Literal[tuple(PREEMPTIONS)]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one scheduler process. Durations in seconds."""

    step_address: Annotated[
        str, Meta(description="ZeroMQ address to bind for the executor: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50052"
    ingress_address: Annotated[
        str, Meta(description="ZeroMQ address to bind for gateways: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50053"
    max_executors: Annotated[
        int, Meta(description="executors that work at the same time; any further one is a spare")
    ] = 1
    max_num_batched_tokens: Annotated[int, Meta(description="token budget of one step")] = 2048
    max_num_seqs: Annotated[int, Meta(description="requests that may run at once")] = 256
    max_steps_in_flight: Annotated[int, Meta(description="steps sent to the executor and not yet answered")] = 2
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
        Meta(description="who is served first: see docs/policies.md"),
    ] = "fcfs"
    batching: Annotated[
        BatchingName,
        Meta(description="which prompts and decodes share a step: see docs/policies.md"),
    ] = "chunked"
    reserve: Annotated[
        ReserveName,
        Meta(
            description="what must be free before a request starts: its first chunk, its prompt, all up to max_tokens, or "
            "what is to be expected of it; auto: what the batching policy was published with"
        ),
    ] = "auto"
    budget: Annotated[
        BudgetName,
        Meta(description="prompt tokens beside decodes: up to max_num_batched_tokens, or what keeps itl_slo_ms"),
    ] = "fixed"
    preemption: Annotated[
        PreemptionName,
        Meta(description="a preempted request is computed again, swapped to the host, or whichever costs less"),
    ] = "auto"
    aging_s: Annotated[
        float, Meta(description="seconds after which a waiting request may be promoted past the order")
    ] = 30.0
    tenant_weights: Annotated[
        dict[str, float], Meta(description="shares of tenants under order fair, NAME=WEIGHT; others have 1")
    ] = {}
    default_ttft_slo_ms: Annotated[
        int, Meta(description="objective on the first token of requests that name none; 0: none")
    ] = 0
    default_itl_slo_ms: Annotated[
        int, Meta(description="objective on the gaps between tokens of requests that name none; 0: none")
    ] = 0
    shed_late: Annotated[
        bool,
        Meta(description="end requests before they start that can no longer meet ttft_slo_ms (RESOURCE_EXHAUSTED)"),
    ] = False
    prefix_aware: Annotated[
        bool, Meta(description="of the next few requests, start the one with the longest cached prefix")
    ] = False
    prefix_wait_tokens: Annotated[
        int,
        Meta(
            description="a request waits to start while another computes so many tokens of its prompt's beginning or more, to "
            "share them; 0: it does not"
        ),
    ] = 128
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prompt beginnings")] = True
    prefix_cache_scope: Annotated[
        Literal["shared", "tenant"],
        Meta(
            description="whose blocks a request may find: everybody's, or only its own tenant's, so that no tenant can "
            "time which prompts others have sent"
        ),
    ] = "shared"
    max_speculating_seqs: Annotated[
        int,
        Meta(
            description="nobody speculates while more requests than this decode; 0: never; needs an executor that does"
        ),
    ] = 32
    curve_keys: Annotated[
        str,
        Meta(
            description="directory with scheduler.key_secret and, in executors/ and gateways/, the public keys of those who "
            "may connect to the step link and to the ingress"
        ),
    ] = ""
    flight_log: Annotated[
        str,
        Meta(
            description="directory to record every request and decision in, for headway replay, explain and timeline; it "
            "holds the token ids of prompts and answers, readable by this user and by callers with the role admin"
        ),
    ] = ""
    flight_log_mib: Annotated[int, Meta(description="most MiB that are kept in flight_log; the oldest go first")] = 256
    grace_s: Annotated[float, Meta(description="seconds that running requests get to finish after SIGTERM")] = 10.0
    metrics_address: MetricsAddress = ""
    metrics_token_file: MetricsTokenFile = ""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    exit_with_parent: ExitWithParent = False

    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "max_num_batched_tokens": (1, 1 << 24),
        "max_num_seqs": (1, 1 << 16),
        "max_executors": (1, 64),
        "max_steps_in_flight": (1, 16),
        "max_num_waiting": (1, 1 << 24),
        "max_waiting_tokens": (0, 1 << 40),
        "max_tenant_waiting": (0, 1 << 24),
        "max_tenant_waiting_tokens": (0, 1 << 40),
        "prefix_wait_tokens": (0, 1 << 24),
        "default_ttft_slo_ms": (0, 1 << 30),
        "default_itl_slo_ms": (0, 1 << 30),
        "flight_log_mib": (1, 1 << 20),
        "max_speculating_seqs": (0, 1 << 16),
        "grace_s": (0, math.inf),
        "aging_s": (0, math.inf),
    }

    def validate(self) -> None:
        """Check the values.

        Raises:
            ValueError: one line with the field, its value (cut at 64 characters) and what is allowed.
        """
        check_ranges(self)
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"tenant_weights: {tenant!r:.64}={weight} is not allowed; allowed: weights above 0")
        for field in ("step_address", "ingress_address"):
            check_link_address(field, getattr(self, field), has_keys=bool(self.curve_keys), least_port=0)
        check_metrics_address(self.metrics_address, self.metrics_token_file)
        if self.curve_keys and not (Path(self.curve_keys) / "scheduler.key_secret").is_file():
            raise ValueError(
                f"curve_keys: {self.curve_keys!r:.64} is not allowed; allowed: a directory with scheduler.key_secret"
            )

    def limits(self) -> SchedulerLimits:
        """The settings that concern the core."""
        return SchedulerLimits(**{name: getattr(self, name) for name in SchedulerLimits.__struct_fields__})
