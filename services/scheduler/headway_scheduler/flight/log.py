"""The flight log on disk: a directory of segments, each a magic and framed batches of records.

Owns: files, size limits, damage. Must not know: what a record means.

A segment is ``LIFE-NUMBER.flight``: 8 bytes of magic, then frames. A frame is ``length u32 | crc32 of the length u32 |
crc32 of the payload u32``, little-endian, and ``length`` bytes: a zlib stream of a MessagePack array of records. A
crash may tear the last frame: readers drop it with a notice; other damage is an error. Each segment after a life's
first has a *checkpoint*, ``LIFE-NUMBER.checkpoint``: one frame with the core's state at its start.

Files contain prompts and answers, so only their owner may read them (mode 0600).
"""

import contextlib
import os
import queue
import re
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from headway_scheduler.flight.records import LOG_VERSION, Header, Record

SEGMENT_MAGIC = b"HWFLIGHT"
CHECKPOINT_MAGIC = b"HWFLIGHC"
_HEADER = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1 << 30
_COMPRESSION_LEVEL = 1
_SEGMENTS_PER_LOG = 4
_LEAST_SEGMENT_BYTES = 1 << 18
_QUEUED_BATCHES = 256
_CLOSE_S = 5.0
_BATCHES_PER_LOOK = 64

_SEGMENT_NAME = re.compile(r"(\d{6})-(\d{6})\.flight")


class FlightLogError(Exception):
    """A log cannot be read; one line."""


class SegmentPaths(NamedTuple):
    """The files of one segment."""

    segment: Path
    checkpoint: Path

    @property
    def num_bytes(self) -> int:
        """The size on disk."""
        return sum(path.stat().st_size for path in self if path.exists())

    def remove(self) -> None:
        """Delete both."""
        for path in self:
            path.unlink(missing_ok=True)


class Written(NamedTuple):
    """The written part, up to the end of a frame."""

    num_items: int
    """Batches and rotations."""
    segment: int
    num_bytes: int


def paths_of(directory: Path, life: int, segment: int) -> SegmentPaths:
    """Return a segment's files."""
    stem = f"{life:06d}-{segment:06d}"
    return SegmentPaths(directory / f"{stem}.flight", directory / f"{stem}.checkpoint")


def framed(payload: bytes) -> bytes:
    """Compress and frame ``payload``."""
    # Token ids have zero bytes but few repetitions; a search for more takes twice the time and gains nothing.
    compressor = zlib.compressobj(_COMPRESSION_LEVEL, strategy=zlib.Z_RLE)
    packed = compressor.compress(payload) + compressor.flush()
    return _HEADER.pack(len(packed), zlib.crc32(_LENGTH.pack(len(packed))), zlib.crc32(packed)) + packed


