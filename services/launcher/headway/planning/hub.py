"""Models of a hub: their names, what is fetched of them, and whether it came whole.

Owns: names, downloads into the hub's own cache, sums. Must not know: what a checkpoint holds, flags.

Only tensors, JSON and templates are fetched, never code.
"""

import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from headway_proto.wording import one_line

GGUF = ".gguf"

_FETCHED = ("*.json", "*.safetensors", "*.jinja")
_OF_OTHER_FORMATS = ("*/*", "consolidated*")
_IN_FOLDERS = ("*_Pooling/config.json", "additional_chat_templates/*.jinja")
"""How vectors are made, and the further chat templates. They cannot be told from ``*/*`` in one call."""
_SHA256_DIGITS = 64
_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<form>[\w.-]+))?(@(?P<revision>[\w./-]+))?"
)
_FORM = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d|TQ\d|MXFP\d|BF16|F16|F32)\w*)(?=[-.]|$)", re.IGNORECASE)
_OWN_CHOICE = "ud-"
"""Before the form: some publishers choose a form for each layer."""
_PART = re.compile(r"-\d{5}-of-\d{5}$")


class HubError(Exception):
    """A model cannot be had. The message is one line that follows the name."""


class HubName(NamedTuple):
    """ORG/NAME; of a revision; with the form of one of its GGUF files, such as Q4_K_M, or that file's name, or without."""

    repository: str
    form: str
    revision: str | None

    @classmethod
    def read(cls, name: str) -> Self | None:
        """Return what a name says, or None if it is no hub's."""
        found = _NAME.fullmatch(name)
        return cls(found["repository"], found["form"] or "", found["revision"]) if found else None

    @property
    def without_revision(self) -> str:
        """ORG/NAME, or ORG/NAME:FORM."""
        return f"{self.repository}:{self.form}" if self.form else self.repository


class Hub:
    """Fetches models.

    Args:
        offline: ask no hub; what is in its cache is served.
        say: gets a line before something that takes long.
        marks: gives where to note that sums were checked; None where that is nowhere.
    """

    def __init__(self, *, offline: bool, say: Callable[[str], None], marks: Callable[[], Path | None]) -> None:
        self._offline = offline
        self._say = say
        self._marks = marks

    def fetch(self, name: HubName) -> Path:
        """Return a checkpoint's directory, or the first GGUF file of the form that the name has.

        Raises:
            HubError: the hub does not have it, or does not answer.
            ModuleNotFoundError: its library is missing.
        """
        if not sys.stderr.isatty():  # the library reads it when it is imported
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        if not self._offline:
            self._say(f"looking for {name.repository} at the hub, and fetching what is not here yet")
        if name.form:
            return self._gguf_file(name)
        directory = self._download(name, _FETCHED, _OF_OTHER_FORMATS)
        if not (directory / "config.json").exists():
            raise _choice(name, "GGUF files only", self._gguf_names(name))
        if not self._offline:
            # What is there already keeps the library from warning that nothing matches.
            self._download(name._replace(revision=directory.name), ("config.json", *_IN_FOLDERS))
        self._check_sums(sorted(directory.glob("*.safetensors")))
        return directory

    def _gguf_file(self, name: HubName) -> Path:
        chosen = _chosen(name, self._gguf_names(name))
        directory = self._download(name, chosen)
        files = sorted(directory / one for one in chosen)
        self._check_sums(files)
        return files[0]

    def _gguf_names(self, name: HubName) -> list[str]:
        """Of the repository; of what the cache has of it, if the hub is not to be asked or does not answer."""
        listed = None if self._offline else _listed(name)
        if listed is None:
            directory = self._download(name, ())
            listed = [str(path.relative_to(directory)) for path in directory.rglob(f"*{GGUF}")]
        return sorted(one for one in listed if one.endswith(GGUF) and "mmproj" not in one)

    def _download(self, name: HubName, wanted: Sequence[str], unwanted: Sequence[str] = ()) -> Path:
        from huggingface_hub import snapshot_download

        with _in_one_line(name, is_offline=self._offline):
            return Path(
                snapshot_download(
                    name.repository,
                    revision=name.revision,
                    allow_patterns=list(wanted),
                    ignore_patterns=list(unwanted),
                    local_files_only=self._offline,
                )
            )

    def _check_sums(self, files: Sequence[Path]) -> None:
        """Compare large files with the SHA-256 that the hub calls them by, once. A damaged one is removed, so that the next
        attempt fetches it anew.
        """
        summed = [blob for blob in (path.resolve() for path in files) if len(blob.name) == _SHA256_DIGITS]
        facts = [(str(blob), blob.stat().st_size, blob.stat().st_mtime_ns) for blob in summed]
        marks = self._marks()
        mark = marks / hashlib.sha256(repr(facts).encode()).hexdigest() if marks else None
        if not summed or (mark is not None and mark.exists()):
            return
        self._say(f"checking the sums of {len(summed)} files ({sum(size for _, size, _ in facts) / 1e9:.2f} GB)")
        for blob in summed:
            if _sha256(blob) != blob.name:
                blob.unlink()
                raise HubError(f"{blob.name[:12]}..., a file of it, came damaged and was removed; try again")
        if mark is not None:
            with contextlib.suppress(OSError):  # it is checked again next time
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()


