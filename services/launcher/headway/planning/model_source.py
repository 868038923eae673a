"""What a model's name may stand for, and the directory of its files.

Owns: the demo model, checkpoints made of GGUF files. Must not know: flags, what a checkpoint holds, how a hub is asked.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headway.planning.hub import GGUF, Hub, HubError, HubName
from headway_proto.wording import shown

DEMO_MODEL = "demo"
DEMO_MODEL_DIRECTORY = Path(__file__).parents[1] / "demo_model"
ALLOWED = f"a checkpoint directory, a GGUF file, a hub's ORG/NAME, ORG/NAME:FORM or ORG/NAME@REVISION, or {DEMO_MODEL}"

_WRITTEN_AS = 3
"""The version of what the import of a GGUF file writes. Checkpoints of an earlier version are not used again."""


class ModelSourceError(Exception):
    """A model that is named cannot be had. The message is one line that follows the name."""


class Found(NamedTuple):
    """A model's ``directory``, and what clients call it; without a ``served_name`` that is the name of its directory."""

    directory: str
    served_name: str = ""


def say(text: str) -> None:
    """Tell a user who waits. A closed stderr stops nothing."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"headway: {text}\n")
        sys.stderr.flush()


class ModelSources:
    """Finds models. Every name is looked up once.

    Args:
        offline: ask no hub; what is in its cache is served.
        say: gets a line before something that takes long.
    """

    def __init__(self, *, offline: bool = False, say: Callable[[str], None] = say) -> None:
        self._hub = Hub(offline=offline, say=say, marks=_marks)
        self._say = say
        self._found: dict[str, Found] = {}

    def find(self, name: str) -> Found:
        """Return the directory of a model, or ``name`` itself where it can only be a directory, and what clients call it.

        Raises:
            ModelSourceError: the file or the hub does not give it.
            ModuleNotFoundError: a package for this kind is missing.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Found:
        if name == DEMO_MODEL:
            return Found(str(DEMO_MODEL_DIRECTORY), name)
        path = Path(name)
        if path.is_dir():
            _require_files(path)
            return Found(name)
        if path.suffix == GGUF and path.is_file():
            return Found(str(self._from_gguf(path)), path.stem if path.stem.isprintable() else "")
        of_hub = HubName.read(name)
        if of_hub is None or (path.suffix == GGUF and not of_hub.form):
            return Found(name)
        try:
            fetched = self._hub.fetch(of_hub)
        except HubError as error:
            raise ModelSourceError(str(error)) from None
        return Found(str(self._from_gguf(fetched) if of_hub.form else fetched), of_hub.without_revision)

    def _from_gguf(self, file: Path) -> Path:
        try:
            directory = _cache() / "gguf" / _name_of(file)
        except OSError as error:
            raise ModelSourceError(f"no checkpoint can be made of it: {error}; XDG_CACHE_HOME names a place") from None
        if directory.is_dir():
            return directory
        self._say(f"making a checkpoint of {file} ({file.stat().st_size / 1e9:.2f} GB) in {directory}, once")
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".part-") as beside:
                made = Path(beside) / "checkpoint"
                # A process of its own: this one shall not hold PyTorch and the weights while it supervises.
                command = [sys.executable, "-P", "-m", "headway", "gguf", str(file), str(made)]
                done = subprocess.run(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
                )
                if done.returncode:
                    last = done.stderr.strip().rpartition("\n")[2]
                    raise ModelSourceError(last.removeprefix("headway gguf: ") or f"exit code {done.returncode}")
                made.rename(directory)
        except OSError as error:
            if directory.is_dir():  # another process was faster
                return directory
            raise ModelSourceError(
                f"no checkpoint can be made of it in {directory.parent}: {error.strerror or error}; "
                "XDG_CACHE_HOME names another place"
            ) from None
        return directory


def _require_files(directory: Path) -> None:
    """Whoever reads a pipe waits for its writer, and a device may have no end."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if Path(entry).exists() and not (entry.is_file() or entry.is_dir()):
                raise ModelSourceError(f"{shown(entry.name)} in it is a pipe or a device; allowed: files")


def _name_of(file: Path) -> str:
    """A file that is replaced, or written in another way, has another name in the cache."""
    facts = file.stat()
    identity = f"{_WRITTEN_AS}|{file.resolve()}|{facts.st_size}|{facts.st_mtime_ns}"
    return f"{file.stem[:64]}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


def _cache() -> Path:
    """Raises OSError: a user without a name, and without HOME, has no place for it."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
    except RuntimeError:
        raise OSError("this user has no home directory") from None


def _marks() -> Path | None:
    try:
        return _cache() / "checked"
    except OSError:
        return None
