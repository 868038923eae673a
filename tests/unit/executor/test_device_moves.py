"""Moves beside steps, on a device that only records its calls: every conflict is ordered, and nothing else waits.

Each access of a block is known by its queue and its place in it. What is over before work begins is a pair of places, one
for each queue (a vector clock: F. Mattern, "Virtual time and global states of distributed systems", 1989).
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.backend import NewRow, StepBatch
from headway_executor.memory import device_moves
from headway_executor.memory.device_moves import DeviceMoves
from headway_executor.memory.move_fences import MoveFences
from headway_kernels.gpu import block_moves
from headway_proto.sampling import SamplingParams
from step_columns import NO_PAIRS, pair_columns

STEPS, SWAPS = 0, 1


@dataclass
class FakeMark:
    clock: tuple[int, int]
    device: "FakeQueues"
    at_us: float = 0.0

    def query(self):
        return self.device.is_over(self)

    def synchronize(self):
        self.device.now_over = self.clock

    def elapsed_time(self, later):
        assert self.query()
        assert later.query()
        return (later.at_us - self.at_us) / 1e3


@dataclass
class FakeQueues:
    """Two queues of accesses. ``chance`` tells whether a mark that is asked for is over."""

    num_blocks: int = 8
    num_host_blocks: int = 6
    chance: object = None
    swap_us: float = 10.0
    clocks: list = field(default_factory=lambda: [[0, 0], [0, 0]])
    accesses: dict = field(default_factory=lambda: defaultdict(list))
    waits: list = field(default_factory=list)
    conflicts: list = field(default_factory=list)
    now_over: tuple = (0, 0)

    def is_over(self, mark):
        over = all(have >= need for have, need in zip(self.now_over, mark.clock, strict=True))
        if not over and self.chance is not None and self.chance():
            self.now_over = tuple(map(max, self.now_over, mark.clock))
            over = True
        return over

    def _mark(self, queue):
        return FakeMark(tuple(self.clocks[queue]), self, at_us=self.swap_us * self.clocks[SWAPS][SWAPS])

    def mark_steps(self, *, timed=False):
        return self._mark(STEPS)

    def mark_swaps(self):
        return self._mark(SWAPS)

    def _wait(self, queue, mark):
        self.waits.append(queue)
        assert any(map(int.__lt__, self.known(queue), mark.clock)), "it was known to be over"
        self.clocks[queue] = list(map(max, self.clocks[queue], mark.clock))

    def steps_wait(self, mark):
        self._wait(STEPS, mark)

    def swaps_wait(self, mark):
        self._wait(SWAPS, mark)

    def known(self, queue):
        """What is over before the next work of a queue begins."""
        return list(map(max, self.clocks[queue], self.now_over))

    def unordered(self, queue, kind, numbers, *, write):
        """The accesses that conflict with these and may not be over."""
        known = self.known(queue)
        return [
            (kind, number)
            for number in numbers
            for other, place, wrote in self.accesses[kind, number]
            if (write or wrote) and other != queue and place > known[other]
        ]

    def work(self, queue, reads, writes):
        """Give work with its accesses: (kind, numbers) each."""
        self.clocks[queue] = self.known(queue)
        for (kind, numbers), write in [*((read, False) for read in reads), *((write, True) for write in writes)]:
            self.conflicts += self.unordered(queue, kind, numbers, write=write)
        self.clocks[queue][queue] += 1
        for (kind, numbers), write in [*((read, False) for read in reads), *((write, True) for write in writes)]:
            for number in numbers:
                self.accesses[kind, number].append((queue, self.clocks[queue][queue], write))

    def swap_out(self, pairs):
        blocks, host_blocks = pairs.tolist()
        self.work(SWAPS, [("block", blocks)], [("host", host_blocks)])

    def swap_in(self, pairs):
        host_blocks, blocks = pairs.tolist()
        self.work(SWAPS, [("host", host_blocks)], [("block", blocks)])

    def load(self, contents, blocks):
        self.work(SWAPS, [], [("block", blocks.tolist())])

    def scratch(self, num_blocks):
        return self

    def copy(self, pairs):
        sources, destinations = pairs.tolist()
        self.work(STEPS, [("block", sources)], [("block", destinations)])

    def synchronize(self):
        self.now_over = tuple(map(max, *self.clocks))


def batch_of(step, finished, new_rows, new_blocks, rows=()):
    return StepBatch(
        step=step,
        finished_rows=np.array(finished, dtype=np.int32),
        new_rows=tuple(
            NewRow(
                row=row,
                token_ids=np.zeros(1, dtype=np.int32),
                num_prompt_tokens=1,
                num_computed_tokens=0,
                sampling=SamplingParams(),
            )
            for row in new_rows
        ),
        new_blocks=pair_columns(new_blocks),
        rows=np.array(sorted(rows), dtype=np.int32),
        num_scheduled_tokens=np.empty(0, dtype=np.int32),
        num_computed_tokens=np.empty(0, dtype=np.int32),
        samples=np.empty(0, dtype=np.int32),
        block_table=np.empty((0, 0), dtype=np.int32),
    )


class History:
    """A scheduler's doings by the rules of the step protocol, drawn at random."""

    def __init__(self, source):
        self.random = source
        self.queues = FakeQueues(chance=lambda: source.random() < 0.3)
        self.moves = DeviceMoves(self.queues)
        self.rows = {}
        """Blocks of each live row; it writes the last of them."""
        self.on_host = set()
        self.exported = []
        self.step = 0

    def free_blocks(self):
        held = {block for blocks in self.rows.values() for block in blocks}
        free = [block for block in range(self.queues.num_blocks) if block not in held]
        self.random.shuffle(free)
        return free

    def run_step(self):
        finished, out = self.end_rows()
        before_free = self.free_blocks()
        new_rows, new_blocks, swap_in, copies, loads = [], [], [], [], []
        fresh = set()
        for row in list(self.rows):
            if before_free and self.random.random() < 0.3:
                block = before_free.pop()
                self.rows[row].append(block)
                new_blocks.append((row, block))
                fresh.add(block)
        available = sorted(self.on_host)
        for row in set(range(4)) - self.rows.keys():
            if not before_free or self.random.random() < 0.4:
                continue
            shared = self.prefix()
            own = [before_free.pop() for _ in range(min(len(before_free), self.random.randint(1, 3)))]
            for block in own[:-1]:
                if available and self.random.random() < 0.5:
                    swap_in.append((self.random.choice(available), block))
                elif self.random.random() < 0.2:
                    loads.append(block)
                elif self.random.random() < 0.3:
                    sources = sorted(set(range(self.queues.num_blocks)) - fresh - set(own) - {c[1] for c in copies})
                    if sources:
                        copies.append((self.random.choice(sources), block))
            self.rows[row] = shared + own
            new_rows.append(row)
            new_blocks += [(row, block) for block in shared + own]
            fresh |= set(own)
        copies = [pair for pair in copies if pair[0] not in {destination for _, destination in copies}]
        self.give(finished, new_rows, new_blocks, out, swap_in, copies, loads, fresh)

    def export(self):
        """Right behind a step, copy what live rows hold: another move before the next step."""
        held = [block for blocks in self.rows.values() for block in blocks[:1]]
        self.exported = []
        if held and self.random.random() < 0.3:
            self.exported = held[:1]
            host = self.random.randrange(self.queues.num_host_blocks)
            self.moves.move(copies=NO_PAIRS, swap_out=pair_columns([(held[0], host)]), swap_in=NO_PAIRS)
            self.on_host.add(host)

    def end_rows(self):
        finished = [row for row in self.rows if self.random.random() < 0.25]
        free_host = sorted(set(range(self.queues.num_host_blocks)))
        self.random.shuffle(free_host)
        out = []
        for row in finished:
            blocks = self.rows.pop(row)
            if self.random.random() < 0.6 and len(blocks) <= len(free_host):
                out += [(block, free_host.pop()) for block in blocks]
        self.on_host |= {host for _, host in out}
        return finished, out

    def prefix(self):
        """The full blocks at the beginning of a live row, which no step writes any more."""
        if not self.rows or self.random.random() < 0.5:
            return []
        blocks = self.rows[self.random.choice(sorted(self.rows))]
        return blocks[: self.random.randint(0, len(blocks) - 1)]

    def give(self, finished, new_rows, new_blocks, out, swap_in, copies, loads, fresh):
        queues, moves = self.queues, self.moves
        queues.waits.clear()
        if out or swap_in or copies:
            brought = [block for _, block in swap_in]
            may_wait = bool(out) or queues.unordered(SWAPS, "block", brought, write=True)
            moves.move(copies=pair_columns(copies), swap_out=pair_columns(out), swap_in=pair_columns(swap_in))
            assert may_wait or SWAPS not in queues.waits, "an independent swap-in has waited"
        if loads:
            moves.load(None, np.array(loads, dtype=np.int32))
        used = sorted({block for blocks in self.rows.values() for block in blocks})
        given = sorted({block for _, block in new_blocks})
        may_wait = queues.unordered(STEPS, "block", given, write=True) or queues.unordered(
            STEPS, "block", used, write=False
        )
        waits = queues.waits.count(STEPS)
        may_wait = may_wait or queues.unordered(STEPS, "block", self.exported, write=True)
        moves.before_step(batch_of(self.step, finished, new_rows, new_blocks, self.rows))
        assert may_wait or queues.waits.count(STEPS) == waits, "an independent step has waited"
        written = sorted(fresh | {blocks[-1] for blocks in self.rows.values()})
        queues.work(STEPS, [("block", used)], [("block", written)])
        moves.after_step()
        self.export()
        self.step += 1
        assert not queues.conflicts, f"step {self.step}: {queues.conflicts}"


