"""The requests of a run, drawn from one seed. Must not know: when they arrive.

Each kind of draw has its own stream, so other lengths do not change the tenants.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from headway_lab.workload.lengths import LengthDistribution
from headway_proto.columns import Int32Array
from headway_proto.ingress import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL, PRIORITY_REALTIME
from headway_proto.wording import shown

PRIORITIES = {
    "realtime": PRIORITY_REALTIME,
    "high": PRIORITY_HIGH,
    "normal": PRIORITY_NORMAL,
    "low": PRIORITY_LOW,
}
PRIORITY_NAMES = {priority: name for name, priority in PRIORITIES.items()}
NO_PREFIX = -1
TENANT_NOTATION = "NAME=SHARE[:PRIORITY[:TTFT_MS[:ITL_MS]]]"
MOST_OBJECTIVE_MS = 1 << 30

(
    PROMPT_LENGTHS,
    OUTPUT_LENGTHS,
    TENANTS,
    PREFIXES,
    ARRIVALS,
    PROMPT_TOKENS,
    PREFIX_TOKENS,
    SAMPLED_TOKENS,
    STEP_NOISE,
) = range(9)
"""The streams of random numbers."""


class Objectives(msgspec.Struct, frozen=True, kw_only=True):
    """Limits in milliseconds, 0 for none, of the TTFT and of each further gap."""

    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0

    @property
    def are_some(self) -> bool:
        """Whether there is an objective."""
        return bool(self.ttft_slo_ms or self.itl_slo_ms)

    @property
    def limits_s(self) -> tuple[float, float]:
        """The limits in seconds; infinite without an objective."""
        return self.ttft_slo_ms / 1e3 or float("inf"), self.itl_slo_ms / 1e3 or float("inf")


NO_OBJECTIVES = Objectives()


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request before it is sent. Requests of the same ``prefix`` share their first ``num_prefix_tokens``.

    ``max_tokens`` is 0 if it is ``num_output_tokens``. With a higher limit a stop token ends the request, at a place
    that the scheduler does not know.
    """

    number: int
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = PRIORITY_NORMAL
    objectives: Objectives = NO_OBJECTIVES
    prefix: int = NO_PREFIX
    num_prefix_tokens: int = 0
    max_tokens: int = 0
    is_cut: bool = False
    """Whether it was drawn longer than the context."""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop token ends it."""
        return self.max_tokens > self.num_output_tokens


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's relative ``share`` of the requests, with one priority and the same objectives."""

    name: str
    share: float
    priority: int = PRIORITY_NORMAL
    objectives: Objectives = NO_OBJECTIVES


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions of requests. ``prompt`` counts the tokens after a shared prefix."""

    num_requests: int
    prompt: LengthDistribution
    output: LengthDistribution
    num_prefixes: int = 0
    num_prefix_tokens: int = 0
    tenants: Sequence[Tenant] = ()
    objectives: Objectives = NO_OBJECTIVES
    """The requests' objectives if there are no tenants."""


def rng_of(seed: int, stream: int, *path: int) -> np.random.Generator:
    """Return the generator of a stream, or of a member of it."""
    return np.random.default_rng((seed, stream, *path))


def draw_requests(shape: WorkloadShape, context_length: int, seed: int) -> list[PlannedRequest]:
    """Draw the requests in the order of sending.

    Answers are cut so that the prefix and one token fit beside them, then prompts to the rest of the context.
    """
    count = shape.num_requests
    tenants = shape.tenants or (Tenant(name="", share=1.0, objectives=shape.objectives),)
    shares = np.array([tenant.share for tenant in tenants])
    least_prompt = shape.num_prefix_tokens + 1
    drawn_outputs = shape.output.draw(rng_of(seed, OUTPUT_LENGTHS), count)
    drawn_prompts = shape.prompt.draw(rng_of(seed, PROMPT_LENGTHS), count) + shape.num_prefix_tokens
    outputs = np.minimum(drawn_outputs, context_length - least_prompt)
    prompts = np.minimum(drawn_prompts, context_length - outputs)
    is_cut = drawn_prompts + drawn_outputs > context_length
    owners = rng_of(seed, TENANTS).choice(len(tenants), size=count, p=shares / shares.sum())
    prefixes = rng_of(seed, PREFIXES).integers(0, max(shape.num_prefixes, 1), size=count)
    return [
        PlannedRequest(
            number=number,
            num_prompt_tokens=int(prompts[number]),
            num_output_tokens=int(outputs[number]),
            tenant=tenants[owners[number]].name,
            priority=tenants[owners[number]].priority,
            objectives=tenants[owners[number]].objectives,
            prefix=int(prefixes[number]) if shape.num_prefix_tokens else NO_PREFIX,
            num_prefix_tokens=shape.num_prefix_tokens,
            is_cut=bool(is_cut[number]),
        )
        for number in range(count)
    ]


def cut_note(requests: Sequence[PlannedRequest], context_length: int) -> str:
    """Return ``, N of them cut to ... tokens``, for a title; nothing if none was."""
    num_cut = sum(request.is_cut for request in requests)
    return f", {num_cut} of them cut to the context of {context_length} tokens" if num_cut else ""


class Prompts(Protocol):
    """The source of prompts."""

    def prompt(self, request: PlannedRequest) -> Int32Array:
        """Return the prompt, int32, shape ``[num_prompt_tokens]``."""


class PromptSource:
    """Draws prompts when they are sent: a long run could not hold them all."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def prompt(self, request: PlannedRequest) -> Int32Array:
        """See ``Prompts``."""
        own = request.num_prompt_tokens - request.num_prefix_tokens
        ids = self._draw(rng_of(self._seed, PROMPT_TOKENS, request.number), own)
        if not request.num_prefix_tokens:
            return ids
        prefix = self._draw(rng_of(self._seed, PREFIX_TOKENS, request.prefix), request.num_prefix_tokens)
        return np.concatenate((prefix, ids))

    def _draw(self, rng: np.random.Generator, count: int) -> Int32Array:
        return rng.integers(0, self._vocab_size, size=count, dtype=np.int32)


def parse_tenants(given: Mapping[str, str], objectives: Objectives = NO_OBJECTIVES) -> tuple[Tenant, ...]:
    """Read tenants by name, each ``SHARE[:PRIORITY[:TTFT_MS[:ITL_MS]]]``.

    Defaults are priority normal and the given ``objectives``.

    Raises:
        ValueError: a share is no positive number, there is no such priority, or an objective is no whole number.
    """
    return tuple(_tenant(name, text, objectives) for name, text in given.items())


def _tenant(name: str, text: str, default: Objectives) -> Tenant:
    share, priority, ttft_ms, itl_ms, *rest = (*text.split(":"), "", "", "")
    try:
        tenant = Tenant(
            name=name,
            share=float(share),
            priority=PRIORITIES[priority or "normal"],
            objectives=Objectives(
                ttft_slo_ms=int(ttft_ms or default.ttft_slo_ms), itl_slo_ms=int(itl_ms or default.itl_slo_ms)
            ),
        )
        are_objectives = all(0 <= value <= MOST_OBJECTIVE_MS for value in msgspec.structs.astuple(tenant.objectives))
    except (ValueError, KeyError):
        tenant, are_objectives = None, False
    if tenant is None or not are_objectives or not 0 < tenant.share < float("inf") or any(rest):
        names = ", ".join(PRIORITIES)
        raise ValueError(
            f"{shown(f'{name}={text}')} is not allowed; allowed: {TENANT_NOTATION} with a positive share, a priority of "
            f"{names}, and whole milliseconds"
        )
    return tenant
