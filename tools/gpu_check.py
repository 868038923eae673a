"""Every check and measurement that needs a CUDA device, in one command, from a plain checkout.

Owns: running them in the time there is, the output folder, what held. Must not know: what there is to run (``gpu_tasks``).

    make gpu-check                                          # all of it
    make gpu-check ARGS="--minutes 9 --output found"        # what fits; the same again goes on with what is left
    python3 tools/gpu_check.py --only steps,swap            # these, even if the folder has them
    python3 tools/gpu_check.py --rehearse                   # on a CPU, kernels interpreted, in the smallest sizes

Needs Python's own library, and runs with the packages that this Python has: no pip, git, or plugin of pytest. The folder
gets ``lines.jsonl``, a line for each figure and each task as soon as it is there, and ``output.log``.

Exit code 0: everything held. 1: something failed. 2: nothing can be checked here. 3: nothing failed, and something is
left or lacks a package. A missed target fails nothing: this host may be another.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_tasks import ESSENTIAL, ROOT, Task, modules_of, tasks

HELD, FAILED, LACKS, LEFT, CUT = "held", "FAILED", "lacks", "left", "cut short"
EXIT_FAILED, EXIT_CANNOT_CHECK, EXIT_LEFT, EXIT_INTERRUPTED = 1, 2, 3, 130
MARGIN_S = 5.0
ENDING_S = 10.0
LOOKING_S = 180
SHOWN_LINES = 15
CUDA_PROGRAMS = "/usr/local/cuda/bin"

PROBE = """
import importlib, importlib.util, json, sys

problems, devices, versions = {}, [], {}
for name in sys.argv[1:]:
    try:
        # What is found can still be of a version that is refused; that alone is imported which says so.
        if name == "torch" or name.startswith("headway"):
            importlib.import_module(name)
        elif importlib.util.find_spec(name) is None:
            problems[name] = "is not installed"
    except BaseException as error:
        problems[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
if "torch" not in problems:
    import torch

    versions["torch"] = torch.__version__
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
for distribution in importlib.import_module("importlib.metadata").distributions():
    name = (distribution.metadata["Name"] or "").lower()
    if name == "triton" or name.startswith("cupy"):
        versions[name] = distribution.version
print(json.dumps({"problems": problems, "devices": devices, "versions": versions}))
"""


class CannotCheck(RuntimeError):  # noqa: N818 (it says what the matter is)
    """Nothing can be checked here; one line."""


@dataclass
class Found:
    """What this Python has: ``problems`` by module, the names of the devices, versions."""

    problems: dict[str, str]
    devices: list[str]
    versions: dict[str, str]


@dataclass
class Report:
    """The tasks by what came of them."""

    verdicts: dict[str, str] = field(default_factory=dict)

    def of(self, verdict: str) -> list[str]:
        """The names with this verdict, with what it says more."""
        found = [(name, said) for name, said in self.verdicts.items() if said.startswith(verdict)]
        return [name + said.removeprefix(verdict) for name, said in found]

    @property
    def exit_code(self) -> int:
        """See the module."""
        if self.of(FAILED):
            return EXIT_FAILED
        return 0 if len(self.of(HELD)) == len(self.verdicts) else EXIT_LEFT

    @property
    def last_line(self) -> str:
        """What held and what did not."""
        parts = [
            f"{verdict}: {', '.join(names)}"
            for verdict in (HELD, FAILED, LACKS, LEFT, CUT)
            if (names := self.of(verdict))
        ]
        return f"gpu-check: {'; '.join(parts) or 'nothing to do'}"


class Folder:
    """The output folder: lines that are there stay, whatever ends this process."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self.lines, self.log = path.resolve() / "lines.jsonl", path.resolve() / "output.log"
            self.log.touch()
        except OSError as error:
            raise CannotCheck(f"--output {str(path)!r} is not allowed: {error.strerror}") from error

    def add(self, **line: object) -> None:
        """Add a line."""
        with self.lines.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """All whole lines; a process that was killed may have left half a one."""
        for line in self.lines.read_text().splitlines() if self.lines.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line)

    def ended(self, *, rehearsal: bool) -> dict[str, str]:
        """The tasks that need not run again, with their verdicts."""
        outcomes = [line for line in self.read() if line["kind"] == "outcome" and line["rehearsal"] == rehearsal]
        return {line["task"]: line["verdict"] for line in outcomes if line["verdict"].startswith((HELD, FAILED))}

    def last_lines(self) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:])


