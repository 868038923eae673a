"""Imports that bring no more than our processes use: they start in less time.

Owns: what structlog and NumPy would do beside, and how that is prevented. Must not know: who needs them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def import_structlog() -> None:
    """Import structlog without rich.

    Where rich is installed, structlog imports it for tracebacks that no log of ours has, and it is most of the time.
    """
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # an import of it fails, as if it were not installed
    try:
        import structlog  # noqa: F401
    finally:
        del sys.modules["rich"]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy, if it is imported within, start no threads: they spin for a while, one for each core, and find no work.

    A user's own setting stays. Afterwards all is as before, because what PyTorch brings may read the same variable.
    """
    if _BLAS_THREADS in os.environ:
        yield
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]
