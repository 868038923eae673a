"""The tools of a scenario: the backend under test, a model, prompts, and an oracle.

Owns: opening and closing backends. Must not know: any scenario.
"""

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from headway_conformance.executor_side import ExecutorSide, execute, wait
from headway_conformance.failures import CannotCheck, NotApplicable, require
from headway_conformance.oracles import EXACT_DTYPE, TOLERANCES, AloneOracle, Oracle, ReferenceOracle
from headway_conformance.reference import reference_for
from headway_conformance.requests import GREEDY, ScriptedRequest
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_conformance.sizes import Size
from headway_executor.backend import BackendConfig, ExecutorBackend, StepBatch, StepResult
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo

NO_DTYPE = "none"
"""The dtype that a backend without numbers announces."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The backend under test, and its settings.

    ``numerics``: whether it computes the model's tokens (None: unless it announces the dtype "none"). ``tolerance`` is
    for log probabilities (None: by that dtype).
    """

    create_backend: Callable[[], ExecutorBackend]
    size: Size
    device: str
    dtype: str
    options: dict[str, str]
    numerics: bool | None
    tolerance: float | None
    timeout_s: float


class Stage:
    """Closes what it opened."""

    def __init__(self, target: Target, *, model: Path, family: str, seed: str) -> None:
        self.size = target.size
        self.create_backend = target.create_backend
        self._target = target
        self._model = model
        self._family = family
        self._random = random.Random(zlib.crc32(seed.encode()))
        self._executors: list[ExecutorSide] = []
        self._oracle: Oracle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for executor in self._executors:
            executor.close()

    def config(self, **changes: Any) -> BackendConfig:
        size = self.size
        config = BackendConfig(
            model=str(self._model),
            device=self._target.device,
            dtype=self._target.dtype,
            block_size=size.block_size,
            num_kv_blocks=size.num_kv_blocks,
            max_model_len=size.max_model_len,
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_num_batched_tokens,
            options=self._target.options,
        )
        return msgspec.structs.replace(config, **changes)

    def scheduler(self, *, depth: int = 1, seed: int = 0, **changes: Any) -> ScriptedScheduler:
        """A scheduler over a newly opened backend."""
        executor = ExecutorSide(self._target.create_backend, self.config(**changes), timeout_s=self._target.timeout_s)
        self._executors.append(executor)
        if self._oracle is None:
            self._oracle = self._make_oracle(executor.info)
        return ScriptedScheduler(
            executor, max_num_batched_tokens=self.size.max_num_batched_tokens, depth=depth, seed=seed
        )

    def execute(self, backend: ExecutorBackend, batch: StepBatch) -> StepResult:
        """Run one step on a backend that the scenario opened."""
        return wait(execute(backend, batch), self._target.timeout_s)

    def prompt(self, length: int) -> list[int]:
        """Random tokens; the same in every run of the scenario."""
        return [self._random.randrange(self.size.vocab_size) for _ in range(length)]

    def request(
        self, length: int, max_tokens: int | None = None, sampling: SamplingParams = GREEDY, *, foreseen: bool = True
    ) -> ScriptedRequest:
        """A request with a random prompt."""
        return ScriptedRequest(self.prompt(length), max_tokens or self.size.num_output, sampling, foreseen)

    def pooled(self, length: int, pooling: int) -> ScriptedRequest:
        """A request for the vector of a random prompt."""
        return ScriptedRequest(self.prompt(length), 1, pooling=pooling)

    def verify(self, *requests: ScriptedRequest) -> None:
        """Check the draws of requests, which must have ended without an error.

        Raises:
            ConformanceFailure: one has not, or drew something else.
        """
        for request in requests:
            require(request.error is None, f"a request of {len(request.prompt)} prompt tokens failed: {request.error}")
            count = len(request.output)
            require(count == request.max_tokens, f"{count} tokens came of {request.max_tokens}")
            self.verify_output(request)

    def verify_failed(self, request: ScriptedRequest) -> None:
        """Check that a request failed, and its draws before.

        Raises:
            ConformanceFailure: it has not, or drew something else.
        """
        require(request.error is not None, "a row that cannot draw anything has no error")
        self.verify_output(request)

    def verify_output(self, request: ScriptedRequest) -> None:
        assert self._oracle is not None, "verify comes after scheduler"
        self._oracle.check(request)

    def has_numerics(self, info: BackendInfo) -> bool:
        numerics = self._target.numerics
        return info.dtype != NO_DTYPE if numerics is None else numerics

    def require_numerics(self) -> None:
        """End the scenario for backends without a model."""
        with_model = self._target.numerics
        if with_model is None:
            backend = self.create_backend()
            with_model = self.has_numerics(backend.open(self.config()))
            backend.close()
        if not with_model:
            raise NotApplicable("it has no model")

    def _make_oracle(self, info: BackendInfo) -> Oracle:
        if not self.has_numerics(info):
            return AloneOracle(self.scheduler)
        tolerance = self._target.tolerance
        if tolerance is None:
            if info.dtype not in TOLERANCES:
                known = ", ".join(TOLERANCES)
                raise CannotCheck(
                    f"tolerance: None is not allowed with dtype {info.dtype!r:.64}; it is known for {known}"
                )
            tolerance = TOLERANCES[info.dtype]
        reference = reference_for(self._model, self._family, self.size)
        return ReferenceOracle(reference, tolerance=tolerance, exact_draws=info.dtype == EXACT_DTYPE)