def run_history(seed):
    history = History(random.Random(seed))
    for _ in range(25):
        history.run_step()


def run_histories(count):
    for seed in range(count):
        run_history(seed)


@settings(max_examples=300)
@given(st.integers(0, 1 << 40))
def test_every_conflict_is_ordered_and_independent_moves_do_not_wait(seed):
    run_history(seed)


@pytest.mark.parametrize("disabled", ["_swap_needed", "_swap_after", "_step_after", "rows_ended", "swap_ended"])
def test_the_model_notices_a_fence_that_is_missing(disabled, monkeypatch):
    """Who tests the tester: without any one part of the fences some history has a conflict, or waits for nothing."""
    spoiled = {
        "_swap_needed": lambda self, written: 0,
        "_swap_after": lambda self, number: 0,
        "_step_after": lambda self, number: 0,
        "rows_ended": lambda self, blocks: np.subtract.at(self._num_holders, blocks, 1),
        "swap_ended": lambda self, number: None,
    }
    monkeypatch.setattr(MoveFences, disabled, spoiled[disabled])
    with pytest.raises(AssertionError):
        run_histories(200)


def moves_on(**fields):
    queues = FakeQueues(**fields)
    return queues, DeviceMoves(queues)


def test_a_step_without_moves_waits_for_nothing_and_takes_no_time():
    queues, moves = moves_on()
    for step in range(20):
        moves.before_step(batch_of(step, [], [], []))
        assert moves.move_time_us(moves.after_step()) == 0
    assert queues.waits == []


