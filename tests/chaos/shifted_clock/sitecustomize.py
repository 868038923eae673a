"""Python's wall clock, shifted by as many seconds as a file says at the moment: first in PYTHONPATH of a child process.

Owns: ``time.time``, ``time.time_ns`` and ``datetime.now`` of that process. What C libraries ask the system themselves is
not shifted: only the whole machine's clock could be, and others run on it; and a shim between them and the system would
have them wait until moments that the system's clock does not reach.
"""

import datetime  # noqa: ICN001 (as those see it whose clock is shifted)
import os
import struct
import sys
import time

_path = os.environ.get("CHAOS_CLOCK_FILE")
_real, _real_ns, _RealDatetime = time.time, time.time_ns, datetime.datetime


def _offset_s() -> float:
    with open(_path, "rb") as file:  # noqa: PTH123 (as often as somebody looks at the clock)
        (offset,) = struct.unpack("<d", file.read(8))
    return offset


class _ShiftedDatetime(_RealDatetime):
    @classmethod
    def now(cls, tz=None):
        return _RealDatetime.now(tz) + datetime.timedelta(seconds=_offset_s())


if _path:
    time.time = lambda: _real() + _offset_s()
    time.time_ns = lambda: _real_ns() + int(_offset_s() * 1e9)
    datetime.datetime = _ShiftedDatetime
    sys.stderr.write("this process's wall clock can be shifted\n")
