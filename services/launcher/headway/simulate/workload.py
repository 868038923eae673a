"""The requests of a run: how long, whose, how urgent, and which begin alike.

Owns: drawing them all from one seed, and the token ids of prompts. Must not know: when they arrive, or what serves them.

Each kind of draw has a stream of its own, so that other lengths do not change who sends what.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from headway.settings import shown
from headway.simulate.lengths import LengthDistribution
from headway_proto.columns import Int32Array
from headway_proto.ingress import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL, PRIORITY_REALTIME

PRIORITIES = {
    "realtime": PRIORITY_REALTIME,
    "high": PRIORITY_HIGH,
    "normal": PRIORITY_NORMAL,
    "low": PRIORITY_LOW,
}
NO_PREFIX = -1

PROMPT_LENGTHS, OUTPUT_LENGTHS, TENANTS, PREFIXES, ARRIVALS, PROMPT_TOKENS, PREFIX_TOKENS, SAMPLED_TOKENS = range(8)
"""The streams of random numbers."""


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request before it is sent. The first ``num_prefix_tokens`` of its prompt are those of all with its ``prefix``."""

    number: int
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    priority: int = PRIORITY_NORMAL
    prefix: int = NO_PREFIX
    num_prefix_tokens: int = 0


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends ``share`` (relative to the others') of the requests, all of one priority."""

    name: str
    share: float
    priority: int = PRIORITY_NORMAL


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


def rng_of(seed: int, stream: int, *path: int) -> np.random.Generator:
    """The generator of one stream of a run, or of one member of the stream."""
    return np.random.default_rng((seed, stream, *path))


def draw_requests(shape: WorkloadShape, context_length: int, seed: int) -> list[PlannedRequest]:
    """Draw the requests, in the order in which they are sent.

    What does not fit the context is cut: an answer so that the shared prefix and one token of the prompt fit beside it,
    then the prompt to what the answer leaves.
    """
    count = shape.num_requests
    tenants = shape.tenants or (Tenant(name="", share=1.0),)
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
            prefix=int(prefixes[number]) if shape.num_prefix_tokens else NO_PREFIX,
            num_prefix_tokens=shape.num_prefix_tokens,
        )
        for number in range(count)
    ]


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


def parse_tenants(given: Mapping[str, str]) -> tuple[Tenant, ...]:
    """Read tenants from their names and, of each, ``SHARE`` or ``SHARE:PRIORITY``.

    Raises:
        ValueError: a share is no positive number, or there is no such priority.
    """
    return tuple(_tenant(name, text) for name, text in given.items())


def _tenant(name: str, text: str) -> Tenant:
    share_text, _, priority = text.partition(":")
    try:
        share = float(share_text)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf") or priority not in {"", *PRIORITIES}:
        names = ", ".join(PRIORITIES)
        raise ValueError(f"{shown(f'{name}={text}')} is not allowed; allowed: NAME=SHARE or NAME=SHARE:{{{names}}}")
    return Tenant(name=name, share=share, priority=PRIORITIES[priority or "normal"])
