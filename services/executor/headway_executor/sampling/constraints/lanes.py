"""Threads that can be abandoned if a task never ends.

Owns: a thread, its tasks, its progress. Must not know: what a task does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

Step = Callable[[], None]

_LOOK_S = 0.05
"""How often a waiting caller checks the thread's progress."""


class Task:
    """Steps for one thread; none may raise."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.num_made = 0
        """Finished steps; the step at this index is running or next."""
        self.is_over = False
        self._ended = threading.Event()
        self._is_abandoned = False

    def run(self) -> None:
        """The thread calls this."""
        for step in self.steps:
            step()
            if self._is_abandoned:
                return
            self.num_made += 1
        self.is_over = True
        self._ended.set()

    def abandon(self) -> None:
        """Run no step after the current one."""
        self._is_abandoned = True

    def wait(self, timeout_s: float) -> bool:
        """Return whether all steps end within ``timeout_s``."""
        return self._ended.wait(timeout_s)


class Lane:
    """A daemon thread that runs tasks in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: deque[Task] = deque()
        self._has_work = threading.Condition()
        self._life = 0
        self._is_closed = False
        self.num_steps_made = 0
        """Steps of finished tasks."""
        self.num_abandoned = 0
        """Threads that were left in an endless step."""
        self.current: Task | None = None
        self._start()

    def put(self, task: Task) -> None:
        """Run ``task`` after those before it."""
        with self._has_work:
            self._tasks.append(task)
            self._has_work.notify()

    def wait(self, task: Task, patience_s: float) -> bool:
        """Return False after ``patience_s`` of processor time without an ended step."""
        progress, spent_s = self._progress(), self._spent_s()
        while not task.wait(min(patience_s, _LOOK_S)):
            if (now := self._progress()) != progress:
                progress, spent_s = now, self._spent_s()
            elif self._spent_s() - spent_s >= patience_s:
                return False
        return True

    def abandon(self, first: Task | None) -> None:
        """Leave the thread; a new one goes on with ``first``."""
        with self._has_work:
            if self.current is not None:
                self.current.abandon()
            self.current = None
            if first is not None:
                self._tasks.appendleft(first)
            self.num_abandoned += 1
            self._life += 1
            self._start()

    def close(self) -> None:
        """End the thread after its last task."""
        with self._has_work:
            self._is_closed = True
            self._has_work.notify()

    def _progress(self) -> tuple[int, int]:
        current = self.current
        return self.num_steps_made, 0 if current is None else current.num_made

    def _spent_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # The thread has ended, with all its tasks.
            return 0.0

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, args=(self._life,), name=self._name, daemon=True)
        thread.start()
        assert thread.ident is not None
        # The thread cannot have ended yet: it waits for its first task. Only a living thread has a clock.
        has_clock = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(thread.ident) if has_clock else time.CLOCK_MONOTONIC

    def _work(self, life: int) -> None:
        while (task := self._next(life)) is not None:
            task.run()
            with self._has_work:
                if self._life != life:
                    return
                self.current = None
                self.num_steps_made += len(task.steps)

    def _next(self, life: int) -> Task | None:
        with self._has_work:
            while not self._tasks and not self._is_closed and self._life == life:
                self._has_work.wait()
            if self._life != life or not self._tasks:
                return None
            self.current = self._tasks.popleft()
            return self.current
