"""What our processes import brings nothing that they do not use."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from headway_process.lean_imports import import_structlog, one_blas_thread
before = dict(os.environ)
import_structlog()
with one_blas_thread():
    import numpy
assert os.environ == before
print("rich" in sys.modules, len(os.listdir("/proc/self/task")), end=" ")
import rich, structlog
print(structlog.__name__, rich.__name__)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")
@pytest.mark.parametrize(("setting", "most_threads"), [({}, 1), ({"OPENBLAS_NUM_THREADS": "2"}, 2)])
def test_neither_rich_nor_threads_come_along_and_both_are_to_be_had(setting: dict[str, str], most_threads: int) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS")} | setting
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=environment)
    has_rich, num_threads, *names = done.stdout.split()
    assert has_rich == "False"
    assert 1 <= int(num_threads) <= most_threads
    assert names == ["structlog", "rich"]
