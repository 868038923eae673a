"""A request as it arrives.

Owns: the arrival. Must not know: what happens to it later.
"""

import msgspec

from headway_proto.columns import Int32Array
from headway_proto.pooling import NO_POOLING
from headway_proto.sampling import SamplingParams


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The receiver of the tokens: opaque integers."""

    owner: int
    handle: int


class NewRequestEvent(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``token_ids``: int32 ``[num_tokens]``, the prompt and output that its gateway already holds.

    ``max_tokens`` includes held output. Objectives of 0: none. ``has_run``: it started elsewhere, so it is not shed.
    ``num_prompt_logprobs``: prompt tokens, from the second on, whose log probabilities are already reported. ``adapter``:
    its identity, see ``headway_proto.adapters``, or "". ``pooling``: it wants a vector, and its one token means nothing.
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
    adapter: str = ""
    pooling: int = NO_POOLING
