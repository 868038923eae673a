"""The right draws of a real model after a given history, and their likelihoods.

Owns: the reference (the ``torch`` backend's eager operators in float32 on one row), its earlier answers. Must not know:
the backend under test.

It answers after the history that the backend really had: one different draw, likely in low precision, says nothing
about later draws.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from headway_conformance.executor_side import ExecutorSide
from headway_conformance.failures import CannotCheck
from headway_conformance.requests import GREEDY
from headway_conformance.sizes import Size
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.startup.registry import create_backend
from headway_proto.columns import Float32Array, decode_floats, encode_column, encode_columns
from headway_proto.pooling import NO_POOLING
from headway_proto.sampling import MAX_LOGPROBS, NO_LOGPROBS, SamplingParams
from headway_proto.step import BackendInfo, NewRequest, PoolingOutput, RowLogprobs

_TIMEOUT_S = 60.0
_FORCING_BIAS = 100.0

_History = tuple[int, ...]


@dataclass(frozen=True)
class Draw:
    token: int
    logprobs: RowLogprobs | None
    error: str | None


class Reference:
    """Answers for the checkpoint in ``directory``.

    Raises (on construction):
        BackendConfigError: torch is not installed.
    """

    def __init__(self, directory: Path, size: Size) -> None:
        config = BackendConfig(
            model=str(directory),
            dtype="float32",
            block_size=size.block_size,
            num_kv_blocks=-(-size.max_model_len // size.block_size),
            swap_space_mib=0,
            max_num_seqs=1,
            max_num_batched_tokens=size.max_model_len,
            num_threads=1,
            options={"kernels": "eager"},
        )
        self._executor = ExecutorSide(lambda: create_backend("torch"), config, timeout_s=_TIMEOUT_S)
        self._blocks = encode_column(range(self._executor.info.num_blocks))
        self._history: _History = ()
        self._step = 0
        self._draws: dict[tuple[_History, int, SamplingParams], Draw] = {}
        self._logprobs: dict[tuple[_History, int], float] = {}
        self._vectors: dict[tuple[_History, int], Float32Array] = {}

    @property
    def info(self) -> BackendInfo:
        return self._executor.info

    def draw(self, history: _History, num_prompt_tokens: int, sampling: SamplingParams) -> Draw:
        """Draw the next token, with all logprobs."""
        asked = msgspec.structs.replace(sampling, logprobs=MAX_LOGPROBS, prompt_logprobs=NO_LOGPROBS)
        key = (history, num_prompt_tokens, asked)
        if key not in self._draws:
            self._draws[key] = self._run(history, num_prompt_tokens, asked)
        return self._draws[key]

    def logprob(self, history: _History, token: int) -> float:
        key = (history, token)
        if key not in self._logprobs:
            forcing = msgspec.structs.replace(GREEDY, logit_bias=((token, _FORCING_BIAS),))
            forced = self.draw(history, len(history), forcing)
            assert forced.token == token, "the weights of the checkpoint are out of all proportion"
        return self._logprobs[key]

    def vector(self, prompt: _History, pooling: int) -> Float32Array:
        """Return the vector of a prompt; float32 ``[embedding_size]``."""
        key = (prompt, pooling)
        if key not in self._vectors:
            message = self._message(prompt, len(prompt), 0, GREEDY, pooling)
            (entry,) = self._executor.wait(self._executor.submit(message)).vectors
            self._history = ()  # whatever the blocks hold now is not built upon
            self._step += 1
            self._vectors[key] = decode_floats(entry.values)
        return self._vectors[key]

    def _run(self, history: _History, num_prompt_tokens: int, sampling: SamplingParams) -> Draw:
        num_computed = min(_common(history, self._history), len(history) - 1)
        result = self._executor.wait(
            self._executor.submit(self._message(history, num_prompt_tokens, num_computed, sampling))
        )
        self._history = history
        self._step += 1
        (token,) = result.sampled_token_ids.tolist()
        if result.errors:
            return Draw(token, None, result.errors[0].message)
        (entry,) = result.logprobs
        self._logprobs[history, token] = entry.logprob
        for known, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            self._logprobs[history, known] = logprob
        return Draw(token, entry, None)

    def _message(
        self,
        history: _History,
        num_prompt_tokens: int,
        num_computed: int,
        sampling: SamplingParams,
        pooling: int = NO_POOLING,
    ) -> PoolingOutput:
        """The blocks keep what was computed before."""
        count = len(history) - num_computed
        request = NewRequest(
            row=0,
            token_ids=encode_column(history),
            num_prompt_tokens=num_prompt_tokens,
            block_ids=self._blocks,
            num_computed_tokens=num_computed,
            sampling=sampling,
        )
        return PoolingOutput(
            epoch=1,
            step=self._step,
            scheduled_new_reqs=(request,),
            finished_rows=encode_column([0] if self._step else []),
            num_scheduled_tokens=encode_columns(np.array([[0], [count]])),
            total_num_scheduled_tokens=count,
            pooled=encode_columns(np.array([[0], [pooling]] if pooling else [[], []], dtype=np.int32)),
        )


def _common(first: _History, second: _History) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


_OPEN: dict[tuple[str, str], Reference] = {}


def reference_for(directory: Path, family: str, size: Size) -> Reference:
    """Share one reference per family and size.

    Raises:
        CannotCheck: torch is not installed.
    """
    key = (family, size.name)
    if key not in _OPEN:
        try:
            _OPEN[key] = Reference(directory, size)
        except BackendConfigError as error:
            raise CannotCheck(f"the reference of a real model: {error}") from error
    return _OPEN[key]