def test_times_are_read_when_they_are_there_and_else_are_what_was_measured():
    queues, moves = moves_on(swap_us=70.0)
    assert moves.measure_swap_us() == pytest.approx(2 * 70.0 / (2 * 6))
    moves.move(copies=NO_PAIRS, swap_out=pair_columns([(0, 0), (1, 1)]), swap_in=pair_columns([(5, 3)]))
    moves.before_step(batch_of(0, [], [], []))
    number = moves.after_step()
    queues.synchronize()
    assert moves.move_time_us(number) == 140
    assert moves.move_time_us(number) == 0, "asked twice"
    moves.move(copies=NO_PAIRS, swap_out=pair_columns([(0, 0), (1, 1), (2, 2)]), swap_in=NO_PAIRS)
    moves.before_step(batch_of(1, [], [], []))
    assert moves.move_time_us(moves.after_step()) == round(3 * 70.0 / 6)


def test_no_host_blocks_no_measurement():
    _, moves = moves_on(num_host_blocks=0)
    assert moves.measure_swap_us() == 0.0
    assert moves.num_host_blocks == 0


def test_a_move_that_failed_leaves_nothing_unordered():
    """It has a number but no mark; work that needs it waits for all earlier work."""
    queues, moves = moves_on()
    copies = queues.copy
    queues.copy = lambda pairs: 1 // 0
    with pytest.raises(ZeroDivisionError):
        moves.move(copies=pair_columns([(0, 1)]), swap_out=NO_PAIRS, swap_in=NO_PAIRS)
    copies(pair_columns([(0, 1)]))
    queues.copy = copies
    moves.move(copies=NO_PAIRS, swap_out=NO_PAIRS, swap_in=pair_columns([(0, 1)]))
    assert queues.waits == [SWAPS]
    assert not queues.conflicts


