"""Server-sent events (WHATWG HTML, section 9.2.6)."""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventStreamParser:
    """Accepts bytes that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> list[bytes]:
        """Return the data of each completed event."""
        *lines, self._rest = _LINE_END.split(self._rest + received)
        if self._rest == b"" and received.endswith(b"\r"):
            # Its line feed may come later, and would look like another line.
            self._rest = lines.pop() + b"\r"
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
