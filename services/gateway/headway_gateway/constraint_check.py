"""Whether a constraint can be followed, told before anything is queued.

Owns: when the compiling process runs, how long it may take over one constraint, how many wait for it, and which verdicts
are remembered.
Must not know: what a constraint means, how a process is asked, tokens.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import grpc
import msgspec

from headway_gateway.bounded_process import BoundedProcess, NoAnswerError
from headway_gateway.grammar_compiler import Verdict, Vocabulary
from headway_gateway.statuses import CallRefusedError, invalid_argument
from headway_proto.ingress import ModelInfo
from headway_proto.sampling import Constraint

MOST_COMPILE_S = 1.0
MOST_VERDICTS = 1024
MOST_WAITING = 256
REMEMBERED_FAILURE_S = 30.0
"""For how long a constraint that got no verdict is refused unseen: the machine may have been busy with something else."""

_FOR_EVER = float("inf")
_PROGRAM = "headway_gateway.grammar_compiler"
_TOKENIZER_FILE = "tokenizer.json"
_TOO_LONG = "takes too long to compile; allowed: a simpler one"


class ConstraintChecker:
    """Judges constraints for the tokenizer of one model directory, one at a time, off the event loop."""

    def __init__(self, directory: Path, *, most_compile_s: float = MOST_COMPILE_S) -> None:
        self._directory = directory
        self._most_compile_s = most_compile_s
        self._verdicts: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        self._compiler: BoundedProcess | None = None
        self._vocabulary: tuple[int, tuple[int, ...]] | None = None
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="check-constraints")
        self._lock = threading.Lock()
        self._num_waiting = 0
        self.num_compiled = 0
        """Constraints that were not known yet."""

    async def check(self, constraint: Constraint, model: ModelInfo) -> None:
        """Return if the model's outputs can follow ``constraint``.

        Raises:
            CallRefusedError: INVALID_ARGUMENT with the reason, UNIMPLEMENTED where the executor follows none,
                RESOURCE_EXHAUSTED where too many wait to be judged.
        """
        field = f"sampling.{constraint.kind}"
        if not model.supports_constraints:
            lacking = f"the executor's backend {model.backend!r:.64} cannot constrain outputs; allowed: unset"
            raise CallRefusedError(grpc.StatusCode.UNIMPLEMENTED, f"{field}: {lacking}", violations=((field, lacking),))
        vocabulary = model.vocab_size, model.eos_token_ids
        key = sha256(repr((constraint.kind, constraint.text, vocabulary)).encode()).digest()
        problem = self._known(key)
        if problem is None:
            if self._num_waiting >= MOST_WAITING:
                raise CallRefusedError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{self._num_waiting} constraints wait to be compiled; allowed: {MOST_WAITING}",
                    retry_after_s=self._most_compile_s,
                    reason="constraints_waiting",
                )
            self._num_waiting += 1
            try:
                loop = asyncio.get_running_loop()
                problem = await loop.run_in_executor(self._lane, self._judge, key, constraint, vocabulary)
            finally:
                self._num_waiting -= 1
        if problem:
            raise invalid_argument(field, problem)

    def close(self) -> None:
        """Take no more, and end the process."""
        self._lane.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            if self._compiler is not None:
                self._compiler.stop()

    def _known(self, key: bytes) -> str | None:
        with self._lock:
            problem, until = self._verdicts.get(key, ("", 0.0))
            if time.monotonic() >= until:
                return None
            self._verdicts.move_to_end(key)
            return problem

    def _judge(self, key: bytes, constraint: Constraint, vocabulary: tuple[int, tuple[int, ...]]) -> str:
        """The problem with ``constraint``, empty if there is none. On the thread of the lane."""
        problem = self._known(key)
        if problem is not None:
            return problem  # Somebody else's, judged while this one waited.
        until = _FOR_EVER
        try:
            problem = self._compile(constraint, vocabulary)
        except NoAnswerError as error:
            problem = _TOO_LONG if error.is_too_late else f"cannot be compiled: {error}"
            until = time.monotonic() + REMEMBERED_FAILURE_S
        with self._lock:
            self.num_compiled += 1
            self._verdicts[key] = problem, until
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        return problem

    def _compile(self, constraint: Constraint, vocabulary: tuple[int, tuple[int, ...]]) -> str:
        compiler = self._compiler_for(vocabulary)
        return _problem_in(compiler.ask(msgspec.json.encode(constraint), self._most_compile_s))

    def _compiler_for(self, vocabulary: tuple[int, tuple[int, ...]]) -> BoundedProcess:
        """The process, started if it is not there; the executor may have become another, with another model."""
        if self._compiler is not None and self._compiler.process is not None and self._vocabulary == vocabulary:
            return self._compiler
        vocab_size, eos_token_ids = vocabulary
        try:
            tokenizer = (self._directory / _TOKENIZER_FILE).read_text(encoding="utf-8")
        except OSError as error:
            raise NoAnswerError(f"{_TOKENIZER_FILE} cannot be read") from error
        opening = msgspec.json.encode(Vocabulary(tokenizer, vocab_size, eos_token_ids))
        compiler = BoundedProcess(_PROGRAM, opening)
        if self._compiler is not None:
            self._compiler.stop()
        self._compiler, self._vocabulary = compiler, vocabulary
        problem = _problem_in(compiler.start())
        if problem:
            compiler.stop()
            raise NoAnswerError(problem)
        return compiler


def _problem_in(answer: bytes) -> str:
    return msgspec.json.decode(answer, type=Verdict).problem