class Check:
    """Runs tasks as long as there is time."""

    def __init__(self, folder: Folder, found: Found, *, until: float, rehearsal: bool) -> None:
        self._folder = folder
        self._problems = found.problems
        self._rehearsal = rehearsal
        self._until = until
        self.report = Report()

    def run(self, chosen: Iterable[Task], *, again: bool) -> None:
        """Run those that fit; ``again``: also those that the folder has."""
        ended = {} if again else self._folder.ended(rehearsal=self._rehearsal)
        pending = list(chosen)
        self.report.verdicts = {task.name: ended.get(task.name, LEFT) for task in pending}
        for task in pending:
            if task.name not in ended:
                self.report.verdicts[task.name] = self._verdict(task)

    def _verdict(self, task: Task) -> str:
        lacking = [f"{name}: {self._problems[name]}" for name in task.needs if name in self._problems]
        if task.program and program_of(task) is None:
            lacking.append(f"{task.program[0]} is not installed")
        if lacking:
            return f"{LACKS} ({'; '.join(lacking)})"
        left = self._until - time.monotonic() - MARGIN_S
        if task.seconds > left:
            return LEFT
        print(f"== {task.name} (some {task.seconds} s, at most {task.limit})", flush=True)
        started = time.monotonic()
        code = self._execute(task, min(task.limit, left))
        seconds = time.monotonic() - started
        verdict = HELD if code == 0 else f"{FAILED} (exit code {code})"
        if code is None:
            verdict = CUT if left < task.limit else f"{FAILED} (over its limit of {task.limit} s)"
        self._folder.add(
            kind="outcome", task=task.name, verdict=verdict, seconds=round(seconds, 1), rehearsal=self._rehearsal
        )
        print(f"   {verdict}, {seconds:.0f} s", flush=True)
        if verdict != HELD:
            print(self._folder.last_lines(), flush=True)
        return verdict

    def _execute(self, task: Task, limit_s: float) -> int | None:
        """Return the exit code, or None if the time was over."""
        lines = ("--lines", str(self._folder.lines)) if task.adds_lines else ()
        command = [
            *((program_of(task), *task.program[1:]) if task.program else ()),
            sys.executable,
            *task.command,
            *lines,
        ]
        with self._folder.log.open("a") as log:
            log.write(f"\n== {task.name}: {' '.join(map(str, command))}\n")
            log.flush()
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=environment_of(task),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a task and all that it has started: they are a group of their own."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)
            if sent is signal.SIGKILL or not group_lives(process.pid):
                return


def group_lives(group: int) -> bool:
    """Whether a group of processes has any left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def environment_of(task: Task | None = None) -> dict[str, str]:
    """This environment, with the checkout's packages first on Python's path."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    paths = [*dict.fromkeys(str((ROOT / package).parent) for package in packages)]
    paths += filter(None, [os.environ.get("PYTHONPATH", "")])
    own = {} if task is None else dict(task.environment)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **own}


def program_of(task: Task) -> str | None:
    """Where the task's program is; CUDA's are not always on the path."""
    return shutil.which(task.program[0], path=os.pathsep.join((os.environ.get("PATH", ""), CUDA_PROGRAMS)))


def look(modules: Iterable[str]) -> Found:
    """Look for modules and devices, in a process of its own: a broken package may end it."""
    command = [sys.executable, "-c", PROBE, *modules]
    try:
        done = subprocess.run(
            command, env=environment_of(), capture_output=True, text=True, check=False, timeout=LOOKING_S
        )
    except subprocess.TimeoutExpired:
        raise CannotCheck(f"looking for packages with {sys.executable} took more than {LOOKING_S} s") from None
    try:
        return Found(**json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, TypeError, ValueError):
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CannotCheck(f"looking for packages with {sys.executable} failed: {said}") from None


