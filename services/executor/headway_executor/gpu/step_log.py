"""A line for every step in a file: how large it was, how long the device took, and how long it had nothing to do before.

Owns: the file and its format, one JSON object a line. Must not know: where the times come from.
"""

from pathlib import Path

import msgspec

from headway_executor.backend import BackendConfigError, StepBatch


class StepLine(msgspec.Struct, frozen=True, kw_only=True):
    """One step. Times in microseconds on the device's clock; ``idle_us`` is from the end of the step before, None at first.

    A device that was waited for is one that had a step to run all the time, so in steady decode ``idle_us`` is what the
    host cost it.
    """

    step: int
    num_rows: int
    num_tokens: int
    device_time_us: int
    idle_us: int | None


class StepLog:
    """Appends to ``path``, which is emptied first.

    Raises:
        BackendConfigError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb", buffering=1 << 16)
        except OSError as error:
            raise BackendConfigError(
                f"backend_options step_log {str(path)!r:.64} is not allowed; {error.strerror}"
            ) from error
        self._encoder = msgspec.json.Encoder()

    def add(self, batch: StepBatch, *, device_time_us: int, idle_us: int | None) -> None:
        """Write down a step that is over."""
        line = StepLine(
            step=batch.step,
            num_rows=len(batch.rows),
            num_tokens=int(batch.num_scheduled_tokens.sum()),
            device_time_us=device_time_us,
            idle_us=idle_us,
        )
        self._file.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        """Write what is left."""
        self._file.close()
