"""Blocks go from one executor's step cycle to another's: what comes is right, or its rows are stale."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_cell import GREEDY, ExecutorCell, Stored, pairs, pull_of
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.block_store.pool_file import SHARED_MEMORY
from headway_executor.host.metrics import families_of, take_snapshot
from headway_executor.startup.registry import create_backend
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.columns import decode_column
from headway_proto.step import ExecutorHeartbeat, ExecutorOutput

DEMO_MODEL = Path(__file__).parents[3] / "services" / "launcher" / "headway" / "demo_model"
SIMULATED = BackendConfig(model="", block_size=4, num_kv_blocks=64, max_model_len=64, max_num_seqs=4)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
HOST = [6, 2, 9]

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")


@pytest.fixture
def open_cell(tmp_path):
    cells = []

    def opened(backend=None, config=SIMULATED, place="one", **fields) -> ExecutorCell:
        cell = ExecutorCell(backend or SimulatedBackend(), config, place=f"{tmp_path}/{place}", **fields)
        cells.append(cell)
        return cell

    yield opened
    for cell in cells:
        cell.close()


def prefill_and_export(cell: ExecutorCell, prompt=PROMPT, blocks=(4, 1, 7), host=HOST) -> tuple[int, Stored]:
    """Return the first token and where the prompt's blocks are."""
    step = cell.admit(0, prompt, blocks, exports=pairs(list(zip(blocks, host, strict=False))))
    (token,) = cell.tokens(step)
    return token, cell.stored(step, host)


def resume(cell: ExecutorCell, stored: Stored, history, num_prompt, blocks=(3, 8, 5), others=0) -> int:
    return cell.admit(
        1,
        history,
        (*blocks, 33),
        computed=len(history) - 1,
        num_prompt=num_prompt,
        others=others,
        pulls=(pull_of(stored, blocks),),
    )


def expected_tokens(prompt, count) -> list[int]:
    backend = SimulatedBackend()
    backend.open(SIMULATED)
    return backend.token_hash.continuation(prompt, count, GREEDY)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("torch", {"kernels": "compiled"}),
        ("torch", {"kernels": "eager"}),
        pytest.param("triton", {}, marks=pytest.mark.deep),
    ],
)
def test_a_prompt_runs_in_one_executor_and_its_answer_in_another(open_cell, name, options):
    config = BackendConfig(
        model=str(DEMO_MODEL),
        num_kv_blocks=40,
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        options=options,
    )
    prompt = [int(number) for number in np.random.default_rng(3).integers(10, 250, 45)]
    first, second = (open_cell(ThreadedBackend(create_backend(name)), config, place) for place in "ab")
    tokens = []
    step = first.admit(0, prompt, (4, 1, 7), exports=pairs([(4, 6), (1, 2), (7, 9)]))
    tokens += first.tokens(step)
    stored = first.stored(step, HOST)
    step = resume(second, stored, prompt + tokens, len(prompt))
    answer = second.answer(step)
    assert answer.stale_rows == b""
    moved = decode_column(answer.sampled_token_ids).tolist()
    for _ in range(2):
        moved += second.tokens(second.send())
    # The first executor goes on as well, from blocks that never moved.
    stayed = [token for _ in range(3) for token in first.tokens(first.send())]
    assert moved == stayed
    assert len(set(moved)) > 1
    assert first.info.host_pool != second.info.host_pool
    statistics = second.cycle.statistics
    assert (statistics.num_pulled_blocks, statistics.num_stale_blocks) == (3, 0)
    assert first.cycle.statistics.num_exported_blocks == 3


def threaded_torch() -> ThreadedBackend:
    return ThreadedBackend(create_backend("torch"))


def test_the_simulated_backend_verifies_what_was_pulled(open_cell):
    """The wrong bytes would fail the step: its cache is a mirror of contents."""
    expected = expected_tokens(PROMPT, 3)
    first, second = open_cell(place="a"), open_cell(place="b")
    token, stored = prefill_and_export(first)
    step = resume(second, stored, [*PROMPT, token], len(PROMPT))
    assert [token, *second.tokens(step), *second.tokens(second.send())] == expected


