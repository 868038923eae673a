"""The check of a new request.

Owns: the refusal of requests that can never run. Must not know: queues, rows, or their later states.
"""

from typing import NamedTuple

import numpy as np

from headway_proto.pooling import NO_POOLING, POOL_SCORE
from headway_proto.sampling import NO_LOGPROBS
from headway_scheduler.core.state.arrival import NewRequestEvent
from headway_scheduler.core.state.limits import ExecutorCapacity
from headway_scheduler.core.state.request import Request

_UNSIGNED = np.dtype(np.uint32)
ANOTHER_MODEL = "the executor that took over runs another model"


class RequestRejected(Exception):  # noqa: N818 - it is an answer, not a malfunction
    """``reason`` is "invalid", "unsupported", "already_exists" or "overloaded"."""

    def __init__(self, reason: str, field: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.message = message


class Lacking(NamedTuple):
    """The field that asks for a feature which the executor lacks, what it lacks, and what the field may be."""

    field: str
    what: str
    allowed: str


def limit_of(new: NewRequestEvent, max_request_tokens: int) -> int:
    """Return the most tokens, prompt and output, of a request."""
    return min(new.num_prompt_tokens + new.max_tokens, max_request_tokens)


def check_request(new: NewRequestEvent, limit: int, capacity: ExecutorCapacity) -> None:
    """Check that an executor of this ``capacity`` can run a request of up to ``limit`` tokens.

    Raises:
        RequestRejected: it cannot.
    """
    num_tokens = len(new.token_ids)
    if not 1 <= new.num_prompt_tokens <= num_tokens:
        raise RequestRejected(
            "invalid", "prompt", f"{new.num_prompt_tokens} prompt tokens of {num_tokens}; allowed: 1 to all of them"
        )
    if num_tokens >= limit:
        raise RequestRejected(
            "invalid",
            "prompt",
            f"{num_tokens} tokens leave no room for another; allowed: at most {limit - 1} (max_tokens "
            f"{new.max_tokens}, context {capacity.max_model_len}, KV pool of {capacity.num_blocks} "
            f"blocks of {capacity.block_size})",
        )
    if new.sampling.prompt_logprobs != NO_LOGPROBS and not capacity.supports_prompt_logprobs:
        raise RequestRejected(
            "invalid", "prompt_logprobs", "the executor's backend does not report them; allowed: unset"
        )
    if not 0 <= new.num_prompt_logprobs < new.num_prompt_tokens:
        raise RequestRejected(
            "invalid", "num_prompt_logprobs", f"{new.num_prompt_logprobs} of {new.num_prompt_tokens} prompt tokens"
        )
    # Seen as unsigned, a negative id is larger than any vocabulary.
    largest = int(new.token_ids[new.token_ids.view(_UNSIGNED).argmax()])
    if not 0 <= largest < capacity.vocab_size:
        raise _outside_vocabulary("token_ids", largest, capacity)
    for token_id in new.stop_token_ids:
        if not 0 <= token_id < capacity.vocab_size:
            raise _outside_vocabulary("stop_token_ids", token_id, capacity)
    lacking = what_lacks_for(new, capacity)
    if lacking is not None:
        raise RequestRejected("unsupported", lacking.field, f"the executor {lacking.what}; allowed: {lacking.allowed}")


def what_lacks_for(new: NewRequestEvent, capacity: ExecutorCapacity) -> Lacking | None:
    """The feature that it needs and the executor lacks, or None."""
    if new.sampling.constraint is not None and not capacity.supports_constraints:
        return Lacking("constraint", "cannot constrain outputs", "unset")
    if new.adapter and not capacity.supports_adapters:
        return Lacking("adapter", "cannot run adapters", "unset")
    if new.pooling == NO_POOLING:
        return None if capacity.generates else Lacking("pooling", "makes vectors and no text", "any but none")
    if not capacity.embedding_size:
        return Lacking("pooling", "makes no vectors", "unset")
    if (new.pooling == POOL_SCORE) == (capacity.default_pooling == POOL_SCORE):
        return None
    if new.pooling == POOL_SCORE:
        return Lacking("pooling", "has no head that scores pairs", "any but that of pairs")
    return Lacking("pooling", "scores pairs and makes no vectors", "that of pairs")


def why_not_here(request: Request, capacity: ExecutorCapacity, *, same_model: bool) -> str | None:
    """Return why a request cannot go on with another executor, or None."""
    largest_id = max(int(request.token_ids.max()), *request.new.stop_token_ids, 0)
    if not same_model:
        return ANOTHER_MODEL
    if len(request.token_ids) >= request.limit or largest_id >= capacity.vocab_size:
        return "the executor that took over cannot hold this request"
    if request.is_owed_prompt_logprobs and not capacity.supports_prompt_logprobs:
        return "the executor that took over reports no log probabilities of prompts"
    lacking = what_lacks_for(request.new, capacity)
    if lacking is not None:
        return f"the executor that took over {lacking.what}"
    return None


def _outside_vocabulary(field: str, token_id: int, capacity: ExecutorCapacity) -> RequestRejected:
    return RequestRejected("invalid", field, f"{token_id} is not allowed; allowed: 0 to {capacity.vocab_size - 1}")
