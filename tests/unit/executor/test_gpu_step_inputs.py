"""How the triton backend's host side describes a step: its columns, its rows' edits, the size it is launched for."""

import contextlib
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.backend import NewRow, StepBatch, StepResult
from headway_executor.gpu.device_rows import DeviceRows
from headway_executor.gpu.graphs import LaunchSize, StepSizes, decode_ladder, mixed_ladder
from headway_executor.gpu.readback import Readback
from headway_executor.gpu.runtime import InterpretedRuntime, UploadRing
from headway_executor.gpu.step_columns import StepColumns, StepShape, shape_of
from headway_proto.sampling import SamplingParams
from step_columns import NO_PAIRS, pair_columns

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted")

MAX_ROWS = 12


def step(rows, counts, computed, samples):
    def column(values):
        return np.array(values, dtype=np.int32)

    return StepBatch(
        step=0,
        finished_rows=column([]),
        new_rows=(),
        new_blocks=NO_PAIRS,
        rows=column(rows),
        num_scheduled_tokens=column(counts),
        num_computed_tokens=column(computed),
        samples=column(samples),
        block_table=np.empty((0, 0), dtype=np.int32),
    )


@st.composite
def steps(draw):
    rows = sorted(draw(st.sets(st.integers(0, MAX_ROWS - 1), min_size=1)))

    def one_each(values):
        return draw(st.lists(values, min_size=len(rows), max_size=len(rows)))

    return step(
        rows, one_each(st.sampled_from([1, 1, 2, 7])), one_each(st.integers(0, 50)), one_each(st.integers(0, 1))
    )


@given(steps(), st.integers(0, 5))
def test_columns_say_what_the_batch_says_and_padding_has_no_tokens(batch, num_padding):
    columns = StepColumns(MAX_ROWS)
    shape = shape_of(batch)
    padded = min(MAX_ROWS, shape.num_rows + num_padding)
    memory = np.full(columns.size, -7, dtype=np.int32)
    columns.fill(memory, batch, shape, padded)
    views = columns.views(torch.from_numpy(memory))
    counts = batch.num_scheduled_tokens
    ends = np.cumsum(counts)
    chosen = batch.samples != 0
    reached = batch.num_computed_tokens + counts
    real, padding = slice(shape.num_rows), slice(shape.num_rows, padded)
    assert views.rows[real].tolist() == batch.rows.tolist()
    assert views.query_start[: padded + 1].tolist() == [0, *ends] + [ends[-1]] * (padded - shape.num_rows)
    assert views.first_position[real].tolist() == batch.num_computed_tokens.tolist()
    assert views.kv_length[real].tolist() == reached.tolist()
    assert views.rows[padding].tolist() == views.kv_length[padding].tolist() == [0] * (padded - shape.num_rows)
    sampled = slice(shape.num_sampled)
    assert views.sampled_token[sampled].tolist() == (ends - 1)[chosen].tolist()
    assert views.sampled_row[sampled].tolist() == batch.rows[chosen].tolist()
    assert views.sampled_position[sampled].tolist() == reached[chosen].tolist()
    assert (views.sampled_token[shape.num_sampled : padded] == -1).all()
    assert (views.sampled_row[shape.num_sampled : padded] == -1).all()


@given(steps())
def test_a_shape_tells_decodes_from_chunks(batch):
    counts = batch.num_scheduled_tokens.tolist()
    assert shape_of(batch) == StepShape(
        num_tokens=sum(counts),
        num_rows=len(counts),
        num_sampled=int(batch.samples.sum()),
        has_decodes=1 in counts,
        has_chunks=max(counts) > 1,
    )


def test_a_step_without_rows_has_no_size():
    assert shape_of(step([], [], [], [])) == StepShape(0, 0, 0, has_decodes=False, has_chunks=False)


@settings(max_examples=25)
@given(st.data())
def test_rows_on_the_device_are_what_the_edits_make_of_them(data):
    rows = DeviceRows(InterpretedRuntime(), max_num_rows=4, max_model_len=24, block_size=4)
    tables: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}
    draw = data.draw
    for _ in range(draw(st.integers(1, 4))):
        arriving = draw(st.lists(st.integers(0, 3), unique=True, max_size=3))
        new_rows = []
        for row in arriving:
            tables[row] = []
            tokens[row] = draw(st.lists(st.integers(0, 99), min_size=1, max_size=24))
            new_rows.append(
                NewRow(
                    row=row,
                    token_ids=np.array(tokens[row], dtype=np.int32),
                    num_prompt_tokens=1,
                    num_computed_tokens=0,
                    sampling=SamplingParams(),
                )
            )
        added = (
            draw(st.lists(st.tuples(st.sampled_from(sorted(tables)), st.integers(0, 50)), max_size=6)) if tables else []
        )
        added = [
            (row, block)
            for number, (row, block) in enumerate(added)
            if len(tables[row]) + sum(1 for earlier, _ in added[:number] if earlier == row) < 6
        ]
        for row, block in added:
            tables[row].append(block)
        rows.apply(tuple(new_rows), pair_columns(added))
    for row, blocks in tables.items():
        assert rows.block_tables[row, : len(blocks)].tolist() == blocks
        assert rows.token_store[row, : len(tokens[row])].tolist() == tokens[row]


