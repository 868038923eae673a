"""Who may import whom: the contracts of pyproject.toml, checked, and what a light command must not load."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def test_import_contracts_are_kept():
    check = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("headway_scheduler.process", ("torch", "grpc", "google.protobuf")),
        ("headway_gateway.process", ("torch",)),
        ("headway.__main__", ("torch", "grpc", "zmq", "numpy")),
    ],
)
def test_importing_a_process_loads_nothing_that_its_host_lacks(module, forbidden):
    program = f"import sys, {module}; print([name for name in {forbidden!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == "[]"
