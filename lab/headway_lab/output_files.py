"""The output files of a long run, checked before it."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path

from headway.flags.settings import ConfigurationError
from headway_process.installation import install_advice
from headway_proto.wording import shown


def check_output_files(paths: Mapping[str, str]) -> None:
    """Check paths by their flags.

    Raises:
        ConfigurationError: a path is a directory, or in one that does not exist.
    """
    for flag, path in paths.items():
        if path and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigurationError(
                f"{flag}: {shown(path)} is not allowed; allowed: a file in a directory that exists"
            )


def check_pictures(flag: str, path: str) -> None:
    """Check the name of a picture, and that matplotlib is there.

    Raises:
        ConfigurationError: it is not, or the name's ending promises something else.
    """
    if Path(path).suffix.lower() not in {"", ".png"}:
        raise ConfigurationError(
            f"{flag}: {shown(path)} is not allowed; allowed: a name that ends in .png, or without an ending"
        )
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(f"{flag}: this host lacks matplotlib; leave {flag} out, or {install_advice('bench')}")


def write_output(flag: str, path: str, write: Callable[[Path], object]) -> None:
    """Write one file, if it has a path.

    Raises:
        ConfigurationError: writing failed.
    """
    if not path:
        return
    try:
        write(Path(path))
    except OSError as error:
        raise ConfigurationError(f"{flag}: cannot write {shown(path)}: {error.strerror}") from None
