"""Whether the tokens and log probabilities of a request are right.

Owns: comparing, ties. Must not know: steps.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headway_conformance.failures import require
from headway_conformance.reference import Draw, Reference
from headway_conformance.requests import GREEDY, PromptToken, ScriptedRequest
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_proto.columns import Float32Array
from headway_proto.sampling import SamplingParams
from headway_proto.step import RowLogprobs

EXACT_DTYPE = "float32"
TOLERANCES = {EXACT_DTYPE: 1e-4, "float16": 0.06, "bfloat16": 0.5}
"""The largest error of a log probability, and of a vector of length 1, by the backend's announced dtype."""


class Oracle(Protocol):
    def check(self, request: ScriptedRequest) -> None:
        """Check the output of a request that has ended.

        Raises:
            ConformanceFailure: a token or log probability is wrong.
        """
        ...


class ReferenceOracle:
    """Compares with a reference, token by token, each after the history that the request really had.

    With ``exact_draws`` every token must be the reference's, but for a greedy one that is about equally likely (within
    twice ``tolerance``). Without, for low precision, a random draw needs only the right log probability.
    """

    def __init__(self, reference: Reference, *, tolerance: float, exact_draws: bool) -> None:
        self._reference = reference
        self._tolerance = tolerance
        self._exact_draws = exact_draws

    def check(self, request: ScriptedRequest) -> None:
        if request.pooling:
            self._check_vector(request)
            return
        for place, (token, logprobs) in enumerate(zip(request.output, request.logprobs, strict=True)):
            history = tuple(request.prompt + request.output[:place])
            where = f"output token {place} of {_described(request)}"
            drawn = self._reference.draw(history, len(request.prompt), request.sampling)
            wrong = self._numbers(history, token, logprobs, drawn) if logprobs is not None else None
            if token != drawn.token and not self._may_differ(history, request.sampling, token, drawn):
                known = "its logprobs are right" if logprobs is not None else "it asked for no logprobs"
                reason = f"the numerics are off: {wrong}" if wrong else known
                require(condition=False, message=f"{where} is {token}; expected {drawn.token} ({reason})")
            require(wrong is None, f"{where}: {wrong}")
        for position, reported in request.prompt_logprobs.items():
            wrong = self._prompt_token(tuple(request.prompt[:position]), request.prompt[position], reported)
            require(wrong is None, f"position {position} of the prompt of {_described(request)}: {wrong}")
        if request.error is not None:
            self._check_error(request)

    def _check_vector(self, request: ScriptedRequest) -> None:
        where = f"{_described(request)}, pooling {request.pooling}"
        require(request.vector is not None, f"{where} has no vector")
        assert request.vector is not None
        expected = _direction(self._reference.vector(tuple(request.prompt), request.pooling))
        distance = float(np.linalg.norm(_direction(request.vector) - expected))
        require(
            distance <= self._tolerance,
            f"{where}: its vector is {distance:.6f} away from the right one; allowed: {self._tolerance:g}",
        )

    def _prompt_token(self, history: tuple[int, ...], token: int, reported: PromptToken) -> str | None:
        drawn = self._reference.draw(history, len(history), GREEDY)
        entry = RowLogprobs(0, reported.logprob, reported.top_token_ids, reported.top_logprobs)
        return self._numbers(history, token, entry, drawn)

    def _numbers(self, history: tuple[int, ...], token: int, entry: RowLogprobs, drawn: Draw) -> str | None:
        count = len(entry.top_token_ids)
        reported = dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True)) | {token: entry.logprob}
        for known, logprob in reported.items():
            expected = self._reference.logprob(history, known)
            if abs(expected - logprob) > self._tolerance:
                return f"the logprob of token {known} is {logprob:.6f}; expected {expected:.6f}"
        least = min(entry.top_logprobs, default=0.0)
        likeliest = drawn.logprobs.top_token_ids[:count] if drawn.logprobs is not None else ()
        for known in likeliest:
            logprob = self._reference.logprob(history, known)
            if known not in entry.top_token_ids and logprob > least + 2 * self._tolerance:
                return f"token {known} (logprob {logprob:.6f}) is missing among the {count} likeliest"
        return None

    def _may_differ(self, history: tuple[int, ...], sampling: SamplingParams, token: int, drawn: Draw) -> bool:
        if not self._exact_draws and _changes_ranks(sampling):
            return True
        if _changes_ranks(sampling) or drawn.logprobs is None:
            return False
        return drawn.logprobs.logprob - self._reference.logprob(history, token) <= 2 * self._tolerance

    def _check_error(self, request: ScriptedRequest) -> None:
        drawn = self._reference.draw(tuple(request.history), len(request.prompt), request.sampling)
        message = f"{_described(request)} failed, and should not have: {request.error}"
        require(drawn.error is not None, message)


class AloneOracle:
    """Compares with the same request alone, whose prompt runs in one step."""

    def __init__(self, open_scheduler: Callable[[], ScriptedScheduler]) -> None:
        self._open_scheduler = open_scheduler
        self._scheduler: ScriptedScheduler | None = None
        self._known: dict[tuple[tuple[int, ...], int, SamplingParams, int], ScriptedRequest] = {}

    def check(self, request: ScriptedRequest) -> None:
        alone = self._alone(request)
        where = _described(request)
        if request.pooling:
            vectors = [None if one.vector is None else one.vector.tobytes() for one in (request, alone)]
            is_same = vectors[0] is not None and vectors[0] == vectors[1]
            require(is_same, f"{where}, pooling {request.pooling}: the vector is not the one that it has alone")
            return
        expected_output = alone.output[: len(request.output)]
        require(request.output == expected_output, f"{where} drew {request.output}; alone it draws {expected_output}")
        if request.ended:
            errors = (request.error, alone.error)
            require((errors[0] is None) == (errors[1] is None), f"{where} has the error {errors[0]}; alone {errors[1]}")
        for position, reported in request.prompt_logprobs.items():
            same = alone.prompt_logprobs.get(position)
            require(reported == same, f"{where}: position {position} of its prompt {reported}; alone {same}")
        for mine, expected in zip(request.logprobs, alone.logprobs, strict=False):
            require(_without_row(mine) == _without_row(expected), f"{where}: logprobs {mine}; alone {expected}")

    def _alone(self, request: ScriptedRequest) -> ScriptedRequest:
        key = (tuple(request.prompt), request.max_tokens, request.sampling, request.pooling)
        if key not in self._known:
            if self._scheduler is None:
                self._scheduler = self._open_scheduler()
            alone = ScriptedRequest(list(request.prompt), request.max_tokens, request.sampling, pooling=request.pooling)
            self._scheduler.run([alone])
            self._known[key] = alone
        return self._known[key]


def _changes_ranks(sampling: SamplingParams) -> bool:
    plain = SamplingParams(
        temperature=0.0,
        logprobs=sampling.logprobs,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
    )
    return sampling != plain


def _direction(vector: Float32Array) -> NDArray[np.float64]:
    """Vectors are compared by direction, so that one tolerance serves all models."""
    exact = vector.astype(np.float64)
    return exact / (np.linalg.norm(exact) or 1.0)


def _without_row(entry: RowLogprobs | None) -> tuple[object, ...] | None:
    return None if entry is None else (entry.logprob, entry.top_token_ids, entry.top_logprobs)


def _described(request: ScriptedRequest) -> str:
    defaults = SamplingParams()
    sampling = request.sampling
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    changed = [f"{name}={value!r:.40}" for name, value in fields.items() if value != getattr(defaults, name)]
    return f"a request of {len(request.prompt)} prompt tokens ({', '.join(changed)})"
