"""An event loop whose time passes only when everybody sleeps, and then at once."""

import asyncio
import selectors


class _VirtualSelector(selectors.SelectSelector):
    """Instead of waiting, moves time on."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "everybody waits for ever"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 0 seconds."""

    def __init__(self):
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self):
        return self._virtual.now

    def hold_up(self, seconds):
        """As if a callback had taken so long."""
        self._virtual.now += seconds


def run_in_virtual_time(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
