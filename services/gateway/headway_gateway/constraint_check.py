"""Whether a constraint can be followed, told before anything is queued; and when a costly one may begin.

Owns: the compiling processes, who may use them next, which verdicts are remembered, and how many costly constraints are on
their way to the executor.
Must not know: what a constraint means, how a process is asked, tokens.

A verdict is a function of the constraint: what the library says of it, or that it broke its process twice. That time ran
out, on the clock or on the processor, is none: it is told as UNAVAILABLE and forgotten.

The executor compiles each constraint once more, and a step of everybody's waits for it. So of those that cost something
each caller has one on its way there at a time, until its first token has come.
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

from headway_gateway.bounded_process import BoundedProcess, NoAnswerError, OutOfTimeError
from headway_gateway.fair_turns import FairTurns, TooManyWaitError
from headway_gateway.grammar_compiler import Verdict, Vocabulary
from headway_gateway.statuses import CallRefusedError, invalid_argument, try_later
from headway_proto.ingress import ModelInfo
from headway_proto.sampling import Constraint

MOST_COMPILE_S = 10.0
"""Until the process is given up, whatever it does. Its own limit is processor time, and comes long before."""

MOST_VERDICTS = 1024
MOST_WAITING = 1024
MOST_WAITING_OF_ONE = 128
CHEAP_S = 0.005
"""Of processor time: what does not hold up a step."""

_NUM_PROCESSES = 2
_MOST_BEGINNING = 2
_MOST_BEGUN = 128
"""Fewer than an executor keeps."""

_PROGRAM = "headway_gateway.grammar_compiler"
_TOKENIZER_FILE = "tokenizer.json"

_Vocabulary: TypeAlias = tuple[int, tuple[int, ...]]


class Beginning:
    """A constraint on its way to the executor. To be told when its output has begun, and when the call is over."""

    def __init__(self, checker: "ConstraintChecker | None" = None, caller: str = "", key: bytes = b"") -> None:
        self._checker = checker
        self._caller = caller
        self._key = key

    def has_begun(self) -> None:
        """The first token has come: the executor has compiled it."""
        self._end(has_begun=True)

    def is_over(self) -> None:
        """The call has ended, whether or not its output began."""
        self._end(has_begun=False)

    def _end(self, *, has_begun: bool) -> None:
        if self._checker is not None:
            self._checker.end(self._caller, self._key, has_begun=has_begun)
            self._checker = None


class ConstraintChecker:
    """Judges constraints for the tokenizer of one model directory, off the event loop."""

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
        """By constraint, set when the one that is on its way with it has come to an end."""
        self._begun: OrderedDict[bytes, None] = OrderedDict()
        """What the executor has compiled not long ago."""
        self.num_compiled = 0
        """Constraints that were not known yet."""

    async def begin(self, constraint: Constraint, model: ModelInfo, caller: str) -> Beginning:
        """Return when an output under ``constraint`` may be asked for. Turns go round the callers.

        Raises:
            CallRefusedError: see ``check``.
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
        """What ``begin`` returned to ``caller`` has come to an end."""
        if has_begun:
            self._begun[key] = None
            if len(self._begun) > _MOST_BEGUN:
                self._begun.popitem(last=False)
        self._leaders.pop(key).set()
        self._beginnings.give_back(caller)

    async def check(self, constraint: Constraint, model: ModelInfo, caller: str = "") -> Verdict:
        """Return if the model's outputs can follow ``constraint``, with what it cost to see that.

        Raises:
            CallRefusedError: INVALID_ARGUMENT with the reason, UNIMPLEMENTED where the executor follows none,
                RESOURCE_EXHAUSTED where too many wait to be judged, UNAVAILABLE where there is no verdict this time.
        """
        field = f"sampling.{constraint.kind}"
        if not model.supports_constraints:
            lacking = f"the executor's backend {model.backend!r:.64} cannot constrain outputs; allowed: unset"
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
            # It goes on if the caller leaves, and so does the turn: the process is taken until then.
            judging.add_done_callback(partial(self._end_turn, caller))
            try:
                verdict = await asyncio.shield(judging)
            except NoAnswerError as error:
                message = f"{field}: could not be compiled this time ({error}); try again, or send a simpler one"
                raise try_later(grpc.StatusCode.UNAVAILABLE, message, reason="constraint_not_judged") from error
        if verdict.problem:
            raise invalid_argument(field, verdict.problem)
        return verdict

    def close(self) -> None:
        """Take no more, and end the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            self._compilers.clear()
            processes = [compiler.process for compiler in self._all]
        for process in processes:
            if process is not None:
                process.kill()  # Who waits for its answer cleans up behind it.

    def _prepare(self, vocabulary: _Vocabulary) -> None:
        """Have a second process at hand from the first constraint on: who needs it would wait for its start."""
        if not self._is_prepared:
            self._is_prepared = True
            self._threads.submit(self._start_another, vocabulary)

    def _start_another(self, vocabulary: _Vocabulary) -> None:
        with suppress(NoAnswerError):  # Who needs it will try again.
            self._rest(vocabulary, self._started(vocabulary))

    def _end_turn(self, caller: str, judging: "asyncio.Future[Verdict]") -> None:
        if not judging.cancelled():
            judging.exception()  # Seen, also where nobody waits for it any more.
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
        """The verdict. On a thread of its own.

        Raises:
            NoAnswerError: there is none.
        """
        verdict = self._known(key)
        if verdict is not None:
            return verdict  # Somebody else's, judged while this one waited.
        question = msgspec.json.encode(constraint)
        try:
            verdict = self._ask(question, vocabulary)
        except OutOfTimeError:
            raise
        except NoAnswerError:
            # The process may have been broken before. What breaks another one as well breaks it by itself.
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
        """``compiler`` is free for another question."""
        with self._lock:
            if not self._is_closed:
                self._compilers.append((vocabulary, compiler))
                return
        compiler.stop()

    def _compiler_for(self, vocabulary: _Vocabulary) -> BoundedProcess:
        """A process at rest, or a new one; the executor may have become another, with another model."""
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
            raise NoAnswerError(f"the compiler does not start: {error}") from error  # Not for the constraint's sake.
        if problem:
            compiler.stop()
            raise NoAnswerError(problem)
        return compiler


def _key(constraint: Constraint, model: ModelInfo) -> bytes:
    vocabulary = model.vocab_size, model.eos_token_ids
    return sha256(repr((constraint.kind, constraint.text, vocabulary)).encode()).digest()
