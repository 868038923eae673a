"""How a process of the executor ends: signals, exit codes, last words.

Owns: these. Must not know: steps, sockets.
"""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from structlog.typing import FilteringBoundLogger

from headway_executor.backend import DeviceLostError, RankLostError
from headway_process.last_words import write_last_line
from headway_process.log_sink import LogSink
from headway_process.stop_signals import stop_signals

EXIT_OK = 0
EXIT_BAD_CONFIGURATION = 2
EXIT_BAD_MODEL_FILES = 3
EXIT_DEVICE_LOST = 4

LOG_DRAIN_S = 0.5
LAST_FRAMES_S = 0.5


class StopRequest:
    """A signal to stop, from now on; ``wake`` ends a wait."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.requested = False
        self._wake = wake
        for number in stop_signals():
            signal.signal(number, self._request)

    def _request(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self.requested = True
        self._wake()


def exit_at_once_on_signals(leave: Callable[[], None] = lambda: None) -> None:
    """A loading process has nothing to save but what ``leave`` removes, and a loader cannot be interrupted."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        del signum, frame
        leave()
        os._exit(EXIT_OK)

    for number in stop_signals():
        signal.signal(number, end)


def refuse(line: str, code: int) -> int:
    """Say why this process cannot work; return its exit code."""
    write_last_line(f"headway executor: {line}")
    return code


def end_without_device(error: DeviceLostError, log: FilteringBoundLogger, sink: LogSink) -> NoReturn:
    """The usual clean-up may hang on a lost device, or on one that waits for a lost rank."""
    event = (
        "a rank is lost; the group ends" if isinstance(error, RankLostError) else "the device is lost; the process ends"
    )
    log.critical(event, reason=str(error))
    sink.drain(LOG_DRAIN_S)
    os._exit(EXIT_DEVICE_LOST)
