"""Sampling parameters of both ZeroMQ protocols.

Owns: neutral values and allowed ranges. Must not know: how sampling is computed.
"""

import math
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 300
NO_LOGPROBS = -1

JSON_SCHEMA = "json_schema"
JSON_OBJECT = "json_object"
REGEX = "regex"
GRAMMAR = "grammar"
CHOICE = "choice"
CONSTRAINT_KINDS = (JSON_SCHEMA, JSON_OBJECT, REGEX, GRAMMAR, CHOICE)
MAX_CONSTRAINT_BYTES = 1 << 16


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


def violations(sampling: SamplingParams, vocab_size: int) -> list[tuple[str, str]]:
    """Return each (field, what is wrong and what is allowed). ``vocab_size``: width of the logits."""
    checks = (*_checks_of_numbers(sampling), *_checks_of_tokens(sampling, vocab_size))
    found = [
        (field, f"{value!r:.64} is not allowed; allowed: {allowed}") for ok, field, value, allowed in checks if not ok
    ]
    if sampling.constraint is not None:
        found += _constraint_violations(sampling.constraint, sampling.min_tokens)
    return found


_Check: TypeAlias = tuple[bool, str, object, str]
"""Whether the field is valid, its name, its value, what is allowed."""


def _checks_of_numbers(sampling: SamplingParams) -> Iterator[_Check]:
    for field, low, high, text in (
        ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
        ("min_p", 0.0, 1.0, "0 to 1"),
        ("presence_penalty", -2.0, 2.0, "-2 to 2"),
        ("frequency_penalty", -2.0, 2.0, "-2 to 2"),
    ):
        value = getattr(sampling, field)
        yield math.isfinite(value) and low <= value <= high, field, value, text
    yield 0.0 < sampling.top_p <= 1.0, "top_p", sampling.top_p, "above 0, up to 1"
    yield sampling.top_k >= 0, "top_k", sampling.top_k, "0 (keep all) or more"
    penalty = sampling.repetition_penalty
    yield math.isfinite(penalty) and 0.0 < penalty <= 10.0, "repetition_penalty", penalty, "above 0, up to 10"
    yield sampling.min_tokens >= 0, "min_tokens", sampling.min_tokens, "0 or more"
    yield 0 <= sampling.seed < 1 << 64, "seed", sampling.seed, "0 to 2^64 - 1"
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, field)
        yield NO_LOGPROBS <= value <= MAX_LOGPROBS, field, value, f"0 to {MAX_LOGPROBS}"


def _checks_of_tokens(sampling: SamplingParams, vocab_size: int) -> Iterator[_Check]:
    num_biases, ids = len(sampling.logit_bias), f"token ids 0 to {vocab_size - 1}"
    yield num_biases <= MAX_LOGIT_BIAS_ENTRIES, "logit_bias", num_biases, f"at most {MAX_LOGIT_BIAS_ENTRIES} entries"
    for token_id, bias in sampling.logit_bias:
        yield 0 <= token_id < vocab_size, "logit_bias", token_id, ids
        yield math.isfinite(bias) and abs(bias) <= 100.0, "logit_bias", bias, "-100 to 100"
    for token_id in sampling.stop_token_ids:
        yield 0 <= token_id < vocab_size, "stop_token_ids", token_id, ids


def _constraint_violations(constraint: Constraint, min_tokens: int) -> list[tuple[str, str]]:
    """Check what needs neither library nor tokenizer."""
    if constraint.kind not in CONSTRAINT_KINDS:
        return [("constraint", f"{constraint.kind!r:.64} is not allowed; allowed: {', '.join(CONSTRAINT_KINDS)}")]
    num_bytes = len(constraint.text.encode())
    if num_bytes > MAX_CONSTRAINT_BYTES:
        return [(constraint.kind, f"{num_bytes} bytes are not allowed; allowed: at most {MAX_CONSTRAINT_BYTES}")]
    if min_tokens:
        # min_tokens would forbid the end that a fulfilled constraint demands.
        return [("min_tokens", f"{min_tokens} is not allowed together with a constraint; allowed: 0")]
    return []
