"""A file with one line of JSON per step.

Owns: the file. Must not know: the source of times.
"""

from pathlib import Path

import msgspec

from headway_executor.backend import BackendConfigError, StepBatch
from headway_proto.wording import shown


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of the device's clock; ``idle_us`` is None at first."""

    step: int
    num_rows: int
    num_tokens: int
    device_time_us: int
    idle_us: int | None


class StepLog:
    """Empties ``path``. Raises ``BackendConfigError``: the file cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb", buffering=1 << 16)
        except OSError as error:
            raise BackendConfigError(
                f"backend_options step_log {shown(path)} is not allowed; {error.strerror}"
            ) from error
        self._encoder = msgspec.json.Encoder()

    def add(self, batch: StepBatch, *, device_time_us: int, idle_us: int | None) -> None:
        """Write a finished step."""
        line = StepLine(
            step=batch.step,
            num_rows=len(batch.rows),
            num_tokens=int(batch.num_scheduled_tokens.sum()),
            device_time_us=device_time_us,
            idle_us=idle_us,
        )
        self._file.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()