class FlightLogWriter:
    """Writes the recordings of a scheduler, on a separate thread; each is a life.

    The directory keeps at most ``max_bytes``, earlier lives included. An error ends the recording; ``failure`` names
    it. ``begin_again`` begins another one.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """Begin a life.

        Raises:
            OSError: the directory cannot be made or written.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory = directory
        self._max_bytes = max_bytes
        self._segment_bytes = max(max_bytes // _SEGMENTS_PER_LOG, _LEAST_SEGMENT_BYTES)
        self.life = max((life for life, _ in segments_in(directory)), default=0) + 1
        self.segment = 0
        self.failure = ""
        self._segment_size = 0
        self._num_batches = 0
        self.num_queued = 0
        self.written = Written(0, 0, len(SEGMENT_MAGIC))
        """Replaced as a whole: any thread may read it."""
        self._is_over = False
        self._file: int | None = _create(paths_of(directory, self.life, 0).segment)
        self._start()

    def _start(self) -> None:
        # Bounded, or a slow disk would fill the memory.
        self._queue: queue.Queue[bytes | SegmentPaths | None] = queue.Queue(maxsize=_QUEUED_BATCHES)
        self._thread = threading.Thread(target=self._run, name="flight log", daemon=True)
        self._thread.start()

    def begin_again(self) -> bool:
        """Begin another life if the last has failed and there is room for a segment. ``rotate`` begins its first one."""
        if self._is_over or self._thread.is_alive():
            return False
        try:
            if shutil.disk_usage(self.directory).free < self._segment_bytes:
                return False
            self.life = max((life for life, _ in segments_in(self.directory)), default=self.life) + 1
        except OSError:
            return False
        self.segment, self.failure, self._segment_size = 0, "", 0
        self.written = Written(self.num_queued, 0, len(SEGMENT_MAGIC))
        self._start()
        return True

    @property
    def is_segment_full(self) -> bool:
        """Whether the next segment is due."""
        return self._segment_size >= self._segment_bytes

    @property
    def is_busy(self) -> bool:
        """Whether a batch waits."""
        return not self._queue.empty()

    def append(self, batch: bytes) -> None:
        """Queue an encoded batch without waiting."""
        self._put(batch)

    def rotate(self) -> SegmentPaths:
        """Begin the next segment without waiting."""
        self.segment += 1
        self._segment_size = 0
        paths = paths_of(self.directory, self.life, self.segment)
        self._put(paths)
        return paths

    def stop(self, reason: str) -> None:
        """End the recording for good."""
        self._is_over = True
        self.failure = self.failure or reason

    def close(self) -> None:
        """Write what is queued."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, block=not self.failure, timeout=_CLOSE_S)
        self._thread.join(timeout=_CLOSE_S)

    def _put(self, item: bytes | SegmentPaths) -> None:
        if self.failure:
            return
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self.failure = "the disk is too slow for it"
        else:
            self.num_queued += 1

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if self.failure:
                    break
                if isinstance(item, SegmentPaths):
                    self._begin_segment(item)
                else:
                    self._write(item)
            self._close_file()
        except OSError as error:
            self.failure = error.strerror or str(error)
            with contextlib.suppress(OSError):
                self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            os.fsync(file)
        finally:
            os.close(file)

    def _begin_segment(self, paths: SegmentPaths) -> None:
        self._close_file()
        self._file = _create(paths.segment)
        self.written = Written(self.written.num_items + 1, self.written.segment + 1, len(SEGMENT_MAGIC))
        self._keep_within_bound()

    def _write(self, batch: bytes) -> None:
        view = memoryview(framed(batch))
        num_bytes = len(view)
        self._segment_size += num_bytes
        self._num_batches += 1
        if self._num_batches % _BATCHES_PER_LOOK == 0:
            self._keep_within_bound()  # a new checkpoint may exist
        assert self._file is not None
        while view:
            view = view[os.write(self._file, view) :]
        self.written = Written(self.written.num_items + 1, self.written.segment, self.written.num_bytes + num_bytes)

    def _keep_within_bound(self) -> None:
        """Delete the oldest segments while a replay can begin later."""
        keys = segments_in(self.directory)
        paths = [paths_of(self.directory, *key) for key in keys]
        sizes = [files.num_bytes for files in paths]
        starts = [key for key in keys if is_start(self.directory, *key)]
        total = sum(sizes)
        # Expect a segment of the largest size, and a checkpoint as large as any.
        largest = max(files.checkpoint.stat().st_size if files.checkpoint.exists() else 0 for files in paths)
        for key, size in zip(keys, sizes, strict=True):
            if total <= self._max_bytes - self._segment_bytes - largest:
                return
            if not starts or key >= starts[-1]:
                if total > self._max_bytes:
                    self.stop(f"it holds {total} bytes, and no checkpoint allows deleting the oldest")
                return
            paths_of(self.directory, *key).remove()
            total -= size


def write_checkpoint(path: Path, payload: bytes) -> None:
    """Write a checkpoint whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_suffix(".partial")
    file = _create(partial, CHECKPOINT_MAGIC)
    try:
        view = memoryview(framed(payload))
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)


def segments_in(directory: Path) -> list[tuple[int, int]]:
    """Return (life, segment), oldest first."""
    matches = [_SEGMENT_NAME.fullmatch(path.name) for path in directory.iterdir()]
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


def is_start(directory: Path, life: int, segment: int) -> bool:
    """Whether a replay can begin here."""
    return segment == 0 or paths_of(directory, life, segment).checkpoint.exists()


def _create(path: Path, magic: bytes = SEGMENT_MAGIC) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, magic)
    except OSError:
        os.close(file)
        path.unlink(missing_ok=True)
        raise
    return file


# ------------------------------------------------------------------------------------------------------------- reading


