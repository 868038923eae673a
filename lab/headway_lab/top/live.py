"""The loop of the live view: ask, draw, take keys, until the user quits. Must not know: pictures, or keys' meaning."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from rich.console import Console
from rich.live import Live

from headway_lab.top.controls import Controls, Order, OrderKind
from headway_lab.top.figures import age, glyphs_for
from headway_lab.top.frame import Frame
from headway_lab.top.history import History, Look
from headway_lab.top.keyboard import keys_of, single_keys
from headway_lab.top.server import NoAnswerError, Server
from headway_lab.top.view import KEY_HINTS, NO_KEYS_HINT, picture

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MAX_KEY_BYTES = 1024


class LiveView:
    """Shows a server on ``console`` and takes keys from a terminal."""

    def __init__(self, server: Server, console: Console, first: Look, *, address: str, interval_s: float) -> None:
        self._server = server
        self._console = console
        self._address = address
        self._interval_s = interval_s
        self._history = History(first)
        self._answered_at = first.taken_at
        self._controls = Controls()
        self._live = _live_on(console)
        self._screen = ExitStack()
        """What restores the terminal when it is closed."""
        self._takes_keys = sys.stdin.isatty()
        self._trouble = ""
        self._ended = asyncio.Event()
        self._exit_code = 0
        self._look_soon = asyncio.Event()
        self._orders: set[asyncio.Task[None]] = set()

    async def show(self) -> int:
        """Return 0 after quitting, or 128 plus a signal's number."""
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            for number in _ENDING_SIGNALS:
                loop.add_signal_handler(number, self._end, 128 + number)
                stack.callback(loop.remove_signal_handler, number)
            stack.callback(self._screen.close)
            self._open_screen()
            for number, handler in ((signal.SIGWINCH, self._draw), (signal.SIGTSTP, self._suspend)):
                loop.add_signal_handler(number, handler)
                stack.callback(loop.remove_signal_handler, number)
            await self._run_until_ended(self._keep_looking, self._keep_drawing)
        return self._exit_code

    async def _run_until_ended(self, *tasks: Callable[[], Awaitable[None]]) -> None:
        running = [asyncio.ensure_future(task()) for task in tasks]
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            done, _ = await asyncio.wait([ended, *running], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (ended, *running, *self._orders):
                task.cancel()
            await asyncio.gather(ended, *running, *self._orders, return_exceptions=True)

    async def _keep_looking(self) -> None:
        while True:
            await self._wait_for_next_look()
            try:
                self._history.add(await self._server.look())
            except NoAnswerError as error:
                self._trouble = str(error)
            else:
                self._trouble = ""
                self._answered_at = asyncio.get_running_loop().time()
            self._draw()

    async def _wait_for_next_look(self) -> None:
        try:
            async with asyncio.timeout(self._interval_s):
                await self._look_soon.wait()
        except TimeoutError:
            return
        self._look_soon.clear()

    async def _keep_drawing(self) -> None:
        """Draw every second, to show how long the server is silent."""
        while True:
            self._draw()
            await asyncio.sleep(1.0)

    def _draw(self) -> None:
        size = self._console.size
        frame = Frame(
            width=size.width,
            height=size.height,
            address=self._address,
            glyphs=glyphs_for(self._console.encoding),
            silent_for=self._trouble and age(asyncio.get_running_loop().time() - self._answered_at),
            trouble=self._trouble,
            hints=KEY_HINTS if self._takes_keys else NO_KEYS_HINT,
        )
        self._live.update(picture(self._history, self._controls, frame), refresh=True)

    def _open_screen(self) -> None:
        self._live = self._screen.enter_context(_live_on(self._console))
        if self._takes_keys:
            loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
            self._screen.enter_context(single_keys(descriptor))
            loop.add_reader(descriptor, self._read_keys, descriptor)
            self._screen.callback(loop.remove_reader, descriptor)

    def _suspend(self) -> None:
        """Give the terminal to the shell, and take it back later."""
        self._screen.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open_screen()
        self._draw()

    def _read_keys(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _MAX_KEY_BYTES)
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            self._end(128 + signal.SIGHUP)
            return
        for key in keys_of(data):
            self._press(key)
        if self._controls.wants_to_quit:
            self._end(0)
        self._draw()

    def _press(self, key: str) -> None:
        order = self._controls.press(key, self._history.latest.requests or ())
        if order is not None:
            task = asyncio.ensure_future(self._carry_out(order))
            self._orders.add(task)
            task.add_done_callback(self._orders.discard)

    async def _carry_out(self, order: Order) -> None:
        try:
            outcome = await self._server.carry_out(order)
        except NoAnswerError as error:
            self._controls.report(f"{order.kind.value}: {error}")
        else:
            if order.kind is OrderKind.EXPLAIN:
                self._controls.explain(outcome)
            else:
                self._controls.report(outcome)
        self._look_soon.set()
        self._draw()

    def _end(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._ended.set()


def _live_on(console: Console) -> Live:
    return Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
