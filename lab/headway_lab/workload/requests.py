"""The requests of a run: how long, whose, how urgent, with which objectives, and which begin alike.

Owns: drawing them all from one seed, and the token ids of prompts. Must not know: when they arrive, or what serves them.

Each kind of draw has a stream of its own, so that other lengths do not change who sends what.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from headway.settings import shown
from headway_lab.workload.lengths import LengthDistribution
from headway_proto.columns import Int32Array
from headway_proto.ingress import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL, PRIORITY_REALTIME

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
    """What a request is to keep, in milliseconds, 0 for none: the time to its first token, and each further gap."""

    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0

    @property
    def are_some(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self.ttft_slo_ms or self.itl_slo_ms)

    @property
    def limits_s(self) -> tuple[float, float]:
        """The longest time to the first token and the longest gap, in seconds; infinite where there is no objective."""
        return self.ttft_slo_ms / 1e3 or float("inf"), self.itl_slo_ms / 1e3 or float("inf")


NO_OBJECTIVES = Objectives()


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request before it is sent. The first ``num_prefix_tokens`` of its prompt are those of all with its ``prefix``.

    ``max_tokens`` is the limit that is sent with it, 0 if that is ``num_output_tokens``: with a higher one the scheduler does
    not know when it will end, which a stop token then does.
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

    @property
    def is_stopped(self) -> bool:
        """Whether a stop token ends it."""
        return self.max_tokens > self.num_output_tokens


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends ``share`` (relative to the others') of the requests, all of one priority, with the same objectives."""

    name: str
    share: float
    priority: int = PRIORITY_NORMAL
    objectives: Objectives = NO_OBJECTIVES


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are drawn from.

    ``prompt`` counts what is a request's own; ``num_prefix_tokens`` that it shares come before, one of ``num_prefixes``
    beginnings, equally often each.
    """

    num_requests: int
    prompt: LengthDistribution
    output: LengthDistribution
    num_prefixes: int = 0
    num_prefix_tokens: int = 0
    tenants: Sequence[Tenant] = ()
    objectives: Objectives = NO_OBJECTIVES
    """Of the requests if there are no tenants."""


def rng_of(seed: int, stream: int, *path: int) -> np.random.Generator:
    """The generator of one stream of a run, or of one member of the stream."""
    return np.random.default_rng((seed, stream, *path))


def draw_requests(shape: WorkloadShape, context_length: int, seed: int) -> list[PlannedRequest]:
    """Draw the requests, in the order in which they are sent.

    What does not fit the context is cut: an answer so that the shared prefix and one token of the prompt fit beside it,
    then the prompt to what the answer leaves.
    """
    count = shape.num_requests
    tenants = shape.tenants or (Tenant(name="", share=1.0, objectives=shape.objectives),)
    shares = np.array([tenant.share for tenant in tenants])
    least_prompt = shape.num_prefix_tokens + 1
    outputs = np.minimum(shape.output.draw(rng_of(seed, OUTPUT_LENGTHS), count), context_length - least_prompt)
    prompts = shape.prompt.draw(rng_of(seed, PROMPT_LENGTHS), count) + shape.num_prefix_tokens
    prompts = np.minimum(prompts, context_length - outputs)
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
        )
        for number in range(count)
    ]


class Prompts(Protocol):
    """Where the token ids of prompts are from."""

    def prompt(self, request: PlannedRequest) -> Int32Array:
        """The prompt, int32, shape ``[num_prompt_tokens]``."""


class PromptSource:
    """The token ids of prompts: drawn when a request is sent, so that a long run does not hold them all."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size

    def prompt(self, request: PlannedRequest) -> Int32Array:
        """The prompt, int32, shape ``[num_prompt_tokens]``."""
        own = request.num_prompt_tokens - request.num_prefix_tokens
        ids = self._draw(rng_of(self._seed, PROMPT_TOKENS, request.number), own)
        if not request.num_prefix_tokens:
            return ids
        prefix = self._draw(rng_of(self._seed, PREFIX_TOKENS, request.prefix), request.num_prefix_tokens)
        return np.concatenate((prefix, ids))

    def _draw(self, rng: np.random.Generator, count: int) -> Int32Array:
        return rng.integers(0, self._vocab_size, size=count, dtype=np.int32)


def parse_tenants(given: Mapping[str, str], objectives: Objectives = NO_OBJECTIVES) -> tuple[Tenant, ...]:
    """Read tenants from their names and, of each, ``SHARE[:PRIORITY[:TTFT_MS[:ITL_MS]]]``.

    What is left out or empty is priority normal and the given ``objectives``; an objective of 0 is none.

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
