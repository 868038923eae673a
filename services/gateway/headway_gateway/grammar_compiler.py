"""The process that compiles constraints to see whether they can be followed, and does nothing else.

Owns: the questions and answers on its pipes, and the most memory that the process may use.
Must not know: what a constraint means, gRPC, who asks.

A schema is a program of a stranger's. The library counts what it spends on one, but not everything, so it is run here:
``constraint_check`` starts this module as a process, which ends itself over a question that takes too much processor time.

Frames hold JSON. The first is a ``Vocabulary``, each later one a ``Constraint``; each is answered with a ``Verdict``.
"""

import time

import msgspec

from headway_gateway.bounded_process import limit_this_process, serve
from headway_proto.grammars import ConstraintError, GrammarCompiler, TokenizerUnusableError
from headway_proto.sampling import Constraint

MAX_MEMORY_BYTES = 4 << 30
MAX_CPU_S = 0.5
"""Of one constraint. The executor spends it once more, in the way of the others' steps."""


class Vocabulary(msgspec.Struct, frozen=True):
    """The text of a tokenizer.json, the width of the logits, and the tokens that end an output."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True):
    """What is wrong, in one line, empty if nothing is; and the processor time that it took to find out."""

    problem: str = ""
    cpu_s: float = 0.0


def main() -> None:
    """Serve until the pipe is closed."""
    limit_this_process(MAX_MEMORY_BYTES)
    compiler: GrammarCompiler | None = None

    def answer(body: bytes) -> bytes:
        nonlocal compiler
        began_at = time.process_time()
        try:
            if compiler is None:
                vocabulary = msgspec.json.decode(body, type=Vocabulary)
                compiler = GrammarCompiler(
                    vocabulary.tokenizer,
                    vocab_size=vocabulary.vocab_size,
                    eos_token_ids=vocabulary.eos_token_ids,
                )
            else:
                matcher = compiler.compile(msgspec.json.decode(body, type=Constraint)).matcher()
                matcher.fill_mask(compiler.new_mask())
        except (ConstraintError, TokenizerUnusableError) as error:
            return msgspec.json.encode(Verdict(str(error)))
        return msgspec.json.encode(Verdict(cpu_s=time.process_time() - began_at))

    serve(answer, MAX_CPU_S)


if __name__ == "__main__":
    main()