def test_an_executor_pulls_from_its_own_pool(open_cell):
    """Also across epochs, where swap_in must not."""
    cell = open_cell()
    token, stored = prefill_and_export(cell)
    cell.until(lambda: cell.records(HOST) == [(1, 0)] * 3)
    cell.begin_epoch(9)
    step = resume(cell, stored._replace(addresses=()), [*PROMPT, token], len(PROMPT))
    assert [token, *cell.tokens(step)] == expected_tokens(PROMPT, 2)


def test_swapped_out_blocks_have_records_too(open_cell):
    cell = open_cell()
    cell.tokens(cell.admit(0, PROMPT, (4, 1, 7)))
    step = cell.send(swap_out=pairs([(4, 3), (1, 5)]))
    cell.tokens(step)
    assert cell.records([3, 5, 4]) == [(1, step), (1, step), (0, 0)]


def spoil_contents(cell, stored):
    cell.store._memory.blocks[stored.host_blocks[1]][8] ^= 1


def spoil_checksum(cell, stored):
    cell.store._memory.records["checksum"][stored.host_blocks[1]] ^= 1


def write_later(cell, stored):
    cell.store._memory.records["step"][stored.host_blocks[1]] = stored.step + 4


def write_never(cell, stored):
    cell.store._memory.records[stored.host_blocks[1]] = 0


def remove_file(cell, stored):
    Path(cell.store._memory.path).unlink()


@pytest.mark.parametrize("spoil", [spoil_contents, spoil_checksum, write_later, write_never, remove_file])
def test_rows_with_blocks_that_are_not_right_are_stale_and_others_are_not(open_cell, spoil):
    first, second = open_cell(place="a"), open_cell(place="b")
    token, stored = prefill_and_export(first)
    first.until(lambda: first.records(HOST) == [(1, 0)] * 3)
    spoil(first, stored)
    other = second.admit(0, [50, 51, 52], (20, 21))
    second.tokens(other)
    started = time.monotonic()
    step = resume(second, stored, [*PROMPT, token], len(PROMPT), others=1)
    answer = second.answer(step)
    assert time.monotonic() - started < 2.0
    assert decode_column(answer.stale_rows).tolist() == [1]
    tokens = decode_column(answer.sampled_token_ids).tolist()
    assert tokens[0] == expected_tokens([50, 51, 52], 2)[1]
    # The stale row's answer says nothing, but it goes on until the scheduler ends it.
    later = second.answer(second.send(total_num_scheduled_tokens=2))
    assert later.stale_rows == b""
    # And its blocks serve whoever writes them.
    step = second.admit(2, PROMPT, (3, 8, 5), finished_rows=np.array([1, 0], dtype="<i4").tobytes())
    answer = second.answer(step)
    assert answer.stale_rows == b""
    assert decode_column(answer.sampled_token_ids).tolist() == [token]
    assert second.cycle.statistics.num_stale_blocks == (3 if spoil is remove_file else 1)


def test_a_row_that_shares_a_block_with_a_stale_row_is_stale(open_cell):
    cell = open_cell()
    token, stored = prefill_and_export(cell, blocks=(4, 1, 7, 30))
    cell.until(lambda: cell.records(HOST) == [(1, 0)] * 3)
    spoil_contents(cell, stored)
    step = resume(cell, stored, [*PROMPT, token], len(PROMPT), others=1)
    # The scheduler takes blocks 3 and 8 for the prefix of another row, before it hears of the answer.
    sharing = cell.admit(2, [*PROMPT[:8], 60], (3, 8, 12), computed=8, others=2)
    beside = cell.admit(3, [*PROMPT[:4], 61], (3, 13), computed=4, others=3)
    assert decode_column(cell.answer(step).stale_rows).tolist() == [1]
    assert decode_column(cell.answer(sharing).stale_rows).tolist() == [2]
    assert decode_column(cell.answer(beside).stale_rows).tolist() == [], "block 3 came as it should"