class FlightLog:
    """One life of a log."""

    def __init__(self, path: Path) -> None:
        """Open a directory's newest life, or a segment's.

        Raises:
            FlightLogError: no segment that a replay can begin with.
        """
        directory, life = _place_of(path)
        segments = [segment for found, segment in segments_in(directory) if found == life]
        starts = [segment for segment in segments if is_start(directory, life, segment)]
        if not starts:
            raise FlightLogError(f"{path}: no segment that a replay can begin with")
        wanted = range(starts[0], segments[-1] + 1)
        missing = sorted(set(wanted).difference(segments))
        if missing:
            raise FlightLogError(f"{paths_of(directory, life, missing[0]).segment}: the segment is missing")
        self._paths = [paths_of(directory, life, segment) for segment in wanted]
        self._decoder = msgspec.msgpack.Decoder(list[Record])
        self.life = life
        self._torn = ""
        self.num_bytes_read = 0
        self.header = self._first_header()

    @property
    def notice(self) -> str:
        """What is missing before the life, and at its end as far as it was read; or nothing."""
        return "; ".join(filter(None, (self.header.missing, self._torn)))

    @property
    def num_bytes(self) -> int:
        """The size on disk."""
        return sum(paths.segment.stat().st_size for paths in self._paths)

    def checkpoint(self) -> bytes | None:
        """Return the core's state before the records; None if they begin with its creation.

        Raises:
            FlightLogError: damaged.
        """
        path = self._paths[0].checkpoint
        if self.header.segment == 0:
            return None
        payloads = [payload for _, _, payload in _frames(path, _read(path, CHECKPOINT_MAGIC))]
        if len(payloads) != 1:
            raise FlightLogError(f"{path}: damaged: a checkpoint is one frame, and there are {len(payloads)}")
        return payloads[0]

    def records(self) -> Iterator[Record]:
        """Yield all records but the headers.

        Raises:
            FlightLogError: damage before the tail.
        """
        self.num_bytes_read = 0
        for paths in self._paths:
            for record in self._records_of(paths.segment, is_last=paths is self._paths[-1]):
                if not isinstance(record, Header):
                    yield record

    def _records_of(self, path: Path, *, is_last: bool) -> Iterator[Record]:
        data = _read(path, SEGMENT_MAGIC)
        end = _end_of_whole_frames(data)
        if end < len(data):
            if not is_last:
                raise FlightLogError(f"{path}: torn at byte {end}, and another segment follows")
            self._torn = f"{path.name} is torn: its last {len(data) - end} bytes, from byte {end}, are left out"
        for offset, num_bytes, payload in _frames(path, data[:end]):
            try:
                yield from self._decoder.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FlightLogError(f"{path}: damaged at byte {offset}: {error}") from None
            self.num_bytes_read += num_bytes

    def _first_header(self) -> Header:
        path = self._paths[0].segment
        header = next(self._records_of(path, is_last=len(self._paths) == 1), None)
        if not isinstance(header, Header):
            raise FlightLogError(f"{path}: it holds no header")
        if header.version != LOG_VERSION:
            raise FlightLogError(f"{path}: version {header.version} is not allowed; allowed: {LOG_VERSION}")
        return header


def _place_of(path: Path) -> tuple[Path, int]:
    match = _SEGMENT_NAME.fullmatch(path.name)
    if match and path.is_file():
        return path.parent, int(match[1])
    try:
        segments = segments_in(path)
    except OSError as error:
        raise FlightLogError(f"{path}: {error.strerror}") from None
    if not segments:
        raise FlightLogError(f"{path}: there is no flight log in it")
    # A recording that went on has no start until its first checkpoint is written.
    return path, max((life for life, segment in segments if is_start(path, life, segment)), default=segments[-1][0])


def _read(path: Path, magic: bytes) -> memoryview:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FlightLogError(f"{path}: {error.strerror}") from None
    if not data.startswith(magic):
        raise FlightLogError(f"{path}: it does not begin as a flight log does")
    return memoryview(data)


def _end_of_whole_frames(data: memoryview) -> int:
    """The tail may be an incomplete frame, or zeros."""
    offset = len(SEGMENT_MAGIC)
    while offset + _HEADER.size <= len(data):
        length, check, _ = _HEADER.unpack_from(data, offset)
        if zlib.crc32(_LENGTH.pack(length)) != check:
            return offset if not any(data[offset:]) else len(data)
        if offset + _HEADER.size + length > len(data):
            return offset
        offset += _HEADER.size + length
    return offset


def _frames(path: Path, data: memoryview) -> Iterator[tuple[int, int, bytes]]:
    """Yield (offset, size, payload)."""
    offset = len(SEGMENT_MAGIC)
    while offset < len(data):
        try:
            length, check, checksum = _HEADER.unpack_from(data, offset)
            packed = data[offset + _HEADER.size :][:length]
            if zlib.crc32(_LENGTH.pack(length)) != check or zlib.crc32(packed) != checksum:
                raise FlightLogError(f"{path}: damaged at byte {offset}: the checksum does not match")
            yield offset, _HEADER.size + length, _inflated(packed)
        except (struct.error, zlib.error) as error:
            raise FlightLogError(f"{path}: damaged at byte {offset}: {error}") from None
        offset += _HEADER.size + length


def _inflated(packed: memoryview) -> bytes:
    decompressor = zlib.decompressobj()
    payload = decompressor.decompress(packed, _MAX_FRAME_BYTES)
    if not decompressor.eof:
        raise zlib.error("the payload is cut or too large")
    return payload
