"""What a model's name may stand for, and the directory of its files.

Owns: the demo model, checkpoints made of GGUF files, downloads from a hub. Must not know: flags, what a checkpoint holds.

Only tensors, JSON and templates are fetched, never code.
"""

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from headway_proto.wording import one_line, shown

DEMO_MODEL = "demo"
DEMO_MODEL_DIRECTORY = Path(__file__).parents[1] / "demo_model"
ALLOWED = f"a checkpoint directory, a GGUF file, a hub's ORG/NAME or ORG/NAME@REVISION, or {DEMO_MODEL}"

_HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_FETCHED = ("*.json", "*.safetensors", "*.jinja")
_OF_OTHER_FORMATS = ("*/*", "consolidated*")
_IN_FOLDERS = ("*_Pooling/config.json", "additional_chat_templates/*.jinja")
"""How vectors are made, and the further chat templates. They cannot be told from ``*/*`` in one call."""
_GGUF = ".gguf"
_SHA256_DIGITS = 64
_WRITTEN_AS = 3
"""The version of what the import of a GGUF file writes. Checkpoints of an earlier version are not used again."""


class ModelSourceError(Exception):
    """A model that is named cannot be had. The message is one line that follows the name."""


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
        self._offline = offline
        self._say = say
        self._found: dict[str, str] = {}

    def directory_of(self, name: str) -> str:
        """Return the directory of a model, or ``name`` itself where it can only be a directory.

        Raises:
            ModelSourceError: the file or the hub does not give it.
            ModuleNotFoundError: a package for this kind is missing.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    @staticmethod
    def served_name_of(name: str) -> str:
        """Return what clients call the model, or "" if that is the name of its directory."""
        path = Path(name)
        if name == DEMO_MODEL:
            return name
        if path.suffix == _GGUF and path.is_file():
            return path.stem if path.stem.isprintable() else ""
        of_hub = None if path.is_dir() else _HUB_NAME.fullmatch(name)
        return of_hub["repository"] if of_hub else ""

    def _find(self, name: str) -> str:
        if name == DEMO_MODEL:
            return str(DEMO_MODEL_DIRECTORY)
        path = Path(name)
        if path.is_dir():
            _require_files(path)
            return name
        if path.suffix == _GGUF and path.is_file():
            return str(self._from_gguf(path))
        of_hub = _HUB_NAME.fullmatch(name)
        if of_hub is None or path.suffix == _GGUF:
            return name
        return self._from_hub(of_hub["repository"], of_hub["revision"])

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

    def _from_hub(self, repository: str, revision: str | None) -> str:
        if not sys.stderr.isatty():  # the library reads it when it is imported
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

        if not self._offline:
            self._say(f"looking for {repository} at the hub, and fetching what is not here yet")
        try:
            directory = snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(_FETCHED),
                ignore_patterns=list(_OF_OTHER_FORMATS),
                local_files_only=self._offline,
            )
            if not self._offline:
                snapshot_download(repository, revision=Path(directory).name, allow_patterns=list(_IN_FOLDERS))
        except RepositoryNotFoundError:
            reason = (
                "the hub has no such model, or asks for a token of its own (HF_TOKEN), and there is no such directory"
            )
            raise ModelSourceError(reason) from None
        except RevisionNotFoundError:
            raise ModelSourceError(f"the hub's model has no revision {revision}") from None
        except LocalEntryNotFoundError:
            reason = "it is not in the cache" + ("" if self._offline else ", the hub does not answer")
            raise ModelSourceError(f"{reason}, and there is no such directory") from None
        except Exception as error:  # noqa: BLE001  # The library raises what its transport raises.
            raise ModelSourceError(f"the hub: {one_line(error, 200)}") from None
        _check_sums(Path(directory), self._say)
        return directory


def _require_files(directory: Path) -> None:
    """Whoever reads a pipe waits for its writer, and a device may have no end."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if Path(entry).exists() and not (entry.is_file() or entry.is_dir()):
                raise ModelSourceError(f"{shown(entry.name)} in it is a pipe or a device; allowed: files")


def _check_sums(directory: Path, say: Callable[[str], None]) -> None:
    """Compare large files with the SHA-256 that the hub calls them by, once.

    Raises:
        ModelSourceError: a file is damaged. It is removed, so that the next attempt fetches it anew.
    """
    blobs = [path.resolve() for path in sorted(directory.glob("*.safetensors"))]
    summed = [blob for blob in blobs if len(blob.name) == _SHA256_DIGITS]
    facts = [(str(blob), blob.stat().st_size, blob.stat().st_mtime_ns) for blob in summed]
    mark = None
    with contextlib.suppress(OSError):
        mark = _cache() / "checked" / hashlib.sha256(repr(facts).encode()).hexdigest()
    if not summed or (mark is not None and mark.exists()):
        return
    say(f"checking the sums of {len(summed)} files ({sum(size for _, size, _ in facts) / 1e9:.2f} GB)")
    for blob in summed:
        if _sha256(blob) != blob.name:
            blob.unlink()
            raise ModelSourceError(f"{blob.name[:12]}..., a file of it, came damaged and was removed; try again")
    if mark is not None:
        with contextlib.suppress(OSError):  # it is checked again next time
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