def test_blocks_that_are_still_being_written_are_awaited_while_answers_go_on(open_cell):
    first, second = open_cell(place="a"), open_cell(place="b", patience_s=5.0)
    token, stored = prefill_and_export(first)
    first.until(lambda: first.records(HOST) == [(1, 0)] * 3)
    kept = first.store._memory.records[HOST[0]].copy()
    first.store._memory.records[HOST[0]] = 0
    step = resume(second, stored, [*PROMPT, token], len(PROMPT))
    behind = second.send()
    seen = len(second.bodies)
    second.until(lambda: len(second.bodies) >= seen + 2)
    assert all(isinstance(body, ExecutorHeartbeat) for body in second.bodies[seen:])
    first.store._memory.records[HOST[0]] = kept
    assert second.answer(step).stale_rows == b""
    assert [token, *second.tokens(step), *second.tokens(behind)] == expected_tokens(PROMPT, 3)


def test_a_new_epoch_ends_the_wait_for_blocks(open_cell):
    cell = open_cell(patience_s=5.0)
    token, stored = prefill_and_export(cell)
    cell.until(lambda: cell.records(HOST) == [(1, 0)] * 3)
    write_never(cell, stored)
    cell.begin_epoch(2)
    resume(cell, stored, [*PROMPT, token], len(PROMPT))
    cell.send()
    cell.begin_epoch(3)
    assert cell.tokens(cell.admit(0, PROMPT, (3, 8, 5))) == [token]


PRODUCER = """
import sys, time
from pathlib import Path
from executor_cell import GREEDY, ExecutorCell, pairs
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend

config = BackendConfig(model="", block_size=4, num_kv_blocks=64, max_model_len=64, max_num_seqs=4)
cell = ExecutorCell(SimulatedBackend(), config, place=sys.argv[1])
step = cell.admit(0, {prompt}, (4, 1, 7), exports=pairs([(4, 6), (1, 2), (7, 9)]))
(token,) = cell.tokens(step)
cell.until(lambda: cell.records({host}) == [(1, 0)] * 3)
print('pool', cell.info.host_pool, cell.info.block_addresses[0], token, flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_kept_is_there_for_others_and_for_the_next_of_its_place(open_cell, tmp_path):
    program = textwrap.dedent(PRODUCER).format(prompt=PROMPT, host=HOST)
    place = f"{tmp_path}/one"
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", program, place],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        (pool, address, token) = next(line.split()[1:] for line in process.stdout if line.startswith("pool "))
        beside = open_cell(place="one")
        assert beside.info.host_pool != pool, "two living processes must never share a pool"
        beside.close()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    stored = Stored(pool, (address,), 1, 0, tuple(HOST))
    other = open_cell(place="two")
    step = resume(other, stored, [*PROMPT, int(token)], len(PROMPT))
    assert [int(token), *other.tokens(step)] == expected_tokens(PROMPT, 2)
    heir = open_cell(place="one", epoch=77)
    assert (heir.info.host_pool, heir.info.block_addresses) == (pool, (address,))
    step = resume(heir, stored, [*PROMPT, int(token)], len(PROMPT))
    assert [int(token), *heir.tokens(step)] == expected_tokens(PROMPT, 2)
    name = address.partition(":")[2]
    assert (SHARED_MEMORY / name).exists()
    heir.close()
    assert not (SHARED_MEMORY / name).exists(), "a graceful end leaves nothing behind"


class HeldBack(SimulatedBackend):
    """Copies out only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_export = threading.Event()

    def move_blocks(self, **moves):
        if moves["swap_out"].size:
            self.may_export.wait(10)
        return super().move_blocks(**moves)


