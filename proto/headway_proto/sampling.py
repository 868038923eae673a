"""How one request's tokens are drawn: the parameters that travel on both ZeroMQ protocols.

Owns: the sampling fields, their neutral values and their allowed ranges.
Must not know: how sampling is computed, or where a request came from.
"""

import math

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
    """What an output must be, from its first token to its last.

    ``text`` is a JSON schema, nothing (``JSON_OBJECT``: any object), a regular expression, a grammar, or a JSON list of
    texts of which the output is one. ``headway_proto.grammars`` says what is accepted.
    """

    kind: str
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Sampling parameters of one request; every default is neutral.

    A temperature of 0 is greedy. ``top_k`` 0 keeps every token. ``logprobs`` is the number of most likely alternatives
    to report beside each sampled token (0: the sampled token's own only); ``NO_LOGPROBS`` reports nothing. Log
    probabilities are those of the model's raw distribution, before temperature, penalties, bias and truncation.
    ``min_tokens`` counts output tokens; until it is reached the ids in ``stop_token_ids`` cannot be drawn.
    Penalties follow the usual definitions: repetition over prompt and output (divide positive logits, multiply negative
    ones), presence and frequency over output only (subtract). The generator is keyed by ``seed`` (an unsigned 64-bit
    integer) and the position of the drawn token in its sequence. ``prompt_logprobs`` asks for the same of the prompt's own
    tokens, from the second on: so many alternatives beside each; ``NO_LOGPROBS`` for nothing.
    Under a ``constraint`` only tokens are drawn that it allows; when it is fulfilled, only the model's own end-of-sequence
    tokens are. The mask comes after penalties and bias, so top-k, top-p and min-p choose among what is allowed.
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
    """List every field outside its range as ``(field, what is wrong and what is allowed)``.

    ``vocab_size`` is the width of the model's logits. Both the gateway and the scheduler call this: a limit that is
    checked in one front end and not in the other is how one request takes down an engine.
    """
    found: list[tuple[str, str]] = []

    def require(ok: bool, field: str, value: object, allowed: str) -> None:
        if not ok:
            found.append((field, f"{value!r:.64} is not allowed; {allowed}"))

    for field, low, high, text in (
        ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
        ("min_p", 0.0, 1.0, "0 to 1"),
        ("presence_penalty", -2.0, 2.0, "-2 to 2"),
        ("frequency_penalty", -2.0, 2.0, "-2 to 2"),
    ):
        value = getattr(sampling, field)
        require(math.isfinite(value) and low <= value <= high, field, value, f"allowed: {text}")
    require(0.0 < sampling.top_p <= 1.0, "top_p", sampling.top_p, "allowed: above 0, up to 1")
    require(sampling.top_k >= 0, "top_k", sampling.top_k, "allowed: 0 (keep all) or more")
    penalty = sampling.repetition_penalty
    require(
        math.isfinite(penalty) and 0.0 < penalty <= 10.0, "repetition_penalty", penalty, "allowed: above 0, up to 10"
    )
    require(sampling.min_tokens >= 0, "min_tokens", sampling.min_tokens, "allowed: 0 or more")
    require(0 <= sampling.seed < 1 << 64, "seed", sampling.seed, "allowed: 0 to 2^64 - 1")
    require(
        NO_LOGPROBS <= sampling.logprobs <= MAX_LOGPROBS, "logprobs", sampling.logprobs, f"allowed: 0 to {MAX_LOGPROBS}"
    )
    require(
        NO_LOGPROBS <= sampling.prompt_logprobs <= MAX_LOGPROBS,
        "prompt_logprobs",
        sampling.prompt_logprobs,
        f"allowed: 0 to {MAX_LOGPROBS}",
    )
    require(
        len(sampling.logit_bias) <= MAX_LOGIT_BIAS_ENTRIES,
        "logit_bias",
        len(sampling.logit_bias),
        f"allowed: at most {MAX_LOGIT_BIAS_ENTRIES} entries",
    )
    for token_id, bias in sampling.logit_bias:
        require(0 <= token_id < vocab_size, "logit_bias", token_id, f"allowed: token ids 0 to {vocab_size - 1}")
        require(math.isfinite(bias) and abs(bias) <= 100.0, "logit_bias", bias, "allowed: -100 to 100")
    for token_id in sampling.stop_token_ids:
        require(0 <= token_id < vocab_size, "stop_token_ids", token_id, f"allowed: token ids 0 to {vocab_size - 1}")
    if sampling.constraint is not None:
        found += _constraint_violations(sampling.constraint, sampling.min_tokens)
    return found


def _constraint_violations(constraint: Constraint, min_tokens: int) -> list[tuple[str, str]]:
    """What can be told without the library and the tokenizer."""
    if constraint.kind not in CONSTRAINT_KINDS:
        return [("constraint", f"{constraint.kind!r:.64} is not allowed; allowed: {', '.join(CONSTRAINT_KINDS)}")]
    num_bytes = len(constraint.text.encode())
    if num_bytes > MAX_CONSTRAINT_BYTES:
        return [(constraint.kind, f"{num_bytes} bytes are not allowed; allowed: at most {MAX_CONSTRAINT_BYTES}")]
    if min_tokens:
        # A fulfilled constraint leaves only tokens that end the output, which min_tokens would forbid.
        return [("min_tokens", f"{min_tokens} is not allowed together with a constraint; allowed: 0")]
    return []
