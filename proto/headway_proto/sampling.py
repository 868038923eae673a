"""Sampling parameters of both ZeroMQ protocols.

Owns: neutral values and allowed ranges. Must not know: how sampling is computed.
"""

import math
from collections.abc import Iterator
from operator import attrgetter

import msgspec
import numpy as np

from headway_proto.wording import shown

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 300
NO_LOGPROBS = -1

JSON_SCHEMA = "json_schema"
JSON_OBJECT = "json_object"
REGEX = "regex"
GRAMMAR = "grammar"
CHOICE = "choice"
CONSTRAINT_KINDS = (JSON_SCHEMA, JSON_OBJECT, REGEX, GRAMMAR, CHOICE)
MAX_CONSTRAINT_BYTES = 1 << 18


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """The whole output must match it.

    ``text``: a JSON schema, nothing (``JSON_OBJECT``: any object), a regular expression, a grammar, or a JSON list of
    texts.
    """

    kind: str
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Every default is neutral.

    Temperature 0 is greedy. ``top_k`` 0 keeps every token. ``logprobs``: alternatives per sampled token (0: only its
    own), of the raw distribution; ``prompt_logprobs``: the same from the prompt's second token on. ``min_tokens``:
    output tokens before ``stop_token_ids`` can be drawn. Penalties: repetition over prompt and output (divide positive
    logits, multiply negative ones), presence and frequency over output (subtract). ``seed`` (unsigned 64-bit) and
    position key the generator. A ``constraint``'s mask comes after penalties and bias; once fulfilled, only
    end-of-sequence tokens are drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = NO_LOGPROBS
    seed: int = 0
    prompt_logprobs: int = NO_LOGPROBS
    constraint: Constraint | None = None


_MOST_FLOAT32 = float(np.finfo(np.float32).max)
_ABOVE_0 = math.ulp(0.0)
_NUMBERS: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
    ("min_p", 0.0, 1.0, "0 to 1"),
    ("presence_penalty", -2.0, 2.0, "-2 to 2"),
    ("frequency_penalty", -2.0, 2.0, "-2 to 2"),
    ("top_p", _ABOVE_0, 1.0, "above 0, up to 1"),
    ("top_k", 0, math.inf, "0 (keep all) or more"),
    ("repetition_penalty", _ABOVE_0, 10.0, "above 0, up to 10"),
    ("min_tokens", 0, math.inf, "0 or more"),
    ("seed", 0, (1 << 64) - 1, "0 to 2^64 - 1"),
    ("logprobs", NO_LOGPROBS, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", NO_LOGPROBS, MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
)
"""Fields, their bounds, and what is allowed. No bound holds for NaN."""
_values_of = attrgetter(*[field for field, _, _, _ in _NUMBERS])


def violations(sampling: SamplingParams, vocab_size: int) -> list[tuple[str, str]]:
    """Return each (field, what is wrong and what is allowed). ``vocab_size``: width of the logits."""
    wrong: list[tuple[str, object, str]] = [
        (field, value, allowed)
        for value, (field, low, high, allowed) in zip(_values_of(sampling), _NUMBERS, strict=True)
        if not low <= value <= high
    ]
    if sampling.logit_bias or sampling.stop_token_ids:
        wrong += _wrong_tokens(sampling, vocab_size)
    found = [(field, f"{shown(_written(value))} is not allowed; allowed: {allowed}") for field, value, allowed in wrong]
    if sampling.constraint is not None:
        found += _constraint_violations(sampling.constraint, sampling.min_tokens)
    return found


def _written(value: object) -> object:
    """Return a number as its sender wrote it: over gRPC the nearest of 32 bits has come."""
    if not isinstance(value, float) or not abs(value) <= _MOST_FLOAT32:
        return value
    nearest = np.float32(value)
    return float(str(nearest)) if float(nearest) == value else value


def _wrong_tokens(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, object, str]]:
    """There may be millions, so not all of them are told."""
    num_biases, ids = len(sampling.logit_bias), f"token ids 0 to {vocab_size - 1}"
    if num_biases > MAX_LOGIT_BIAS_ENTRIES:
        yield "logit_bias", num_biases, f"at most {MAX_LOGIT_BIAS_ENTRIES} entries"
    for token_id, bias in sampling.logit_bias[:MAX_LOGIT_BIAS_ENTRIES]:
        if not 0 <= token_id < vocab_size:
            yield "logit_bias", token_id, ids
        if not -100.0 <= bias <= 100.0:
            yield "logit_bias", bias, "-100 to 100"
    wrong = next((token_id for token_id in sampling.stop_token_ids if not 0 <= token_id < vocab_size), None)
    if wrong is not None:
        yield "stop_token_ids", wrong, ids


def _constraint_violations(constraint: Constraint, min_tokens: int) -> list[tuple[str, str]]:
    """Check what needs neither library nor tokenizer."""
    if constraint.kind not in CONSTRAINT_KINDS:
        return [("constraint", f"{shown(constraint.kind)} is not allowed; allowed: {', '.join(CONSTRAINT_KINDS)}")]
    num_bytes = len(constraint.text.encode())
    if num_bytes > MAX_CONSTRAINT_BYTES:
        return [(constraint.kind, f"{num_bytes} bytes are not allowed; allowed: at most {MAX_CONSTRAINT_BYTES}")]
    if min_tokens:
        # min_tokens would forbid the end that a fulfilled constraint demands.
        return [("min_tokens", f"{min_tokens} is not allowed together with a constraint; allowed: 0")]
    return []
