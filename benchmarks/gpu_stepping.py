"""A backend that is driven step by step, without an executor or a scheduler.

Owns: rows, their blocks, steps in flight. Must not know: what is measured, floors.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from statistics import median

import numpy as np

from headway_executor.backend import NewRow, StepBatch, StepResult
from headway_executor.backends.triton_backend import TritonBackend
from headway_proto.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 16


class SteppedBackend:
    """The backend with rows that get blocks as from the executor."""

    def __init__(
        self, backend: TritonBackend, num_blocks: int, vocab_size: int, max_num_rows: int, max_num_tokens: int
    ) -> None:
        self._backend = backend
        self._max_num_tokens = max_num_tokens
        self._random = np.random.default_rng(0)
        self._free = self._random.permutation(num_blocks).astype(np.int32).tolist()
        self._vocab_size = vocab_size
        self._computed = np.zeros(max_num_rows, dtype=np.int32)
        self._held: dict[int, int] = {}
        self._gone: list[int] = []
        self._step = 0

    def start(self, row: int, num_tokens: int, adapter: str = "") -> NewRow:
        """Start a row of random tokens; ``run`` gives it blocks."""
        self._computed[row] = 0
        self._held[row] = 0
        token_ids = self._random.integers(0, self._vocab_size, num_tokens).astype(np.int32)
        return NewRow(
            row=row,
            token_ids=token_ids,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=0,
            sampling=GREEDY,
            adapter=adapter,
        )

    def forget(self, row: int) -> None:
        """End a row. Its blocks are not reused; a run of this length has enough."""
        self._held.pop(row)
        self._gone.append(row)

    def fill(self, num_rows: int, context: int, adapters: Sequence[str] = ("",)) -> None:
        """Start rows ``0 .. num_rows - 1``, with ``adapters`` in turn, and compute ``context`` tokens of each, so that they decode."""
        for row in range(num_rows):
            new = (self.start(row, context, adapters[row % len(adapters)]),)
            for first in range(0, context, self._max_num_tokens):
                count = min(self._max_num_tokens, context - first)
                device_ms(iter([self.run({row: count}, new, samples=first + count == context)]))
                new = ()

    def run(
        self, counts: dict[int, int], new: tuple[NewRow, ...] = (), *, samples: bool = True
    ) -> StepResult | Future[StepResult]:
        """One step of ``counts`` tokens by row."""
        rows = np.array(sorted(counts), dtype=np.int32)
        scheduled = np.array([counts[row] for row in rows.tolist()], dtype=np.int32)
        added = [(row, self._free.pop()) for row in rows.tolist() for _ in range(self._missing(row, counts[row]))]
        batch = StepBatch(
            step=self._step,
            finished_rows=np.array(self._gone, dtype=np.int32),
            new_rows=new,
            new_blocks=np.array(added, dtype=np.int32).reshape(-1, 2).T,
            rows=rows,
            num_scheduled_tokens=scheduled,
            num_computed_tokens=self._computed[rows],
            samples=np.full(len(rows), int(samples), dtype=np.int32),
            block_table=np.empty((0, 0), dtype=np.int32),
        )
        self._computed[rows] += scheduled
        self._gone = []
        self._step += 1
        return self._backend.execute(batch)

    def _missing(self, row: int, count: int) -> int:
        needed = -(-int(self._computed[row] + count) // BLOCK_SIZE)
        missing = needed - self._held[row]
        self._held[row] += max(0, missing)
        return max(0, missing)


def device_ms(results: Iterator[StepResult | Future[StepResult]], in_flight: int = 2) -> float:
    """Run the steps, at most ``in_flight`` at once; return the median of their times without the first ones."""
    pending: deque[StepResult | Future[StepResult]] = deque()
    times: list[int] = []

    def collect() -> None:
        oldest = pending.popleft()
        times.append((oldest.result() if isinstance(oldest, Future) else oldest).device_time_us)

    for result in results:
        pending.append(result)
        if len(pending) >= in_flight:
            collect()
    while pending:
        collect()
    return median(times[len(times) // 4 :]) / 1e3