def test_a_prompt_larger_than_an_upload_slot_arrives_whole():
    rows = DeviceRows(InterpretedRuntime(), max_num_rows=1, max_model_len=70_000, block_size=16)
    token_ids = np.arange(69_000, dtype=np.int32)
    new = NewRow(row=0, token_ids=token_ids, num_prompt_tokens=1, num_computed_tokens=0, sampling=SamplingParams())
    rows.apply((new,), NO_PAIRS)
    assert torch.equal(rows.token_store[0, :69_000], torch.from_numpy(token_ids))


@given(st.integers(1, 600), st.integers(1, 4096))
def test_every_step_has_a_size_that_holds_it_and_fits_the_memory(max_rows, max_tokens):
    sizes = StepSizes(max_num_rows=max_rows, max_num_tokens=max_tokens, recorded=True, alignment=16)
    recorded = set(sizes.recorded())
    for num_rows in {1, 2, 3, max_rows // 2, max_rows}:
        if 0 < num_rows <= min(max_rows, max_tokens):
            shape = StepShape(num_rows, num_rows, num_rows, has_decodes=True, has_chunks=False)
            size = sizes.of(shape)
            assert size in recorded
            assert sizes.of(shape, draws=True) == size._replace(draws=True) in recorded
            assert num_rows <= size.num_rows == size.num_tokens <= max_tokens
            assert size.num_rows <= max_rows
    for num_tokens in {2, 63, 64, 65, 500, max_tokens}:
        if not 2 <= num_tokens <= max_tokens:
            continue
        for num_rows in {1, min(max_rows, num_tokens - 1)}:
            size = sizes.of(StepShape(num_tokens, num_rows, 1, has_decodes=num_rows > 1, has_chunks=True))
            assert num_tokens <= size.num_tokens <= max_tokens
            assert num_rows <= size.num_rows <= max_rows
            assert size.has_chunks


def test_ladders_rise_to_what_there_is():
    assert decode_ladder(1) == [1]
    assert decode_ladder(20) == [1, 2, 4, 8, 16, 20]
    assert decode_ladder(300)[-3:] == [256, 288, 300]
    assert mixed_ladder(63) == []
    assert mixed_ladder(4096) == [64, 128, 192, 256, 320, 384, 448, 512]
    largest_first = StepSizes(max_num_rows=8, max_num_tokens=64, recorded=True, alignment=16).recorded()
    assert largest_first[0] == LaunchSize(64, 8, has_decodes=True, has_chunks=True)
    assert [size.num_tokens for size in largest_first] == sorted((s.num_tokens for s in largest_first), reverse=True)


class _Mark:
    def __init__(self, reached):
        self.reached = threading.Event()
        if reached:
            self.reached.set()

    def wait(self):
        assert self.reached.wait(10)


def test_results_come_in_order_and_a_failure_is_its_own():
    readback = Readback(InterpretedRuntime())
    late, early = _Mark(reached=False), _Mark(reached=True)

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    empty = StepResult(sampled_token_ids=np.empty(0, dtype=np.int32))
    futures = [
        readback.when_reached(late, lambda: empty),
        readback.when_reached(early, fail),
        readback.when_reached(early, lambda: empty),
    ]
    assert not any(future.done() for future in futures)
    late.reached.set()
    assert futures[0].result(10) is empty
    assert isinstance(futures[1].exception(10), RuntimeError)
    assert futures[2].result(10) is empty
    readback.close()


def test_what_waits_for_a_device_has_selected_it():
    class Runtime(InterpretedRuntime):
        @contextlib.contextmanager
        def on_stream(self):
            selected.add(threading.get_ident())
            yield
            selected.remove(threading.get_ident())

    class Mark:
        def wait(self):
            waited_on.append(threading.get_ident() in selected)

    selected, waited_on = set(), []
    readback = Readback(Runtime())
    readback.when_reached(Mark(), lambda: waited_on.append(threading.get_ident() in selected)).result(10)
    readback.close()
    assert (waited_on, selected) == ([True, True], set())


def test_a_slot_is_written_again_only_when_its_copy_is_over():
    waited = []

    class Runtime(InterpretedRuntime):
        def mark(self):
            number = self.sent = getattr(self, "sent", -1) + 1

            class Sent:
                def wait(self):
                    waited.append(number)

            return Sent()

    ring = UploadRing(Runtime(), 4, num_slots=2)
    target = torch.zeros(4, dtype=torch.int32)
    for value in range(4):
        ring.next_slot()[:2] = value
        ring.send(target, 2)
        assert target.tolist() == [value, value, 0, 0]
    assert waited == [0, 1]
