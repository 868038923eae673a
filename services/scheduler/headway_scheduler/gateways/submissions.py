"""Submissions before they reach the core.

Owns: their checks and early queue. Must not know: links, the core's rules.
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headway_proto import ingress
from headway_proto.columns import INT32, decode_column
from headway_proto.ingress import Rejected, Submit, SubmitPooled
from headway_proto.pooling import NO_POOLING, is_known
from headway_proto.sampling import violations
from headway_proto.wording import shown
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import SchedulerLimits

MAX_REQUEST_ID_BYTES = 128
MAX_TENANT_BYTES = 128
MAX_TRACEPARENT_CHARACTERS = 128
_ANY_VOCABULARY = 1 << 31


class Problem(NamedTuple):
    """Why a submission is refused. ``field`` may be empty."""

    reason: str
    field: str
    message: str

    def rejection(self, handle: int, retry_s: float = 0.0) -> Rejected:
        """Make the gateway's answer."""
        retry_ms = round(retry_s * 1e3)
        return Rejected(
            handle=handle, reason=self.reason, field=self.field, message=self.message, retry_after_ms=retry_ms
        )


class EarlySubmissions:
    """Submissions before an executor joins."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._submits: dict[Origin, Submit] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._submits)

    def __contains__(self, origin: Origin) -> bool:
        return origin in self._submits

    def is_full_for(self, submit: Submit) -> bool:
        """Whether this one finds no room; an empty queue has room."""
        if not self._submits:
            return False
        if len(self._submits) >= self._limits.max_num_waiting:
            return True
        num_bytes = self._num_bytes + len(submit.token_ids)
        return 0 < self._limits.max_waiting_tokens < num_bytes // INT32.itemsize

    def add(self, owner: int, submit: Submit) -> None:
        """Keep a submission."""
        origin = Origin(owner, submit.handle)
        self.remove(origin)
        self._submits[origin] = submit
        self._num_bytes += len(submit.token_ids)

    def remove(self, origin: Origin) -> None:
        """Remove a submission, if present."""
        submit = self._submits.pop(origin, None)
        if submit is not None:
            self._num_bytes -= len(submit.token_ids)

    def take_of_owner(self, owner: int) -> list[Submit]:
        """Remove and return one link's submissions."""
        found = {origin: submit for origin, submit in self._submits.items() if origin.owner == owner}
        for origin in found:
            self.remove(origin)
        return list(found.values())

    def take(self) -> list[tuple[int, Submit]]:
        """Remove all; return (owner, submission) by arrival."""
        taken = [(origin.owner, submit) for origin, submit in self._submits.items()]
        self._submits.clear()
        self._num_bytes = 0
        return taken


def problem_of(submit: Submit, vocab_size: int | None) -> Problem | None:
    """``vocab_size`` is None before an executor joins."""
    num_bytes = len(submit.token_ids)
    if num_bytes % INT32.itemsize or not num_bytes:
        return Problem(ingress.REJECT_INVALID, "token_ids", f"{num_bytes} bytes are no int32 column")
    for field, value, allowed in _wrong_fields(submit):
        return Problem(ingress.REJECT_INVALID, field, f"{shown(value)} is not allowed; allowed: {allowed}")
    num_held = num_bytes // INT32.itemsize - submit.num_prompt_tokens
    if num_held >= submit.max_tokens:
        message = f"{num_held} tokens held of max_tokens {submit.max_tokens}"
        return Problem(ingress.REJECT_OUT_OF_RANGE, "resume", message)
    for field, message in violations(submit.sampling, _ANY_VOCABULARY if vocab_size is None else vocab_size):
        return Problem(ingress.REJECT_INVALID, field, message)
    return None


def _wrong_fields(submit: Submit) -> Iterator[tuple[str, object, str]]:
    """Each field that is wrong by itself, its value, and what is allowed."""
    pooling, max_tokens, min_tokens = pooling_of(submit), submit.max_tokens, submit.sampling.min_tokens
    if not 0 <= submit.handle < 1 << 31:
        yield "handle", submit.handle, "0 to 2^31 - 1"
    if len(submit.request_id.encode()) > MAX_REQUEST_ID_BYTES:
        yield "request_id", submit.request_id, "128 bytes"
    if len(submit.traceparent) > MAX_TRACEPARENT_CHARACTERS:
        yield "traceparent", submit.traceparent, "128 characters"
    if len(submit.tenant.encode()) > MAX_TENANT_BYTES:
        yield "tenant", submit.tenant, "128 bytes"
    if max_tokens < 1:
        yield "max_tokens", max_tokens, "1 or more"
    if not is_known(pooling):
        yield "pooling", pooling, "a number of headway_proto.pooling"
    if pooling != NO_POOLING and max_tokens != 1:
        yield "max_tokens", max_tokens, "1 with a pooling"
    if min_tokens > max_tokens:
        yield "min_tokens", min_tokens, f"at most max_tokens, {max_tokens}"
    if not ingress.PRIORITY_REALTIME <= submit.priority <= ingress.PRIORITY_LOW:
        yield "priority", submit.priority, "1 to 4"


def pooling_of(submit: Submit) -> int:
    """Return how the vector that it wants is made; ``NO_POOLING`` if it wants tokens."""
    return submit.pooling if isinstance(submit, SubmitPooled) else NO_POOLING


def new_request(owner: int, submit: Submit, eos_token_ids: tuple[int, ...], adapter: str) -> NewRequestEvent:
    """Convert for the core. ``adapter``: the identity of the one that is named."""
    sampling = submit.sampling
    stops = set(sampling.stop_token_ids)
    if not submit.ignore_eos:
        stops.update(eos_token_ids)
    # The executor needs the stop ids only to forbid them until min_tokens is reached.
    forbidden = tuple(sorted(stops)) if sampling.min_tokens else ()
    if forbidden != sampling.stop_token_ids:
        sampling = msgspec.structs.replace(sampling, stop_token_ids=forbidden)
    return NewRequestEvent(
        origin=Origin(owner, submit.handle),
        request_id=submit.request_id,
        index=submit.index,
        token_ids=decode_column(submit.token_ids),
        num_prompt_tokens=submit.num_prompt_tokens,
        max_tokens=submit.max_tokens,
        sampling=sampling,
        stop_token_ids=frozenset(stops),
        priority=submit.priority,
        tenant=submit.tenant,
        ttft_slo_ms=submit.ttft_slo_ms,
        itl_slo_ms=submit.itl_slo_ms,
        has_run=submit.has_run,
        num_prompt_logprobs=submit.num_prompt_logprobs,
        adapter=adapter,
        pooling=pooling_of(submit),
    )
