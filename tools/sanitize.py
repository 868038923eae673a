"""The C kernels under sanitizers: bad addresses, undefined behaviour, and racing threads.

Owns: a sanitized copy of the kernels' package, and the runs against it. Must not know: what the kernels compute.

    make sanitize                           # five minutes on two cores
    make sanitize ARGS="--only threads"     # memory, serve or threads

``memory`` runs the kernels' tests under the sanitizers of addresses and of undefined behaviour, ``serve`` an executor
behind a scheduler and a gateway, ``threads`` the tests under the sanitizer of threads. Each first has to find a planted
fault. A matrix unit is emulated where the processor lacks it and nothing else. The end names the variants that cannot run.

The build's own compiler calls the runtimes of gcc's sanitizers, which are loaded before Python.
"""

import argparse
import ctypes.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emulate_tiles import TESTS, admit, can_be_emulated, emulated

from headway_kernels.cpu import build
from headway_kernels.cpu.library import runs_here
from headway_proto.wording import one_line

ROOT = Path(__file__).resolve().parents[1]
KERNELS = "tests/kernels/test_cpu_kernels.py"
ADAPTERS = "tests/unit/executor/test_adapters.py"
MODEL = ROOT / "services" / "launcher" / "headway" / "demo_model"
MOST_S = 1800.0
SERVED_PROMPTS = 12

# LOOPS_STAY: see vectors.h; compiling takes seconds instead of many minutes.
# -ffp-contract=fast leaves to the optimiser which products and sums become one; what a sanitizer puts between them changes
# that, and with it the last bits, which tests compare. With "on", the source decides.
SLOW = ("-DLOOPS_STAY", "-g", "-fno-omit-frame-pointer", "-ffp-contract=on", "-Wl,-z,undefs")
PLANTED = """
#include <pthread.h>
#include <stdlib.h>
static long counted;
static void *count(void *argument) {
    for (int i = 0; i < 100000; i++) counted++;
    return argument;
}
__attribute__((visibility("default"))) int headway_memory(int n) {
    volatile int *values = malloc((size_t)n * sizeof *values);
    int read = values[n];
    free((void *)values);
    return read;
}
__attribute__((visibility("default"))) int headway_undefined(int n) { return 2147483640 + n; }
__attribute__((visibility("default"))) int headway_threads(int n) {
    pthread_t other;
    if (pthread_create(&other, NULL, count, NULL)) return 0;
    count(NULL);
    pthread_join(other, NULL);
    return n + (int)counted;
}
"""


class SanitizeError(Exception):
    """No check is possible; the message is one line."""


@dataclass(frozen=True)
class Sanitizer:
    """Its compiler flags, its runtime and settings, the words that report each planted fault, and tests that it leaves."""

    options: tuple[str, ...]
    runtime: str
    package: str
    settings: dict[str, str]
    finds: dict[str, str]
    leaves: tuple[str, ...] = ()


