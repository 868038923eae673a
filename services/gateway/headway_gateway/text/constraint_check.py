"""The check that a constraint compiles, and the turns of costly ones.

The executor compiles it again, and all rows wait for that step; so each caller has one costly constraint in progress,
until its first token.
"""

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias
from weakref import WeakSet

import grpc
import msgspec

from headway_gateway.statuses import CallRefusedError, invalid_argument, try_later
from headway_gateway.text.bounded_process import BoundedProcess, NoAnswerError, OutOfTimeError
from headway_gateway.text.fair_turns import FairTurns, TooManyWaitError
from headway_gateway.text.grammar_compiler import Verdict, Vocabulary
from headway_proto.ingress import ModelInfo
from headway_proto.sampling import Constraint
from headway_proto.wording import shown

MOST_COMPILE_S = 10.0
"""The process has its own, shorter limit of processor time."""

MOST_VERDICTS = 1024
MOST_WAITING = 1024
MOST_WAITING_OF_ONE = 128
CHEAP_S = 0.005
"""Processor time that does not delay a step."""

_NUM_PROCESSES = 2
_MOST_BEGINNING = 2
_MOST_BEGUN = 128
"""An executor keeps more."""

_PROGRAM = "headway_gateway.text.grammar_compiler"
_TOKENIZER_FILE = "tokenizer.json"

_Vocabulary: TypeAlias = tuple[int, tuple[int, ...]]


class Beginning:
    """A constraint that the executor has yet to compile."""

    def __init__(self, checker: "ConstraintChecker | None" = None, caller: str = "", key: bytes = b"") -> None:
        self._checker = checker
        self._caller = caller
        self._key = key

    def has_begun(self) -> None:
        """Record the first token."""
        self._end(has_begun=True)

    def is_over(self) -> None:
        """Record the end of the call."""
        self._end(has_begun=False)

    def _end(self, *, has_begun: bool) -> None:
        if self._checker is not None:
            self._checker.end(self._caller, self._key, has_begun=has_begun)
            self._checker = None


