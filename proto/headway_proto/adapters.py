"""Adapters (LoRA) in both ZeroMQ protocols: their names, and the messages that load and unload them.

Owns: these messages and the form of a name. Must not know: how an adapter is computed, or when it may be loaded.

An adapter's **identity** is ``NAME@FINGERPRINT``, the latter of its files. Requests, rows and prefix blocks carry the
identity, so nothing of an adapter can pass for another that was loaded later under the same name.
"""

import re

import msgspec

MAX_ADAPTER_NAME = 64
ADAPTER_NAME_FORM = f"1 to {MAX_ADAPTER_NAME} letters, digits, '.', '_', '-' and '/'"
MAX_DIRECTORY_CHARACTERS = 4096

_NAME = re.compile(rf"[A-Za-z0-9._/-]{{1,{MAX_ADAPTER_NAME}}}")


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def name_of(identity: str) -> str:
    """The name in an identity."""
    return identity.partition("@")[0]


class LoadedAdapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that an executor has. ``directory`` as it was named; ``fingerprint`` of its files."""

    name: str
    directory: str
    fingerprint: str

    @property
    def identity(self) -> str:
        """``NAME@FINGERPRINT``."""
        return f"{self.name}@{self.fingerprint}"


class RowAdapter(msgspec.Struct, frozen=True, array_like=True):
    """A new row runs with the adapter of this identity until it ends."""

    row: int
    adapter: str


class AdapterChange(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler asks an executor to load an adapter from ``directory``, or to unload it if that is "".

    It takes effect behind the steps and the changes before it, and before any later step with a new row of the adapter.
    ``fingerprint``: of the files that it must be, or "" for any. To load what is loaded changes nothing. ``number`` is
    repeated by the answer.
    """

    number: int
    name: str
    directory: str = ""
    fingerprint: str = ""


class AdapterChanged(msgspec.Struct, frozen=True, array_like=True):
    """The answer to ``AdapterChange``: ``error`` in one line, or "". ``adapter``: what was loaded."""

    number: int
    adapter: LoadedAdapter | None = None
    error: str = ""