MEMORY = Sanitizer(
    # Apart: of a list, the compiler's front end keeps the first.
    options=("-fsanitize=undefined", "-fsanitize=address"),
    runtime="asan",
    package="libasan8",
    # Python and torch leave what they allocated at their end to the system.
    settings={"ASAN_OPTIONS": "detect_leaks=0"},
    finds={"memory": "AddressSanitizer: heap-buffer-overflow", "undefined": "signed integer overflow"},
)
THREADS = Sanitizer(
    # Past the front end, which would link a runtime of its own that must be in the executable.
    options=("-Xclang", "-fsanitize=thread"),
    runtime="tsan",
    package="libtsan2",
    # Tests start processes. That the first report ends nothing shows all of them; the exit code tells.
    # Threads of libraries that are not compiled for it would be reported too: there is only the kernels' team.
    settings={
        "TSAN_OPTIONS": "exitcode=66:halt_on_error=0:die_after_fork=0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    },
    finds={"threads": "ThreadSanitizer: data race"},
    # Gloo's threads, which are not compiled for it. The ranks' own tests meet in shared memory.
    leaves=(f"{ADAPTERS}::test_ranks_have_their_parts_of_adapters",),
)
# What the compiler's code asks of the runtime and gcc's has by other names.
SHIMS = """
#include <string.h>
typedef void *copier(void *, const void *, size_t);
static copier *volatile copy = memcpy, *volatile move = memmove;
static void *(*volatile set)(void *, int, size_t) = memset;
void *__tsan_memcpy(void *to, const void *from, size_t size) { return copy(to, from, size); }
void *__tsan_memmove(void *to, const void *from, size_t size) { return move(to, from, size); }
void *__tsan_memset(void *at, int value, size_t size) { return set(at, value, size); }
"""


class Sanitized:
    """The kernels' package in ``directory``, with libraries compiled for a sanitizer."""

    def __init__(self, sanitizer: Sanitizer, directory: Path) -> None:
        found = ctypes.util.find_library(sanitizer.runtime)
        if found is None:
            raise SanitizeError(f"lib{sanitizer.runtime} is not installed; Debian: apt install {sanitizer.package}")
        self._runtime = found
        self._sanitizer = sanitizer
        self._directory = directory
        package = directory / "headway_kernels"
        shutil.copytree(
            build.LIBRARIES.parent, package, ignore=shutil.ignore_patterns("*.so", "*.dylib", "__pycache__")
        )
        self.leaves = sanitizer.leaves
        self.lacking: list[str] = []
        # Beside the others: a library that is compiled of other sources than lie there is refused.
        sources = package / "cpu" / build.SOURCES.name
        (sources / "shims.c").write_text(SHIMS)
        self._compile(build.read_sources(sources), package / "cpu")

    def _compile(self, sources: dict[str, bytes], destination: Path) -> None:
        version = build.compiler_version()
        options = (*SLOW, *self._sanitizer.options)
        for variant in build.variants_here():
            runs = runs_here(build.LIBRARIES / variant.library)
            if not runs and not can_be_emulated(variant):
                self.lacking.append(variant.name)
                continue
            if not runs:
                admit(destination.parent)
            basis = variant if runs else emulated(variant)
            slow = replace(basis, options=(*basis.options, *options))
            work = self._directory / "build"
            work.mkdir(exist_ok=True)
            say(f"  compiling {variant.library} with {' '.join(self._sanitizer.options)}")
            build.compile_library(sources, slow, build.stamp_of(sources, slow, version), destination, work)
            planted = replace(slow, name="planted", library="planted.so")
            if not (self._directory / planted.library).exists():
                build.compile_library({"planted.c": PLANTED.encode()}, planted, "", self._directory, work)

    def environment(self) -> dict[str, str]:
        """For a process that must load these libraries."""
        path = os.pathsep.join(filter(None, (str(self._directory), os.environ.get("PYTHONPATH"))))
        return os.environ | self._sanitizer.settings | {"LD_PRELOAD": self._runtime, "PYTHONPATH": path}

    def is_in(self, mapped: str) -> bool:
        """Whether a process with these memory maps (``/proc/PID/maps``) has loaded one of these libraries."""
        return any(str(library) in mapped for library in (self._directory / "headway_kernels" / "cpu").glob("*.so"))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with ``arguments``; ``stdout`` has all its output."""
        return subprocess.run(
            [*UNSHUFFLED, sys.executable, *arguments],
            cwd=ROOT, env=self.environment(), text=True, errors="replace", timeout=MOST_S, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def find_planted_faults(self) -> None:
        """Check that the sanitizer works. Raises ``SanitizeError``: it overlooks a fault."""
        for name, words in self._sanitizer.finds.items():
            code = f"import ctypes; ctypes.CDLL({str(self._directory / 'planted.so')!r}).headway_{name}(100)"
            done = self.run("-c", code)
            if words not in done.stdout or done.returncode == 0:
                raise SanitizeError(
                    f"the planted fault {name!r} is not found: {' '.join(done.stdout.split())[-300:]!r}"
                )
            say(f"  planted fault {name}: found ({words})")


# The sanitizer of threads knows where a process's memory lies only if the system does not shuffle it.
UNSHUFFLED = ("setarch", "-R") if shutil.which("setarch") else ()


def say(line: str) -> None:
    """Write a line of progress to stdout."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def kernels_tests(library: Sanitized) -> None:
    """Run the kernels' tests. Raises ``SanitizeError``: one fails, or the sanitizer reports something."""
    # -s: a report comes when the process dies, and would die with it in pytest's hands. One test compiles its own library.
    left = [f"--deselect={test}" for test in (f"{KERNELS}::test_nothing_undefined_happens", *library.leaves)]
    done = library.run("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", *TESTS, *left)
    _require_silence("the kernels' tests", done.returncode, done.stdout)
    say(f"  {len(TESTS)} files of tests: {done.stdout.strip().splitlines()[-1]}")


def short_serve(library: Sanitized) -> None:
    """Send prompts through a scheduler, a gateway and a sanitized executor.

    Raises:
        SanitizeError: a prompt gets no answer, or the executor does not end well.
    """
    from headway.client import Client, HeadwayError

    with tempfile.TemporaryDirectory(prefix="headway-") as place:
        step, ingress, grpc = f"ipc://{place}/step", f"ipc://{place}/ingress", f"127.0.0.1:{_free_port()}"
        model = ("--model", str(MODEL))
        commands = {
            "scheduler": ("--step-address", step, "--ingress-address", ingress),
            "gateway": (*model, "--ingress-address", ingress, "--grpc-address", grpc),
            "executor": (*model, "--step-address", step, "--num-threads", "2", "--backend-option", "kernels=compiled"),
        }
        logs = {name: Path(place, f"{name}.log") for name in commands}
        processes = {}
        try:
            for name, words in commands.items():
                environment = library.environment() if name == "executor" else None
                with logs[name].open("w") as log:
                    processes[name] = subprocess.Popen(
                        [sys.executable, "-m", "headway", name, *words],
                        cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT,
                    )  # fmt: skip
            with Client(grpc) as client:
                client.wait_ready(300)
                streams = [client.generate(f"What is {n}?", max_tokens=20 + 3 * n) for n in range(SERVED_PROMPTS)]
                num_tokens = sum(len(stream.result().token_ids) for stream in streams)
            mapped = Path(f"/proc/{processes['executor'].pid}/maps").read_text()
        except HeadwayError as error:
            said = " ".join(log.read_text(errors="replace")[-300:] for log in logs.values())
            raise SanitizeError(f"no answer: {error}: {said!r}") from None
        finally:
            for process in processes.values():
                process.send_signal(signal.SIGTERM)
            codes = {name: process.wait(60) for name, process in processes.items()}
        said = logs["executor"].read_text(errors="replace")
        _require_silence("the executor", codes["executor"], said)
        if not num_tokens or not library.is_in(mapped):
            raise SanitizeError(f"the executor served {num_tokens} tokens without these kernels: {said[-300:]!r}")
        say(f"  {SERVED_PROMPTS} prompts at once: {num_tokens} tokens, the executor ended with 0 and reported nothing")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _require_silence(what: str, code: int, said: str) -> None:
    if code or "Sanitizer" in said or " panic: " in said:
        sys.stdout.write(said)
        raise SanitizeError(f"{what} ended with {code}; see above")


CHECKS: dict[str, tuple[Sanitizer, Callable[[Sanitized], None]]] = {
    "memory": (MEMORY, kernels_tests),
    "serve": (MEMORY, short_serve),
    "threads": (THREADS, kernels_tests),
}


def main(words: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if all found nothing, 1 otherwise."""
    parser = argparse.ArgumentParser(description="The C kernels under sanitizers.")
    parser.add_argument("--only", help=f"some of {','.join(CHECKS)}", default=",".join(CHECKS))
    asked = parser.parse_args(words).only.split(",")
    if unknown := sorted(set(asked) - CHECKS.keys()):
        parser.error(f"--only: {unknown[0]!r} is not allowed; allowed: {', '.join(CHECKS)}")
    built: dict[str, Sanitized] = {}
    with tempfile.TemporaryDirectory(prefix="headway-sanitize-") as place:
        try:
            for name in asked:
                sanitizer, check = CHECKS[name]
                say(name)
                started = time.monotonic()
                if sanitizer.runtime not in built:
                    directory = Path(place, sanitizer.runtime)
                    directory.mkdir()
                    built[sanitizer.runtime] = Sanitized(sanitizer, directory)
                    built[sanitizer.runtime].find_planted_faults()
                check(built[sanitizer.runtime])
                say(f"  {time.monotonic() - started:.0f} s")
        except (SanitizeError, build.KernelBuildError) as error:
            sys.stderr.write(f"sanitize: {one_line(error)}\n")
            return 1
    lacking = sorted({variant for library in built.values() for variant in library.lacking})
    say("nothing found" + (f"; this processor does not run {', '.join(lacking)}" if lacking else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
