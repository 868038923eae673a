"""A flight log on disk, opened and replayed event by event."""

import sys
from collections.abc import Iterator
from pathlib import Path

from headway.flags.settings import ConfigurationError
from headway.terminal.progress import ProgressLine
from headway_scheduler.flight.checkpoint import CheckpointError, restore_state
from headway_scheduler.flight.log import FlightLog, FlightLogError
from headway_scheduler.flight.replay import Event, Replay

_MIB = 1 << 20


class NoFlightLogError(ConfigurationError):
    """The server records nothing."""


class Flight:
    """One life of a scheduler. ``events`` can be read once."""

    def __init__(self, path: str) -> None:
        """Open the log.

        Raises:
            ConfigurationError: there is none, or it is damaged.
        """
        try:
            self.log = FlightLog(Path(path))
            limits, checkpoint = self.log.header.limits, self.log.checkpoint()
            state = None if checkpoint is None else restore_state(checkpoint, limits)
        except (FlightLogError, CheckpointError) as error:
            raise ConfigurationError(str(error)) from None
        self.replay = Replay(limits, state)
        self.first_s = 0.0
        """When the first event was, in seconds of the scheduler's clock."""

    def events(self, title: str) -> Iterator[Event]:
        """Replay and verify every event.

        Raises:
            ConfigurationError: the log is damaged.
            Divergence: the core decides otherwise.
        """
        progress = ProgressLine(sys.stderr)
        has_begun = False
        try:
            for event in self.replay.run(self.log.records()):
                if not has_begun and event.now:
                    self.first_s, has_begun = event.now, True
                yield event
                done = self.log.num_bytes_read // _MIB
                what = f"MiB, {event.now - self.first_s:.0f} s replayed  {title}"
                progress.show(done, self.log.num_bytes // _MIB, what)
        except FlightLogError as error:
            raise ConfigurationError(str(error)) from None
        finally:
            progress.erase()

    @property
    def duration_s(self) -> float:
        """Seconds from first to newest event."""
        return self.replay.now - self.first_s

    def report_notice(self) -> None:
        """Report a torn end on stderr."""
        if self.log.notice:
            sys.stderr.write(f"note: {self.log.notice}\n")