class ConstraintChecker:
    """Checks constraints for one tokenizer."""

    def __init__(self, directory: Path, *, most_compile_s: float = MOST_COMPILE_S) -> None:
        self._directory = directory
        self._most_compile_s = most_compile_s
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._compilers: list[tuple[_Vocabulary, BoundedProcess]] = []
        """Those at rest."""
        self._all: WeakSet[BoundedProcess] = WeakSet()
        self._is_prepared = False
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="check-constraints")
        self._turns = FairTurns(_NUM_PROCESSES, most_waiting_of_one=MOST_WAITING_OF_ONE, most_waiting=MOST_WAITING)
        self._beginnings = FairTurns(
            _MOST_BEGINNING, most_waiting_of_one=MOST_WAITING_OF_ONE, most_waiting=MOST_WAITING
        )
        self._leaders: dict[bytes, asyncio.Event] = {}
        """By constraint; set when the one in progress ends."""
        self._begun: OrderedDict[bytes, None] = OrderedDict()
        """Compiled by the executor recently."""
        self.num_compiled = 0
        """Constraints that were not known yet."""

    async def begin(self, constraint: Constraint, model: ModelInfo, caller: str) -> Beginning:
        """Return when an output may be submitted.

        Raises:
            CallRefusedError: as ``check``.
        """
        verdict = await self.check(constraint, model, caller)
        if verdict.cpu_s <= CHEAP_S:
            return Beginning()
        key = _key(constraint, model)
        while key not in self._begun:
            leader = self._leaders.get(key)
            if leader is None:
                self._leaders[key] = asyncio.Event()
                try:
                    await self._take(self._beginnings, caller, constraint)
                except BaseException:
                    self._leaders.pop(key).set()
                    raise
                return Beginning(self, caller, key)
            await leader.wait()
        self._begun.move_to_end(key)
        return Beginning()

    def end(self, caller: str, key: bytes, *, has_begun: bool) -> None:
        """Record the end of a ``Beginning``."""
        if has_begun:
            self._begun[key] = None
            if len(self._begun) > _MOST_BEGUN:
                self._begun.popitem(last=False)
        self._leaders.pop(key).set()
        self._beginnings.give_back(caller)

    async def check(self, constraint: Constraint, model: ModelInfo, caller: str = "") -> Verdict:
        """Return the verdict on a valid constraint.

        Raises:
            CallRefusedError: INVALID_ARGUMENT, UNIMPLEMENTED, RESOURCE_EXHAUSTED if too many wait, UNAVAILABLE without
                a verdict.
        """
        field = f"sampling.{constraint.kind}"
        if not model.supports_constraints:
            lacking = f"the executor's backend {shown(model.backend)} cannot constrain outputs; allowed: unset"
            raise CallRefusedError(grpc.StatusCode.UNIMPLEMENTED, f"{field}: {lacking}", violations=((field, lacking),))
        key = _key(constraint, model)
        verdict = self._known(key)
        if verdict is None:
            await self._take(self._turns, caller, constraint)
            try:
                self._prepare((model.vocab_size, model.eos_token_ids))
                judging = asyncio.get_running_loop().run_in_executor(
                    self._threads, self._judge, key, constraint, (model.vocab_size, model.eos_token_ids)
                )
            except BaseException:
                self._turns.give_back(caller)
                raise
            # If the caller leaves, the check and its turn go on, because the process stays busy.
            judging.add_done_callback(partial(self._end_turn, caller))
            try:
                verdict = await asyncio.shield(judging)
            except NoAnswerError as error:
                message = f"could not be compiled this time ({error}); try again, or send a simpler one"
                raise try_later(
                    grpc.StatusCode.UNAVAILABLE, message, field=field, reason="constraint_not_judged"
                ) from error
        if verdict.problem:
            raise invalid_argument(field, verdict.problem)
        return verdict

    def close(self) -> None:
        """Refuse more, and end the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            self._compilers.clear()
            processes = [compiler.process for compiler in self._all]
        for process in processes:
            if process is not None:
                process.kill()  # the thread that waits for its answer cleans up

    def _prepare(self, vocabulary: _Vocabulary) -> None:
        """Start a second process before a call waits for it."""
        if not self._is_prepared:
            self._is_prepared = True
            self._threads.submit(self._start_another, vocabulary)

    def _start_another(self, vocabulary: _Vocabulary) -> None:
        with suppress(NoAnswerError):  # the next constraint tries again
            self._rest(vocabulary, self._started(vocabulary))

    def _end_turn(self, caller: str, judging: "asyncio.Future[Verdict]") -> None:
        if not judging.cancelled():
            judging.exception()  # mark the error as seen, even if no call waits
        self._turns.give_back(caller)

    async def _take(self, turns: FairTurns, caller: str, constraint: Constraint) -> None:
        try:
            await turns.take(caller)
        except TooManyWaitError as error:
            message = f"sampling.{constraint.kind}: too many constraints wait to be compiled: {error}"
            raise try_later(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason="constraints_waiting") from error

    def _known(self, key: bytes) -> Verdict | None:
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._verdicts.move_to_end(key)
            return verdict

    def _judge(self, key: bytes, constraint: Constraint, vocabulary: _Vocabulary) -> Verdict:
        verdict = self._known(key)
        if verdict is not None:
            return verdict  # another call checked the same constraint meanwhile
        question = msgspec.json.encode(constraint)
        try:
            verdict = self._ask(question, vocabulary)
        except OutOfTimeError:
            raise
        except NoAnswerError:
            # The process may have been broken before. If the constraint breaks a second one, it is at fault.
            try:
                verdict = self._ask(question, vocabulary)
            except NoAnswerError as error:
                if not error.is_its_own_fault:
                    raise
                verdict = Verdict(f"cannot be compiled: {error}")
        with self._lock:
            self.num_compiled += 1
            self._verdicts[key] = verdict
            if len(self._verdicts) > MOST_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    def _ask(self, question: bytes, vocabulary: _Vocabulary) -> Verdict:
        compiler = self._compiler_for(vocabulary)
        verdict = msgspec.json.decode(compiler.ask(question, self._most_compile_s), type=Verdict)
        self._rest(vocabulary, compiler)
        return verdict

    def _rest(self, vocabulary: _Vocabulary, compiler: BoundedProcess) -> None:
        with self._lock:
            if not self._is_closed:
                self._compilers.append((vocabulary, compiler))
                return
        compiler.stop()

    def _compiler_for(self, vocabulary: _Vocabulary) -> BoundedProcess:
        with self._lock:
            resting = self._compilers
            fitting = [compiler for one, compiler in resting if one == vocabulary]
            others = [compiler for one, compiler in resting if one != vocabulary]
            self._compilers = [(vocabulary, compiler) for compiler in fitting[:-1]]
        for compiler in others:
            compiler.stop()
        return fitting[-1] if fitting else self._started(vocabulary)

    def _started(self, vocabulary: _Vocabulary) -> BoundedProcess:
        vocab_size, eos_token_ids = vocabulary
        try:
            tokenizer = (self._directory / _TOKENIZER_FILE).read_text(encoding="utf-8")
        except OSError as error:
            raise NoAnswerError(f"{_TOKENIZER_FILE} cannot be read") from error
        compiler = BoundedProcess(_PROGRAM, msgspec.json.encode(Vocabulary(tokenizer, vocab_size, eos_token_ids)))
        with self._lock:
            if self._is_closed:
                raise NoAnswerError("the gateway is shutting down")
            self._all.add(compiler)
        try:
            problem = msgspec.json.decode(compiler.start(), type=Verdict).problem
        except NoAnswerError as error:
            raise NoAnswerError(f"the compiler does not start: {error}") from error  # the constraint is not the cause
        if problem:
            compiler.stop()
            raise NoAnswerError(problem)
        return compiler


def _key(constraint: Constraint, model: ModelInfo) -> bytes:
    vocabulary = model.vocab_size, model.eos_token_ids
    return sha256(repr((constraint.kind, constraint.text, vocabulary)).encode()).digest()
