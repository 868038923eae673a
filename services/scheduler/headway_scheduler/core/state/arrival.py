"""A request as it arrives.

Owns: the arrival, and the name that answers go by. Must not know: what happens to it later.
"""

import msgspec

from headway_proto.columns import Int32Array
from headway_proto.sampling import SamplingParams


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The receiver of the tokens: opaque integers that travel with the request."""

    owner: int
    handle: int


class NewRequestEvent(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request as it arrives. ``token_ids``: int32 ``[num_tokens]``, the prompt, then output that its gateway already
    holds.

    ``max_tokens`` includes held output. ``ttft_slo_ms`` and ``itl_slo_ms`` are objectives, 0 for none. ``has_run``: it
    started elsewhere before, so it is not shed. ``num_prompt_logprobs``: prompt tokens, from the second on, whose log
    probabilities are already reported.
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