def test_exports_begin_behind_the_answer(open_cell):
    """The thread of a backend would otherwise copy at once, and the answer waits for a turn of its process."""

    class Noting(SimulatedBackend):
        def __init__(self):
            super().__init__()
            self.calls = []
            self.may_end = threading.Event()

        def execute(self, batch):
            self.may_end.wait(10)
            return super().execute(batch)

        def move_blocks(self, **moves):
            self.calls.append(len(cell.bodies))
            return super().move_blocks(**moves)

    backend = Noting()
    cell = open_cell(ThreadedBackend(backend))
    step = cell.admit(0, PROMPT, (4, 1, 7), exports=pairs([(4, 6), (1, 2), (7, 9)]))
    for _ in range(3):
        cell.turn()
    num_bodies = len(cell.bodies)
    backend.may_end.set()
    cell.answer(step)
    cell.until(lambda: bool(backend.calls))
    assert backend.calls == [num_bodies + 1]


def test_an_answer_does_not_wait_for_exports_and_the_next_step_does(open_cell):
    backend = HeldBack()
    cell = open_cell(ThreadedBackend(backend))
    token, _ = prefill_and_export(cell, blocks=(4, 1, 7))
    assert [token] == expected_tokens(PROMPT, 1)
    assert cell.records(HOST) == [(0, 0)] * 3
    step = cell.send(swap_out=b"")
    for _ in range(10):
        cell.turn()
    assert not any(isinstance(body, ExecutorOutput) and body.step == step for body in cell.bodies)
    backend.may_export.set()
    assert cell.tokens(step) == expected_tokens(PROMPT, 2)[1:]
    assert cell.records(HOST) == [(1, 0)] * 3


def test_exports_that_fail_leave_no_record_and_end_no_epoch_of_an_inline_backend(open_cell):
    class Failing(SimulatedBackend):
        def move_blocks(self, **moves):
            raise MemoryError("the host pool is gone")

    cell = open_cell(Failing())
    prefill_and_export(cell, blocks=(4, 1, 7))
    assert cell.tokens(cell.send()) == expected_tokens(PROMPT, 2)[1:]
    assert cell.records(HOST) == [(0, 0)] * 3
    assert cell.cycle.statistics.num_exported_blocks == 0


def test_what_was_transferred_is_counted(open_cell):
    cell = open_cell()
    token, stored = prefill_and_export(cell, blocks=(4, 1, 7, 30))
    cell.answer(resume(cell, stored, [*PROMPT, token], len(PROMPT), others=1))
    texts = {
        sample.name: sample.value
        for family in families_of(take_snapshot(cell.info, cell.cycle.statistics))
        for sample in family.samples
    }
    assert texts["headway_executor_exported_blocks_total"] == 3
    assert texts["headway_executor_pulled_blocks_total"] == 3
    assert texts["headway_executor_stale_blocks_total"] == 0
    assert texts["headway_executor_pulled_bytes_total"] == 3 * 8 * (4 + 1)
    assert texts["headway_executor_pull_seconds_count"] == 1


def test_nan_in_the_blocks_of_a_row_is_an_error_of_this_row(open_cell):
    """As whatever lies in the blocks of a stale row might be."""
    config = BackendConfig(model=str(DEMO_MODEL), num_kv_blocks=40, max_model_len=256, max_num_seqs=2)
    cell = open_cell(threaded_torch(), config)
    prompt = [int(number) for number in np.random.default_rng(3).integers(10, 250, 20)]
    alone = cell.tokens(cell.admit(0, prompt, (4, 1)))
    pool = cell.backend._backend._model.forward.pool
    with torch.inference_mode():
        pool.layers[:, 9] = float("nan")
    lost = Stored(cell.info.host_pool, (), 99, 0, (0,))
    pulls = (pull_of(lost, (9,)),)
    step = cell.admit(1, [*range(20, 37)], (9, 8), computed=16, num_prompt=17, others=1, pulls=pulls)
    answer = cell.answer(step)
    assert decode_column(answer.stale_rows).tolist() == [1]
    assert [error.row for error in answer.errors] == [1]
    beside = open_cell(threaded_torch(), config, place="beside")
    assert beside.tokens(beside.admit(0, prompt, (4, 1))) == alone
    assert decode_column(answer.sampled_token_ids).tolist() == [*beside.tokens(beside.send()), -1]
