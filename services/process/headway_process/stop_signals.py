"""The signals that ask a process to stop: SIGTERM, Ctrl-C, and the end of the terminal, unless nohup wants that ignored."""

import signal

ONE_REQUEST_S = 0.25


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return them; call this before handling any of them."""
    hears_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hears_hang_up else []))


class StopRequests:
    """Counts requests to stop. Times in seconds, monotonic.

    Who signals a process and its group, as timeout(1) does, and wrappers that pass Ctrl-C on, send one wish as two signals:
    those within ``ONE_REQUEST_S`` of a request are that request.
    """

    def __init__(self) -> None:
        self.count = 0
        self._newest = float("-inf")

    def add(self, now: float) -> bool:
        """A signal has come. Return whether it is another request."""
        if now - self._newest < ONE_REQUEST_S:
            return False
        self.count, self._newest = self.count + 1, now
        return True
