"""The scheduler's configuration.

Owns: the settings, their defaults, help and allowed ranges. Must not know: flags, files, environment variables.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headway_proto.addresses import check_link_address
from headway_scheduler.core.limits import SchedulerLimits


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one scheduler process. Durations in seconds."""

    step_address: Annotated[
        str, Meta(description="ZeroMQ address to bind for the executor: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50052"
    ingress_address: Annotated[
        str, Meta(description="ZeroMQ address to bind for gateways: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50053"
    max_num_batched_tokens: Annotated[int, Meta(description="token budget of one step")] = 2048
    max_num_seqs: Annotated[int, Meta(description="requests that may run at once")] = 256
    max_steps_in_flight: Annotated[int, Meta(description="steps sent to the executor and not yet answered")] = 2
    max_num_waiting: Annotated[int, Meta(description="requests that may wait; more are RESOURCE_EXHAUSTED")] = 4096
    order: Annotated[
        Literal["fcfs", "priority"], Meta(description="who is served first: by arrival, or by priority, then arrival")
    ] = "fcfs"
    batching: Annotated[
        Literal["static", "orca", "prefill_first", "chunked", "split_fuse"],
        Meta(description="which prompts and decodes share a step: see Policies in the README"),
    ] = "chunked"
    reserve: Annotated[
        Literal["auto", "none", "prompt", "full"],
        Meta(
            description="what must be free before a request starts: its first chunk, its prompt, or all up to max_tokens; "
            "auto: what the batching policy was published with"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, Meta(description="reuse the KV blocks of equal prompt beginnings")] = True
    prefix_cache_scope: Annotated[
        Literal["shared", "tenant"],
        Meta(
            description="whose blocks a request may find: everybody's, or only its own tenant's, so that no tenant can "
            "time which prompts others have sent"
        ),
    ] = "shared"
    curve_keys: Annotated[
        str,
        Meta(description="directory with scheduler.key_secret and, in clients/, the public keys allowed to connect"),
    ] = ""
    grace_s: Annotated[float, Meta(description="seconds that running requests get to finish after SIGTERM")] = 10.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe level that is logged")
    ] = "info"
    log_format: Annotated[
        Literal["console", "json"], Meta(description="console: readable lines; json: one object per line")
    ] = "console"
    exit_with_parent: Annotated[bool, Meta(description="end when the process that started this one ends")] = False

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line naming the field, its value (cut at 64 characters) and what is allowed.
        """
        for field, most in (
            ("max_num_batched_tokens", 1 << 24),
            ("max_num_seqs", 1 << 16),
            ("max_steps_in_flight", 16),
            ("max_num_waiting", 1 << 24),
        ):
            value = getattr(self, field)
            if not 1 <= value <= most:
                raise ValueError(f"{field}: {value} is not allowed; allowed: 1 to {most}")
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_s: {self.grace_s} is not allowed; allowed: 0 or more seconds")
        for field in ("step_address", "ingress_address"):
            check_link_address(field, getattr(self, field), has_keys=bool(self.curve_keys), least_port=0)
        if self.curve_keys and not (Path(self.curve_keys) / "scheduler.key_secret").is_file():
            raise ValueError(
                f"curve_keys: {self.curve_keys!r:.64} is not allowed; allowed: a directory with scheduler.key_secret"
            )

    def limits(self) -> SchedulerLimits:
        """The settings that concern the core."""
        return SchedulerLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_steps_in_flight=self.max_steps_in_flight,
            max_num_waiting=self.max_num_waiting,
            order=self.order,
            batching=self.batching,
            reserve=self.reserve,
            enable_prefix_caching=self.enable_prefix_caching,
            prefix_cache_scope=self.prefix_cache_scope,
        )
