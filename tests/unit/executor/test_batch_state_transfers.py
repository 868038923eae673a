"""Exports and pulls of a step are checked like everything else in it."""

import numpy as np
import pytest

from headway_executor.batch.batch_state import BatchState
from headway_executor.batch.diff_checks import ImpossibleDiff
from headway_proto.columns import encode_column, encode_columns
from headway_proto.sampling import SamplingParams
from headway_proto.step import BlockPull, NewRequest, TransferringOutput
from step_columns import backend_info, encoded_pairs

INFO = backend_info(num_blocks=40, num_host_blocks=12)
QUIET = encoded_pairs([(1, 0)])


def new_request(row: int, blocks, num_computed: int = 0) -> NewRequest:
    return NewRequest(
        row=row,
        token_ids=encode_column(range(4 * len(blocks))),
        num_prompt_tokens=4,
        block_ids=encode_column(blocks),
        num_computed_tokens=num_computed,
        sampling=SamplingParams(),
    )


def step(number: int, total: int = 0, **fields) -> TransferringOutput:
    return TransferringOutput(epoch=1, step=number, total_num_scheduled_tokens=total, **fields)


def state_with_row() -> BatchState:
    """Row 1 has blocks 1 to 3."""
    state = BatchState(INFO)
    state.apply(
        step(0, 12, scheduled_new_reqs=(new_request(1, (1, 2, 3)),), num_scheduled_tokens=encoded_pairs([(1, 12)]))
    )
    return state


def pull(*entries, pool="pool", addresses=("shm:x",), epoch=5) -> BlockPull:
    """Entries: (host block there, step that wrote it, device block)."""
    return BlockPull(pool, addresses, epoch, encode_columns(list(np.array(entries, dtype=np.int32).reshape(-1, 3).T)))


def with_new_row(*pulls, **fields) -> TransferringOutput:
    return step(
        1,
        scheduled_new_reqs=(new_request(0, (10, 11, 12), 8),),
        num_scheduled_tokens=encoded_pairs([(0, 0), (1, 0)]),
        pulls=pulls,
        **fields,
    )


def test_exports_and_pulls_are_passed_on():
    state = state_with_row()
    moves = state.apply(with_new_row(pull((900, 4, 11), (3, 5, 10)), exports=encoded_pairs([(2, 7), (1, 8)]))).moves
    assert moves.exports.tolist() == [[2, 1], [7, 8]]
    (found,) = moves.pulls
    assert (found.pool, found.addresses, found.epoch) == ("pool", ("shm:x",), 5)
    assert found.blocks.tolist() == [[900, 3], [4, 5], [11, 10]]


def test_a_step_that_transfers_nothing_has_no_moves():
    assert state_with_row().apply(step(1, num_scheduled_tokens=QUIET)).moves is not None
    moves = state_with_row().apply(step(1, num_scheduled_tokens=QUIET)).moves
    assert not moves.exports.size
    assert moves.pulls == ()


def test_later_steps_swap_in_what_was_exported_and_the_same_step_does_not():
    state = state_with_row()
    state.apply(step(1, num_scheduled_tokens=QUIET, exports=encoded_pairs([(2, 7)])))
    assert state.apply(step(2, num_scheduled_tokens=QUIET, swap_in=encoded_pairs([(7, 30)]))).moves is not None
    with pytest.raises(ImpossibleDiff, match="swap_in: host block 8 holds nothing that this epoch swapped out"):
        state.apply(
            step(3, num_scheduled_tokens=QUIET, swap_in=encoded_pairs([(8, 30)]), exports=encoded_pairs([(2, 8)]))
        )


def test_a_new_epoch_swaps_in_nothing_that_was_exported_before():
    state = state_with_row()
    state.apply(step(1, num_scheduled_tokens=QUIET, exports=encoded_pairs([(2, 7)])))
    state.begin_epoch()
    with pytest.raises(ImpossibleDiff, match="swap_in: host block 7 holds nothing"):
        state.apply(step(0, swap_in=encoded_pairs([(7, 30)])))


IMPOSSIBLE = {
    "exports: device block 40 is outside 0 to 39": {"exports": encoded_pairs([(40, 1)])},
    "exports: host block 12 is outside 0 to 11": {"exports": encoded_pairs([(1, 12)])},
    "exports: 12 bytes are not 2 columns": {"exports": bytes(12)},
    "swap_out and exports: host block 3 is listed twice": {
        "swap_out": encoded_pairs([(1, 3)]),
        "exports": encoded_pairs([(2, 3)]),
    },
    "exports: host block 4 is listed twice": {"exports": encoded_pairs([(1, 4), (2, 4)])},
    "pulls: device block 40 is outside 0 to 39": {"pulls": (pull((0, 0, 40)),)},
    "pulls: host block -1 is outside 0": {"pulls": (pull((-1, 0, 10)),)},
    "pulls: step -1 is negative": {"pulls": (pull((0, -1, 10)),)},
    "pulls: 8 bytes are not 3 columns": {"pulls": (BlockPull("pool", (), 5, bytes(8)),)},
    "pulls: a pool's name of 0 characters": {"pulls": (pull((0, 0, 10), pool=""),)},
    "pulls: 9 addresses; allowed: at most 8": {"pulls": (pull((0, 0, 10), addresses=("shm:x",) * 9),)},
    "pulls: epoch 0 is outside 1": {"pulls": (pull((0, 0, 10), epoch=0),)},
    "swap_in and pulls: device block 10 is listed twice": {"pulls": (pull((0, 0, 10)), pull((1, 0, 10)))},
    "pulls: device block 20 is in no new row of this step": {"pulls": (pull((0, 0, 20)),)},
    "pulls: device block 2 is in no new row of this step": {"pulls": (pull((0, 0, 2)),)},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_transfers_are_refused(message):
    fields = dict(IMPOSSIBLE[message])
    pulls = fields.pop("pulls", ())
    with pytest.raises(ImpossibleDiff) as refused:
        state_with_row().apply(with_new_row(*pulls, **fields))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_block_that_an_earlier_row_reads_is_not_overwritten():
    state = state_with_row()
    with pytest.raises(ImpossibleDiff, match="pulls: device block 2 is in a row of earlier steps"):
        state.apply(
            step(
                1,
                scheduled_new_reqs=(new_request(0, (2, 11, 12), 8),),
                num_scheduled_tokens=encoded_pairs([(0, 0), (1, 0)]),
                pulls=(pull((0, 0, 2)),),
            )
        )


def test_an_executor_without_host_blocks_exports_nothing_and_may_pull():
    state = BatchState(backend_info(num_blocks=40))
    request = new_request(0, (10, 11, 12), 8)
    quiet = encoded_pairs([(0, 0)])
    assert state.apply(step(0, scheduled_new_reqs=(request,), num_scheduled_tokens=quiet, pulls=(pull((0, 0, 10)),)))
    with pytest.raises(ImpossibleDiff, match="exports: this executor has no host blocks"):
        state.apply(step(1, num_scheduled_tokens=quiet, exports=encoded_pairs([(1, 0)])))
