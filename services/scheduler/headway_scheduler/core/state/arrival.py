"""What a request asks for, as it comes in.

Owns: the arrival and the name that its answers go by. Must not know: anything that happens to it later.
"""

import msgspec

from headway_proto.columns import Int32Array
from headway_proto.sampling import SamplingParams


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Whom the tokens are for: opaque integers that travel with the request."""

    owner: int
    handle: int


class NewRequestEvent(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request as it arrives. ``token_ids`` int32, shape ``[num_tokens]``: prompt, then output already held.

    ``max_tokens`` counts output tokens, those already held included. ``ttft_slo_ms`` and ``itl_slo_ms`` are objectives in
    milliseconds, 0 for none: the first token within the one of its arrival, every further one within the other.
    ``has_run``: it started before it arrived here, under a scheduler or on a link that is gone; nothing of it is shed.
    ``num_prompt_logprobs``: of how many prompt tokens, from the second on, log probabilities were told before.
    """

    origin: Origin
    request_id: str
    token_ids: Int32Array
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    priority: int = 0
    index: int = 0
    tenant: str = ""
    ttft_slo_ms: int = 0
    itl_slo_ms: int = 0
    has_run: bool = False
    num_prompt_logprobs: int = 0
