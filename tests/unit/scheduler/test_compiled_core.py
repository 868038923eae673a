"""The compiled core: made of exactly the sources beside it or not used, and the same scheduler as they are."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from core_driver import CoreDriver
from headway_scheduler import compile_core, compiled_core
from headway_scheduler.compile_core import CoreBuildError, ToolMissingError
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits

PACKAGE = Path(compiled_core.__file__).parent


def what_is_missing() -> str:
    try:
        compile_core.require_tools()
    except ToolMissingError as error:
        return str(error)
    return ""


@pytest.fixture
def package(tmp_path):
    """A package with a small core, and what compiles it."""
    package = tmp_path / "services" / "scheduler" / "headway_scheduler"
    (package / "core").mkdir(parents=True)
    for name in ("compiled_core.py", "compile_core.py"):
        shutil.copy(PACKAGE / name, package)
    (package / "__init__.py").touch()
    (package / "core" / "__init__.py").write_text(
        "from headway_scheduler.compiled_core import search_path\n\n__path__ = search_path()\n"
    )
    (package / "core" / "message.py").write_text("import msgspec\n\n\nclass Asked(msgspec.Struct):\n    value: int\n")
    (package / "core" / "answer.py").write_text(
        "from headway_scheduler.core.message import Asked\n\n\n"
        "class Answer:\n    def __init__(self, asked: Asked) -> None:\n        self.value = asked.value * 2\n"
    )
    return package


def run_in(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    return subprocess.run([sys.executable, "-P", *words], env=environment, capture_output=True, text=True, check=False)


ASK = (
    "from headway_scheduler.core.answer import Answer; from headway_scheduler.core.message import Asked; "
    "print(Answer(Asked(21)).value, hasattr(Answer, '__mypyc_attrs__'))"
)


@pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
def test_a_core_is_compiled_used_and_left_alone_as_soon_as_a_source_changes(package):
    assert run_in(package, "-c", ASK).stdout == "42 False\n"
    done = run_in(package, "-m", "headway_scheduler.compile_core")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("the scheduler's core: compiled in ")
    assert run_in(package, "-c", ASK).stdout == "42 True\n"
    assert run_in(package, "-m", "headway_scheduler.compile_core").stdout == "the scheduler's core: up to date\n"
    with (package / "core" / "message.py").open("a") as source:
        source.write("# changed\n")
    assert run_in(package, "-c", ASK).stdout == "42 False\n"
    answer = package / "core" / "answer.py"
    answer.write_text(answer.read_text().replace("* 2", '+ ""'))
    refused = run_in(package, "-m", "headway_scheduler.compile_core")
    assert refused.returncode == 1
    assert refused.stderr.startswith("the core cannot be compiled: ")
    assert "Unsupported operand" in refused.stderr
    assert refused.stderr.count("\n") == 1
    leftovers = {path.name for path in (package / "core").iterdir()} - {"__pycache__"}
    assert leftovers == {"__init__.py", "message.py", "answer.py", "_compiled"}


def test_what_defines_messages_and_settings_is_not_compiled(package):
    assert [path.name for path in compiled_core.compiled_modules(package / "core")] == ["answer.py"]
    names = {path.stem for path in compiled_core.compiled_modules()}
    assert {"scheduler", "row_table", "block_pool", "prefix_cache", "request"} <= names
    assert not names & {"__init__", "arrival", "events", "limits", "counters"}


def test_compiled_modules_belong_to_all_the_sources_and_to_one_python(package, monkeypatch):
    core, compiled = package / "core", package / "core" / "_compiled"
    assert not compiled_core.is_up_to_date(core, compiled)
    compiled.mkdir()
    (compiled / compiled_core.STAMP).write_text(compiled_core.stamp_of(core))
    assert compiled_core.is_up_to_date(core, compiled)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: ".cpython-399.so")
    assert not compiled_core.is_up_to_date(core, compiled)
    monkeypatch.undo()
    (core / "another.py").touch()
    assert not compiled_core.is_up_to_date(core, compiled)


def test_these_tests_run_what_is_up_to_date():
    assert hasattr(Scheduler, "__mypyc_attrs__") == compiled_core.runs_compiled()


@pytest.mark.parametrize(
    ("missing", "words"),
    [("mypyc", "no mypyc, which compiling the core takes"), ("ziglang", "no C compiler for the core")],
)
def test_without_a_tool_one_line_tells_which(missing, words, monkeypatch, capsys):
    find_spec = compile_core.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find_spec(name))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ToolMissingError, match=words):
        compile_core.require_tools()
    monkeypatch.setattr(compile_core, "is_up_to_date", lambda: False)
    monkeypatch.setattr("sys.argv", ["compile_core"])
    assert compile_core.main() == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.endswith("; its sources run instead, and a step takes half as long again")


def test_without_python_s_headers_the_line_names_their_package(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(CoreBuildError, match=r"Python\.h.*apt install python3-dev"):
        compile_core.require_tools()


def digest_of_a_busy_core() -> str:
    """Everything that a core sends over a few hundred steps of arrivals, ends, aborts and preemptions in a small pool."""
    limits = SchedulerLimits(max_num_batched_tokens=96, max_num_seqs=12, order="fair", preemption="auto")
    capacity = ExecutorCapacity(
        num_blocks=40, block_size=4, max_model_len=64, vocab_size=8, max_num_rows=12, num_host_blocks=16
    )
    driver = CoreDriver(limits, capacity)
    rng = np.random.default_rng(7)
    sent = hashlib.sha256()
    for handle in range(400):
        driver.now += 0.01
        driver.add(
            handle,
            int(rng.integers(1, 40)),
            int(rng.integers(1, 20)),
            tenant=f"tenant {handle % 3}",
            begins_with=handle % 5,
        )
        if handle % 7 == 0:
            driver.abort(int(rng.integers(0, handle + 1)))
        while driver.schedule() is not None:
            sent.update(repr(driver.sent).encode())
        running = driver.running
        stopping = [running[int(rng.integers(0, len(running)))]] if running and handle % 2 else []
        if driver.core.num_in_flight:
            sent.update(repr(driver.update(stopping)).encode())
    sent.update(repr(driver.core.counters).encode())
    assert driver.core.counters.num_preemptions
    return sent.hexdigest()


def test_the_sources_decide_as_what_is_compiled_of_them():
    program = "import test_compiled_core as test; print(test.digest_of_a_busy_core(), hasattr(test.Scheduler, '__mypyc_attrs__'))"
    tests = Path(__file__).resolve().parents[2]
    path = os.pathsep.join((str(tests), str(Path(__file__).parent), str(tests / "conformance")))
    environment = os.environ | {"PYTHONPATH": path, compiled_core.INTERPRET_VARIABLE: "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [digest_of_a_busy_core(), "False"]
