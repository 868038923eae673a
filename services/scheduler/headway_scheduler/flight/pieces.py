"""Reads the current life's log in pieces, for readers without access to the disk.

Owns: which files a replay needs. Must not know: their content, who asks.
The scheduler answers between two steps: no call waits for the log's thread or reads more than one piece.
"""

import os

from headway_proto.operations import MAX_FLIGHT_LOG_PIECE_BYTES, FlightLogFile, FlightLogPart, FlightLogPlace
from headway_scheduler.flight.log import FlightLogWriter, is_start, paths_of


class LogPieces:
    """Answers ``FlightLogPlace`` while the log grows."""

    def __init__(self, log: FlightLogWriter) -> None:
        self._log = log

    @property
    def life(self) -> int:
        """The current life."""
        return self._log.life

    def contents(self, mark: int = 0) -> FlightLogPart:
        """List the files once ``mark`` items are written; 0: all queued now.

        The last file's size ends with a frame, so a copy of it is whole.
        """
        log = self._log
        mark = mark or log.num_queued
        is_written = log.written.num_items >= mark or bool(log.failure)  # then nothing more is written
        try:
            files = self._files() if is_written else ()
        except FileNotFoundError:  # deleted at this moment
            files = ()
        return FlightLogPart(life=log.life, mark=mark, files=files)

    def piece(self, place: FlightLogPlace) -> FlightLogPart:
        """Beyond the size from ``contents``, a frame may be torn."""
        log = self._log
        gone = FlightLogPart(life=log.life, is_gone=True)
        if place.life != log.life or not 0 <= place.segment <= log.written.segment:
            return gone
        paths = paths_of(log.directory, log.life, place.segment)
        try:
            with (paths.checkpoint if place.is_checkpoint else paths.segment).open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), MAX_FLIGHT_LOG_PIECE_BYTES, place.offset)
        except (OSError, OverflowError):  # deleted, or a bad offset
            return gone
        return FlightLogPart(life=log.life, data=data)

    def _files(self) -> tuple[FlightLogFile, ...]:
        log, written = self._log, self._log.written
        first = self._first_segment(written.segment)
        files = []
        if first:
            num_bytes = paths_of(log.directory, log.life, first).checkpoint.stat().st_size
            files.append(FlightLogFile(segment=first, is_checkpoint=True, num_bytes=num_bytes))
        for segment in range(first, written.segment):
            num_bytes = paths_of(log.directory, log.life, segment).segment.stat().st_size
            files.append(FlightLogFile(segment=segment, is_checkpoint=False, num_bytes=num_bytes))
        return (*files, FlightLogFile(segment=written.segment, is_checkpoint=False, num_bytes=written.num_bytes))

    def _first_segment(self, last: int) -> int:
        # Without listing the directory, which may hold thousands of earlier lives.
        log, first = self._log, last
        for segment in range(last, -1, -1):
            if not paths_of(log.directory, log.life, segment).segment.exists():
                break
            first = segment if is_start(log.directory, log.life, segment) else first
        return first