def _listed(name: HubName) -> list[str] | None:
    """Return the names of a repository's files; None if the hub does not answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    with _in_one_line(name, is_offline=False):
        try:
            # The call that lists a tree asks for half a minute where no hub answers.
            found = HfApi().model_info(name.repository, revision=name.revision).siblings or ()
            return [file.rfilename for file in found]
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception:  # noqa: BLE001  # The library raises what its transport raises.
            return None


@contextlib.contextmanager
def _in_one_line(name: HubName, *, is_offline: bool) -> Iterator[None]:
    """Tell what the library raises as a ``HubError``."""
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or asks for a token of its own (HF_TOKEN), and there is no such directory"
        raise HubError(reason) from None
    except RevisionNotFoundError:
        raise HubError(f"the hub's model has no revision {name.revision}") from None
    except LocalEntryNotFoundError:
        answer = "" if is_offline else ", the hub does not answer"
        raise HubError(f"it is not in the cache{answer}, and there is no such directory") from None
    except Exception as error:  # noqa: BLE001  # The library raises what its transport raises.
        raise HubError(f"the hub: {one_line(error, 200)}") from None


def _chosen(name: HubName, files: Sequence[str]) -> list[str]:
    """Return the one GGUF file that is meant, in all its parts.

    Raises:
        HubError: none, or several; it says which there are.
    """
    by_model, wanted = _by_model(files), name.form.lower()
    in_full = [model for model in by_model if wanted in (_form_of(model).lower(), _file_of(model).lower())]
    found = in_full or [model for model in by_model if wanted == _form_of(model).lower().removeprefix(_OWN_CHOICE)]
    if len(found) == 1:
        return by_model[found[0]]
    raise _choice(name, f"{len(found) or 'no'} GGUF files called {name.form}", files)


def _choice(name: HubName, had: str, files: Sequence[str]) -> HubError:
    """Return the error that says what there is."""
    models = list(_by_model(files))
    if not models:
        return HubError("the hub's model has neither a config.json nor GGUF files")
    allowed = [_form_of(model) or _file_of(model) for model in models]
    if len(set(allowed)) < len(allowed):
        allowed = [_file_of(model) for model in models]
    return HubError(f"the hub's model has {had}; allowed: {', '.join(f'{name.repository}:{one}' for one in allowed)}")


def _by_model(files: Sequence[str]) -> dict[str, list[str]]:
    """The parts of each model."""
    by_model: dict[str, list[str]] = {}
    for file in files:
        by_model.setdefault(_PART.sub("", file.removesuffix(GGUF)), []).append(file)
    return by_model


def _file_of(model: str) -> str:
    return f"{Path(model).name}{GGUF}"


def _form_of(model: str) -> str:
    """Return how the weights are stored, as the name says."""
    found = _FORM.search(Path(model).name)
    return found[1] if found else ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
