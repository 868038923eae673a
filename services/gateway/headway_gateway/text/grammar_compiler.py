"""The child process that compiles constraints to check them.

The library does not count all it spends. Frames hold JSON: a ``Vocabulary``, then ``Constraint``s; each gets a
``Verdict``.
"""

import time

import msgspec

from headway_gateway.text.bounded_process import limit_this_process, serve
from headway_proto.grammars import ConstraintError, GrammarCompiler, TokenizerUnusableError
from headway_proto.sampling import Constraint

MAX_MEMORY_BYTES = 4 << 30
MAX_CPU_S = 0.5
"""The executor spends it again, while other rows wait."""


class Vocabulary(msgspec.Struct, frozen=True):
    """tokenizer.json, the logits' width, the end tokens."""

    tokenizer: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Verdict(msgspec.Struct, frozen=True):
    """A fault in one line, and the processor time."""

    problem: str = ""
    cpu_s: float = 0.0


def main() -> None:
    """Serve until the pipe closes."""
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
