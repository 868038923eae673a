"""Two executors' step cycles with the transport tcp between them: no file is shared."""

import pytest

from executor_cell import GREEDY, ExecutorCell, pairs, pull_of
from headway.commands.keys import make_keys
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.block_store.registry import make_transport
from headway_proto.columns import decode_column

CONFIG = BackendConfig(model="", block_size=4, num_kv_blocks=64, max_model_len=64, max_num_seqs=4)
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
HOST, HERE, THERE = [6, 2, 9], (4, 1, 7), (3, 8, 5)


@pytest.fixture(params=["without keys", "with keys"])
def cells(request, tmp_path):
    settings = {"block_address": "tcp://127.0.0.1:0", "step_address": "tcp://127.0.0.1:1"}
    if request.param == "with keys":
        make_keys(tmp_path / "keys")
        settings["curve_keys"] = str(tmp_path / "keys" / "executor")
    opened = []
    for place in "ab":
        transports = {"tcp": make_transport("tcp", settings)}
        opened.append(
            ExecutorCell(SimulatedBackend(), CONFIG, place=place, transports=transports, uses_shared_memory=False)
        )
    yield opened
    for cell in opened:
        cell.close()


def prefill(cell: ExecutorCell):
    step = cell.admit(0, PROMPT, HERE, exports=pairs(list(zip(HERE, HOST, strict=True))))
    (token,) = cell.tokens(step)
    cell.until(lambda: cell.records(HOST) == [(1, step)] * 3)  # the answer does not wait for the export
    return token, cell.stored(step, HOST)


def resume(cell: ExecutorCell, stored, token: int) -> int:
    history = [*PROMPT, token]
    pulls = (pull_of(stored, THERE),)
    return cell.admit(1, history, (*THERE, 33), computed=len(PROMPT), num_prompt=len(PROMPT), pulls=pulls)


def test_a_prompt_runs_in_one_executor_and_its_answer_in_another(cells):
    """The simulated backend fails a step whose blocks hold anything but what was computed."""
    first, second = cells
    assert first.info.block_addresses[0].startswith("tcp:127.0.0.1:")
    backend = SimulatedBackend()
    backend.open(CONFIG)
    expected = backend.token_hash.continuation(PROMPT, 2, GREEDY)
    token, stored = prefill(first)
    answer = second.answer(resume(second, stored, token))
    assert answer.stale_rows == b""
    assert [token, *decode_column(answer.sampled_token_ids).tolist()] == expected
    assert second.cycle.statistics.num_pulled_blocks == 3


def test_when_the_owner_is_gone_the_row_is_stale_and_the_step_runs(cells):
    first, second = cells
    token, stored = prefill(first)
    first.store.close()
    answer = second.answer(resume(second, stored, token))
    assert decode_column(answer.stale_rows).tolist() == [1]
    assert second.cycle.statistics.num_stale_blocks == 3