def require(found: Found, *, rehearsal: bool) -> None:
    """Raise ``CannotCheck`` where nothing can run."""
    names = [name for name in ESSENTIAL if name in found.problems and not (rehearsal and name == "cupy")]
    absent = [
        name for name in names if found.problems[name] == "is not installed" or "ModuleNotFound" in found.problems[name]
    ]
    broken = [f"{name} cannot be imported ({found.problems[name]})" for name in names if name not in absent]
    if names:
        lacking = [f"no {name}" for name in absent] + broken
        raise CannotCheck(f"{sys.executable} has {', '.join(lacking)}; install them, or put them on PYTHONPATH")
    if not found.devices and not rehearsal:
        raise CannotCheck("this host has no CUDA device that torch sees; `headway doctor` says why")


def show_figures(folder: Folder) -> None:
    """Print the measured steps beside their floors."""
    lines = [line for line in folder.read() if line["kind"] == "step"]
    if lines:
        print(f"\n{'measured':60} {'ms':>9} {'floor ms':>9} {'share':>6} {'asked':>6}")
    for line in lines:
        name = line["name"] if line["quantization"] == "none" else f"{line['name']}, {line['quantization']}"
        name += "" if line.get("kv_cache_dtype", "auto") == "auto" else f", KV cache {line['kv_cache_dtype']}"
        name += "" if line["shape"] == "llama3-8b" else f", {line['shape']}"
        missed = "" if line["share"] >= line["asked"] else "  missed"
        print(
            f"{name:60} {line['measured_ms']:9.3f} {line['floor_ms']:9.3f} {line['share']:6.2f} {line['asked']:6.2f}{missed}"
        )
    for line in folder.read():
        if line["kind"] == "parts":
            print(line["said"])
        if line["kind"] == "stack" and line["steady_steps"]:
            print(
                f"device idle in {line['steady_steps']} steady steps: {line['idle_share']:.2%}, asked {line['idle_asked']:.0%}"
            )


def chosen_of(all_tasks: list[Task], only: str) -> list[Task]:
    """Return the tasks of ``--only``, by name or first word; empty: all."""
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    names = {task.name for task in all_tasks} | {task.name.split()[0] for task in all_tasks}
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise CannotCheck(
            f"--only {unknown[0]!r:.64} is not allowed; allowed: {', '.join(task.name for task in all_tasks)}"
        )
    return [task for task in all_tasks if not wanted or task.name in wanted or task.name.split()[0] in wanted]


def positive(text: str) -> float:
    """Read minutes; for ``argparse``."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r:.64} is not allowed; allowed: a number above 0")
    return minutes


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser(description="Every check and measurement that needs a CUDA device.")
    made.add_argument(
        "--output", type=Path, default=Path("gpu-check"), help="folder of the results (default: gpu-check)"
    )
    made.add_argument("--minutes", type=positive, help="start only what should fit (default: no bound)")
    made.add_argument(
        "--only", default="", metavar="NAMES", help="these alone, also if the folder has them; --list names them"
    )
    made.add_argument(
        "--rehearse", action="store_true", help="on a CPU, with kernels interpreted, in the smallest sizes"
    )
    made.add_argument("--list", action="store_true", help="list the tasks in their order, and stop")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Look, run, and say what held."""
    until = float("inf") if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    all_tasks = tasks(rehearsal=arguments.rehearse)
    chosen = chosen_of(all_tasks, arguments.only)
    if arguments.list:
        for task in chosen:
            print(f"{task.name:40} some {task.seconds:4} s, at most {task.limit:4} s")
        return 0
    found = look((*ESSENTIAL, *modules_of(chosen)))
    require(found, rehearsal=arguments.rehearse)
    folder = Folder(arguments.output)
    host = {"python": platform.python_version(), "devices": found.devices, **found.versions}
    folder.add(kind="host", rehearsal=arguments.rehearse, problems=found.problems, **host)
    print(f"gpu-check: {json.dumps(host)}; results in {folder.lines.parent}", flush=True)
    check = Check(folder, found, until=until, rehearsal=arguments.rehearse)
    try:
        check.run(chosen, again=bool(arguments.only))
        code = check.report.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    show_figures(folder)
    print(check.report.last_line, flush=True)
    return code


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(arguments)
    except CannotCheck as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return EXIT_CANNOT_CHECK


if __name__ == "__main__":
    sys.exit(main())
