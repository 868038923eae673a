"""The ``orca`` policy against a transcription of ORCA's published pseudo-code, batch by batch.

Owns: Algorithm 1 of "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI 2022).
Must not know: how the core comes to its batches.
"""

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from core_driver import CoreDriver
from drawn_examples import FACTOR
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits


@dataclass
class PooledRequest:
    handle: int
    max_tokens: int
    """Slots that it may come to need."""
    state: str = "INITIATION"


class Algorithm1:
    """The published loop, from one wait to the next; comments are its line numbers."""

    def __init__(self, *, n_workers: int, max_bs: int, n_slots: int) -> None:
        self.n_workers = n_workers
        self.max_bs = max_bs
        self.n_slots = n_slots
        self.n_scheduled = 0  # 1
        self.n_rsrv = 0  # 2
        self.pool: list[PooledRequest] = []  # by arrival

    def schedule(self) -> list[PooledRequest]:
        batch = self._select()  # 4
        for request in batch:  # 6
            request.state = "RUNNING"  # 7
        self.n_scheduled += bool(batch)  # 8; the paper's pool is never empty
        return batch

    def must_wait(self) -> bool:
        return self.n_scheduled == self.n_workers  # 9

    def take_back(self, batch: list[PooledRequest], finished: set[int]) -> None:
        for request in batch:  # 11
            request.state = "INCREMENT"  # 12
            if request.handle in finished:  # 13
                self.n_rsrv -= request.max_tokens  # 14
                self.pool.remove(request)
        self.n_scheduled -= 1  # 15

    def _select(self) -> list[PooledRequest]:  # 17
        batch: list[PooledRequest] = []  # 18
        for request in [entry for entry in self.pool if entry.state != "RUNNING"]:  # 19 to 21
            if len(batch) == self.max_bs:  # 22
                break
            if request.state == "INITIATION":  # 23
                new_n_rsrv = self.n_rsrv + request.max_tokens  # 24
                if new_n_rsrv > self.n_slots:  # 25
                    break
                self.n_rsrv = new_n_rsrv  # 26
            batch.append(request)  # 27
        return batch  # 28


@settings(max_examples=150 * FACTOR)
@given(
    n_workers=st.integers(1, 4),
    max_bs=st.integers(1, 6),
    num_blocks=st.integers(16, 60),
    block_size=st.sampled_from([1, 4]),
    answers_at_once=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_batch_is_the_published_one(
    n_workers: int, max_bs: int, num_blocks: int, block_size: int, answers_at_once: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    limits = SchedulerLimits(
        batching="orca",
        max_num_seqs=max_bs,
        max_steps_in_flight=n_workers,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    capacity = ExecutorCapacity(
        num_blocks=num_blocks, block_size=block_size, max_model_len=64, vocab_size=8, max_num_rows=64
    )
    run = CoreDriver(limits, capacity)
    published = Algorithm1(n_workers=n_workers, max_bs=max_bs, n_slots=num_blocks)
    in_flight: list[list[PooledRequest]] = []
    prompts: dict[int, int] = {}
    outputs: dict[int, int] = {}

    def arrive() -> None:
        handle = len(prompts)
        prompts[handle], outputs[handle] = int(rng.integers(1, 10)), int(rng.integers(1, 8))
        run.add(handle, prompts[handle], outputs[handle])
        # The last token of a request is never computed with: it needs no slot.
        slots = -(-(prompts[handle] + outputs[handle] - 1) // block_size)
        published.pool.append(PooledRequest(handle, slots))

    def schedule() -> None:
        while not published.must_wait():
            starting = {entry.handle for entry in published.pool if entry.state == "INITIATION"}
            batch = published.schedule()
            expected = {r.handle: prompts[r.handle] if r.handle in starting else 1 for r in batch}
            assert (run.schedule() or {}) == expected
            if not batch:
                return
            in_flight.append(batch)

    def answer() -> None:
        batch = in_flight.pop(0)
        stopping = {r.handle for r in batch if rng.random() < 0.1}
        finished = {r.handle for r in batch if run.num_output_tokens[r.handle] + 1 == outputs[r.handle]} | stopping
        assert run.update(stopping) == sorted(finished)
        published.take_back(batch, finished)

    for _ in range(int(rng.integers(1, 60))):
        for _ in range(int(rng.integers(0, 3))):
            arrive()
        schedule()
        for _ in range(min(answers_at_once, len(in_flight))):
            answer()
    while published.pool:
        schedule()
        assert in_flight
        answer()
    assert run.core.num_unfinished == 0
    assert run.core.counters.num_preemptions == 0
