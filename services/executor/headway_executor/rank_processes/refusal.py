"""Why a rank cannot begin.

Owns: the reason, and its exit code on every rank. Must not know: where it is shown.
"""

from typing import NamedTuple

from headway_executor.backend import BackendConfigError, DeviceLostError, ModelFilesError
from headway_executor.host.ending import EXIT_BAD_CONFIGURATION, EXIT_BAD_MODEL_FILES, EXIT_DEVICE_LOST

REFUSAL_CODES = (EXIT_BAD_CONFIGURATION, EXIT_BAD_MODEL_FILES)


class Refusal(NamedTuple):
    """A line for the user, and the exit code."""

    line: str
    exit_code: int


class RankRefusedError(ValueError):
    """A rank cannot begin with its settings or model files, and rank 0 knows it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.line)
        self.exit_code = refusal.exit_code


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that could not begin."""
    match error:
        case RankRefusedError():
            return error.exit_code
        case ModelFilesError():
            return EXIT_BAD_MODEL_FILES
        case BackendConfigError() | ValueError():
            return EXIT_BAD_CONFIGURATION
        case DeviceLostError():
            return EXIT_DEVICE_LOST
        case _:
            return 1
