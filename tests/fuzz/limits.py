"""What every decoder is held to here: its documented error or an answer, soon, and in little memory.

Owns: the check around each example.
"""

import contextlib
import time
import tracemalloc
from collections.abc import Iterator

import hypothesis
from hypothesis import HealthCheck

from drawn_examples import FACTOR

MOST_S = 2.0
MOST_BYTES = 64 << 20


def examples(count: int = 100) -> hypothesis.settings:
    """Settings of a fuzz test: the same examples in every run, unless it is asked for more."""
    return hypothesis.settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Whatever happens inside takes little time and memory."""
    started = time.process_time()
    tracemalloc.start()
    try:
        yield
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Processor time: whatever else the machine does is not the decoder's doing.
    assert time.process_time() - started < MOST_S
    assert most < MOST_BYTES