def test_a_row_that_is_new_again_holds_only_what_it_gets():
    """The step that was to end it never came: its epoch was lost."""
    queues, moves = moves_on()
    for step, block in enumerate((0, 1)):
        moves.before_step(batch_of(step, [], [3], [(3, block)]))
        queues.work(STEPS, [], [("block", [block])])
        moves.after_step()
    queues.waits.clear()
    moves.move(copies=NO_PAIRS, swap_out=NO_PAIRS, swap_in=pair_columns([(0, 0)]))
    assert queues.clocks[SWAPS][STEPS] == 1, "it waited for the step that used the block, not for the next"


def test_steps_that_nobody_collects_are_forgotten():
    queues, moves = moves_on()
    for step in range(100):
        moves.move(copies=NO_PAIRS, swap_out=pair_columns([(0, 0)]), swap_in=NO_PAIRS)
        moves.before_step(batch_of(step, [], [], []))
        moves.after_step()
        queues.synchronize()
    assert len(moves._timed) <= 32
    assert len(moves._work) <= 9
    moves.close()


needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_device
def test_moves_on_a_device_bring_blocks_back_beside_steps():
    compute = torch.cuda.Stream()
    with torch.cuda.stream(compute):
        layers = torch.zeros(4, 64, 16, 1024, dtype=torch.bfloat16, device="cuda")
    moves = DeviceMoves.of_pool(layers, num_host_blocks=32, compute_stream=compute)
    assert moves.measure_swap_us() > 0
    numbers = torch.Generator().manual_seed(0)
    held = {}
    for step in range(60):
        # Row 0 writes ever other blocks with the step's number; in the same step the old ones go out, others come back.
        chosen = torch.randperm(64, generator=numbers).tolist()
        out = [(block, host) for host, block in enumerate(held)] if step % 3 == 2 else []
        back = [(host, block) for (_, host), block in zip(out, chosen[:4], strict=False)]
        expected = {block: held[out[host][0]] for host, block in back}
        moves.move(copies=NO_PAIRS, swap_out=pair_columns(out), swap_in=pair_columns(back))
        fresh = chosen[4:8]
        rows = [(0, block) for block in [*expected, *fresh]]
        moves.before_step(batch_of(step, [0] if step else [], [0], rows))
        with torch.cuda.stream(compute):
            torch.cuda._sleep(200_000)
            for block in fresh:
                layers[:, block] = step + 1
            read = {block: layers[:, block].float().mean() for block in expected}
        number = moves.after_step()
        held = expected | dict.fromkeys(fresh, step + 1)
        compute.synchronize()
        assert {block: value.item() for block, value in read.items()} == expected
        assert (moves.move_time_us(number) > 0) == bool(out)
    moves.close()


def test_a_pool_compiles_its_moves_before_any_is_asked_for(monkeypatch):
    compiled = []
    monkeypatch.setattr(block_moves, "compile_moves", compiled.append)
    monkeypatch.setattr(device_moves, "_CudaQueues", lambda layers, **_: FakeQueues(num_blocks=4, num_host_blocks=0))
    layers = torch.zeros(2, 4, 8)
    DeviceMoves.of_pool(layers, num_host_blocks=0, compute_stream=None)
    assert compiled == [layers]
