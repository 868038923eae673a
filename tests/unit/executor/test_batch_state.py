"""The mirrored rows: equal to a plain reference over random diffs, and unmoved by diffs that cannot be right."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway_executor.batch.batch_state import BatchState, ImpossibleDiff
from headway_proto.columns import encode_column
from headway_proto.sampling import SamplingParams
from headway_proto.step import NewRequest, SchedulerOutput, state_digest
from step_columns import backend_info, encoded_pairs

ROWS, BLOCKS, BLOCK_SIZE, MAX_LEN, VOCAB, HOST_BLOCKS = 6, 40, 4, 30, 100, 12

INFO = backend_info(
    num_blocks=BLOCKS,
    block_size=BLOCK_SIZE,
    max_model_len=MAX_LEN,
    vocab_size=VOCAB,
    max_num_rows=ROWS,
    num_host_blocks=HOST_BLOCKS,
)


def new_request(row: int, num_tokens: int = 5, *, blocks=(1, 2), **changes) -> NewRequest:
    request = NewRequest(
        row=row,
        token_ids=encode_column(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        block_ids=encode_column(blocks),
        num_computed_tokens=0,
        sampling=SamplingParams(),
    )
    return msgspec.structs.replace(request, **changes)


def step(number: int, total: int, **fields) -> SchedulerOutput:
    return SchedulerOutput(epoch=1, step=number, total_num_scheduled_tokens=total, **fields)


def admit_two() -> BatchState:
    """Rows 1 (five tokens, all computed and sampled) and 4 (nine tokens, six computed)."""
    state = BatchState(INFO)
    state.apply(
        step(
            0,
            11,
            scheduled_new_reqs=(new_request(4, 9, blocks=(3, 4, 5)), new_request(1)),
            num_scheduled_tokens=encoded_pairs([(1, 5), (4, 6)]),
        )
    )
    return state


def test_a_steady_decode_step_runs_every_row_once():
    state = admit_two()
    state.apply(step(1, 4, num_scheduled_tokens=encoded_pairs([(4, 3)])))
    batch, moves = state.apply(step(2, 2))
    assert moves is None
    assert batch.rows.tolist() == [1, 4]
    assert batch.num_scheduled_tokens.tolist() == [1, 1]
    assert batch.num_computed_tokens.tolist() == [6, 9]
    assert batch.samples.tolist() == [1, 1]
    assert batch.finished_rows.size == batch.new_blocks.size == len(batch.new_rows) == 0
    assert all(array.dtype == np.int32 for array in (batch.rows, batch.samples, batch.num_computed_tokens))


def test_a_prefill_chunk_samples_only_when_it_catches_up():
    state = BatchState(INFO)
    request = new_request(0, 9, blocks=(7, 8, 9))
    first = state.apply(step(0, 4, scheduled_new_reqs=(request,), num_scheduled_tokens=encoded_pairs([(0, 4)]))).batch
    second = state.apply(step(1, 5, num_scheduled_tokens=encoded_pairs([(0, 5)]))).batch
    third = state.apply(step(2, 1)).batch
    assert [batch.samples.tolist() for batch in (first, second, third)] == [[0], [1], [1]]
    assert [batch.num_computed_tokens.tolist() for batch in (first, second, third)] == [[0], [4], [9]]
    assert first.new_blocks.tolist() == [[0, 0, 0], [7, 8, 9]]
    assert first.block_table[0, :3].tolist() == [7, 8, 9]


def test_rows_that_sit_out_are_not_in_the_batch():
    batch = admit_two().apply(step(1, 3, num_scheduled_tokens=encoded_pairs([(4, 3), (1, 0)]))).batch
    assert batch.rows.tolist() == [4]
    assert batch.num_scheduled_tokens.tolist() == [3]


def test_a_row_can_be_finished_and_taken_again_in_one_step():
    state = admit_two()
    diff = step(
        1,
        6,
        finished_rows=encode_column([1, 4]),
        scheduled_new_reqs=(new_request(4, 7, blocks=(9, 10)),),
        new_blocks=encoded_pairs([(4, 11)]),
        num_scheduled_tokens=encoded_pairs([(4, 6)]),
    )
    batch = state.apply(diff).batch
    assert batch.finished_rows.tolist() == [1, 4]
    assert batch.rows.tolist() == [4]
    assert batch.new_blocks.tolist() == [[4, 4, 4], [9, 10, 11]]
    assert batch.block_table[4, :3].tolist() == [9, 10, 11]
    assert batch.new_rows[0].token_ids.tolist() == list(range(7))


def test_several_blocks_for_one_row_keep_their_order():
    state = admit_two()
    batch = state.apply(step(1, 2, new_blocks=encoded_pairs([(4, 20), (1, 21), (4, 22), (1, 23), (4, 24)]))).batch
    assert batch.block_table[4, :6].tolist() == [3, 4, 5, 20, 22, 24]
    assert batch.block_table[1, :4].tolist() == [1, 2, 21, 23]


def test_block_moves_are_passed_on():
    fields = {
        "block_copies": encoded_pairs([(1, 2), (3, 4)]),
        "swap_out": encoded_pairs([(5, 11)]),
        "swap_in": encoded_pairs([(11, 6)]),
    }
    moves = admit_two().apply(step(1, 2, **fields)).moves
    assert moves.copies.tolist() == [[1, 3], [2, 4]]
    assert moves.swap_out.tolist() == [[5], [11]]
    assert moves.swap_in.tolist() == [[11], [6]]


def test_a_host_block_can_be_written_again_unread_and_read_again():
    state = admit_two()
    for number, fields in enumerate(
        (
            {"swap_out": encoded_pairs([(5, 3)])},
            {"swap_out": encoded_pairs([(6, 3)])},
            {"swap_in": encoded_pairs([(3, 7), (3, 8)])},
            {"swap_in": encoded_pairs([(3, 9)]), "swap_out": encoded_pairs([(9, 4)])},
        ),
        start=1,
    ):
        quiet = encoded_pairs([(1, 0), (4, 0)])
        assert state.apply(step(number, 0, num_scheduled_tokens=quiet, **fields)).moves is not None


def test_a_new_epoch_forgets_what_was_swapped_out():
    state = admit_two()
    state.apply(step(1, 2, swap_out=encoded_pairs([(5, 3)])))
    state.begin_epoch()
    with pytest.raises(ImpossibleDiff, match="swap_in: host block 3 holds nothing that this epoch swapped out"):
        state.apply(step(0, 0, swap_in=encoded_pairs([(3, 5)])))


def test_a_row_can_leave_and_its_blocks_and_another_row_take_its_place_in_one_step():
    state = admit_two()
    state.apply(step(1, 2, swap_out=encoded_pairs([(3, 0), (4, 1)])))
    back = new_request(0, 9, blocks=(1, 2, 20), num_computed_tokens=8)
    batch, moves = state.apply(
        step(
            2,
            2,
            finished_rows=encode_column([1]),
            scheduled_new_reqs=(back,),
            swap_out=encoded_pairs([(1, 2), (2, 3)]),
            swap_in=encoded_pairs([(0, 1), (1, 2)]),
        )
    )
    assert batch.rows.tolist() == [0, 4]
    assert (batch.num_computed_tokens[0], batch.samples[0]) == (8, 1)
    assert (batch.new_rows[0].row, batch.new_rows[0].num_computed_tokens) == (0, 8)
    assert moves.swap_out.tolist() == [[1, 2], [2, 3]]
    assert moves.swap_in.tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize("field", ["swap_out", "swap_in"])
def test_an_executor_without_host_blocks_refuses_to_swap(field):
    state = BatchState(msgspec.structs.replace(INFO, num_host_blocks=0))
    with pytest.raises(ImpossibleDiff, match=f"{field}: this executor has no host blocks"):
        state.apply(step(0, 0, **{field: encoded_pairs([(0, 0)])}))


def test_a_new_epoch_empties_the_rows_and_tells_the_backend_once():
    state = admit_two()
    state.begin_epoch()
    state.begin_epoch()
    assert state.live_rows.size == 0
    assert state.digest() == BatchState(INFO).digest()
    diff = step(0, 5, scheduled_new_reqs=(new_request(1),), num_scheduled_tokens=encoded_pairs([(1, 5)]))
    assert state.apply(diff).batch.finished_rows.tolist() == [1, 4]
    assert state.apply(step(1, 1)).batch.finished_rows.size == 0


def test_rows_of_a_refused_diff_are_not_finished_at_the_backend():
    """A backend hears that exactly the rows it was given are gone, even if the refused diff had changed them."""
    state = admit_two()
    refused = step(1, 99, finished_rows=encode_column([1]), scheduled_new_reqs=(new_request(0),))
    with pytest.raises(ImpossibleDiff):
        state.apply(refused)
    state.begin_epoch()
    assert state.apply(step(0, 0)).batch.finished_rows.tolist() == [1, 4]


def test_the_arrays_of_a_batch_cannot_be_written():
    batch = admit_two().apply(step(1, 2)).batch
    for array in (batch.rows, batch.num_scheduled_tokens, batch.block_table):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


IMPOSSIBLE = {
    "finished_rows: row 6 is outside 0 to 5": {"finished_rows": encode_column([6])},
    "finished_rows: row -1 is outside 0 to 5": {"finished_rows": encode_column([-1])},
    "finished_rows: row 2 is not live": {"finished_rows": encode_column([1, 2])},
    "finished_rows: row 1 is listed twice": {"finished_rows": encode_column([1, 4, 1])},
    "finished_rows: 5 bytes are not a column": {"finished_rows": b"12345"},
    "new row 6 is outside 0 to 5": {"scheduled_new_reqs": (new_request(6),)},
    "new row -1 is outside 0 to 5": {"scheduled_new_reqs": (new_request(-1),)},
    "new row 4 is already live": {"scheduled_new_reqs": (new_request(4),)},
    "new row 0 is already live": {"scheduled_new_reqs": (new_request(0), new_request(0))},
    "new row 0 has 0 tokens; allowed: 1 to 30": {"scheduled_new_reqs": (new_request(0, 0),)},
    "new row 0 has 31 tokens; allowed: 1 to 30": {"scheduled_new_reqs": (new_request(0, 31),)},
    "new row 0: token id 100 is outside 0 to 99": {
        "scheduled_new_reqs": (new_request(0, token_ids=encode_column([3, 100])),)
    },
    "new row 0 has 6 prompt tokens of 5": {"scheduled_new_reqs": (new_request(0, num_prompt_tokens=6),)},
    "new row 0 has 0 prompt tokens of 5": {"scheduled_new_reqs": (new_request(0, num_prompt_tokens=0),)},
    "new row 0 has 5 computed of 5 tokens": {"scheduled_new_reqs": (new_request(0, num_computed_tokens=5),)},
    "new row 0 has -1 computed of 5 tokens": {"scheduled_new_reqs": (new_request(0, num_computed_tokens=-1),)},
    "new_blocks: block 40 is outside 0 to 39": {"new_blocks": encoded_pairs([(1, 40)])},
    "new_blocks: block -2 is outside 0 to 39": {"scheduled_new_reqs": (new_request(0, blocks=(1, -2)),)},
    "new_blocks: row 3 is not live": {"new_blocks": encoded_pairs([(3, 9)])},
    "new_blocks: row 17 is outside 0 to 5": {"new_blocks": encoded_pairs([(17, 9)])},
    "new_blocks: row 4 would exceed 9 blocks": {"new_blocks": encoded_pairs([(4, block) for block in range(7)])},
    "new_blocks: 12 bytes are not 2 columns": {"new_blocks": bytes(12)},
    "num_scheduled_tokens: row 0 is not live": {"num_scheduled_tokens": encoded_pairs([(0, 1)])},
    "num_scheduled_tokens: row 4 is listed twice": {"num_scheduled_tokens": encoded_pairs([(4, 1), (4, 2)])},
    "num_scheduled_tokens: count -1 is outside 0 to 30": {"num_scheduled_tokens": encoded_pairs([(4, -1)])},
    "row 4 is to run 4 tokens from 6 of 9": {"num_scheduled_tokens": encoded_pairs([(4, 4)])},
    "row 0 is to reach 5 tokens; its 1 blocks and max_model_len 30 allow 4": {
        "scheduled_new_reqs": (new_request(0, blocks=(9,)),),
        "num_scheduled_tokens": encoded_pairs([(0, 5)]),
    },
    "total_num_scheduled_tokens is 2; the rows add up to 1": {"num_scheduled_tokens": encoded_pairs([(1, 0)])},
    "block_copies: block 41 is outside 0 to 39": {"block_copies": encoded_pairs([(1, 41)])},
    "swap_out: device block 40 is outside 0 to 39": {"swap_out": encoded_pairs([(40, 1)])},
    "swap_in: device block 40 is outside 0 to 39": {"swap_in": encoded_pairs([(1, 40)])},
    "swap_in: host block -1 is outside 0 to 11": {"swap_in": encoded_pairs([(-1, 1)])},
    "swap_out: host block 12 is outside 0 to 11": {"swap_out": encoded_pairs([(1, 12)])},
    "swap_out: host block 3 is listed twice": {"swap_out": encoded_pairs([(1, 3), (2, 4), (5, 3)])},
    "swap_in: device block 5 is listed twice": {
        "swap_out": encoded_pairs([(1, 3)]),
        "swap_in": encoded_pairs([(3, 5), (3, 5)]),
    },
    "swap_in: host block 2 holds nothing that this epoch swapped out": {
        "swap_out": encoded_pairs([(1, 3)]),
        "swap_in": encoded_pairs([(3, 5), (2, 6)]),
    },
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_diffs_are_refused_and_end_the_epoch(message):
    state = admit_two()
    with pytest.raises(ImpossibleDiff) as refused:
        state.apply(step(1, 2, **IMPOSSIBLE[message]))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(ImpossibleDiff, match="the epoch was lost before"):
        state.apply(step(1, 2))
    state.begin_epoch()
    state.apply(step(0, 5, scheduled_new_reqs=(new_request(4),), num_scheduled_tokens=encoded_pairs([(4, 5)])))


def test_a_row_stops_at_the_context_length():
    state = BatchState(INFO)
    request = new_request(0, MAX_LEN, blocks=range(9))
    state.apply(step(0, MAX_LEN, scheduled_new_reqs=(request,), num_scheduled_tokens=encoded_pairs([(0, MAX_LEN)])))
    with pytest.raises(ImpossibleDiff, match="max_model_len 30"):
        state.apply(step(1, 1))


@dataclass
class ReferenceRow:
    num_tokens: int
    num_computed: int
    blocks: list[int] = field(default_factory=list)


class Reference:
    """The rules of the step protocol, row by row, as they read."""

    def __init__(self) -> None:
        self.rows: dict[int, ReferenceRow] = {}

    def apply(self, output: SchedulerOutput) -> list[tuple[int, int, int, int]]:
        for row in np.frombuffer(output.finished_rows, "<i4").tolist():
            del self.rows[row]
        for request in output.scheduled_new_reqs:
            self.rows[request.row] = ReferenceRow(len(request.token_ids) // 4, request.num_computed_tokens)
            self.rows[request.row].blocks = np.frombuffer(request.block_ids, "<i4").tolist()
        for row, block in np.frombuffer(output.new_blocks, "<i4").reshape(2, -1).T.tolist():
            self.rows[row].blocks.append(block)
        exceptions = dict(np.frombuffer(output.num_scheduled_tokens, "<i4").reshape(2, -1).T.tolist())
        ran = []
        for number in sorted(self.rows):
            row = self.rows[number]
            count = exceptions.get(number, 1)
            if not count:
                continue
            samples = int(row.num_computed + count == row.num_tokens)
            ran.append((number, count, row.num_computed, samples))
            row.num_computed += count
            row.num_tokens += samples
        return ran

    def digest(self) -> int:
        table = np.zeros((ROWS, 20), dtype=np.int32)
        for number, row in self.rows.items():
            table[number, : len(row.blocks)] = row.blocks
        live = sorted(self.rows)
        return state_digest(
            np.array(live, dtype=np.int32),
            np.array([self.rows[number].num_computed for number in live], dtype=np.int32),
            np.array([len(self.rows[number].blocks) for number in live], dtype=np.int32),
            table,
        )


def draw_step(data, reference: Reference, number: int) -> SchedulerOutput:
    """A valid diff against the reference's rows."""
    pick = data.draw
    at_the_end = {n for n, row in reference.rows.items() if row.num_computed >= MAX_LEN}
    finished = sorted(
        at_the_end | set(pick(st.sets(st.sampled_from(sorted(reference.rows) or [0])))) & set(reference.rows)
    )
    lengths = {n: row for n, row in reference.rows.items() if n not in finished}
    free = [row for row in range(ROWS) if row not in lengths]
    new_requests, new_blocks, exceptions, total = [], [], [], 0
    for row in pick(st.lists(st.sampled_from(free or [0]), unique=True)) if free else []:
        num_tokens = pick(st.integers(1, MAX_LEN))
        lengths[row] = ReferenceRow(num_tokens, pick(st.integers(0, num_tokens - 1)))
        blocks = pick(st.lists(st.integers(0, BLOCKS - 1), max_size=3))
        lengths[row].blocks = list(blocks)
        changes = {"num_computed_tokens": lengths[row].num_computed, "num_prompt_tokens": 1}
        new_requests.append(new_request(row, num_tokens, blocks=blocks, **changes))
    for number_, row in lengths.items():
        remaining = min(row.num_tokens, MAX_LEN) - row.num_computed
        count = pick(st.sampled_from([1, 1, 0, remaining, (remaining + 1) // 2]))
        total += count
        if count != 1 or pick(st.booleans()):
            exceptions.append((number_, count))
        missing = -(-(row.num_computed + count) // BLOCK_SIZE) - len(row.blocks)
        new_blocks += [(number_, pick(st.integers(0, BLOCKS - 1))) for _ in range(missing)]
    return step(
        number,
        total,
        finished_rows=encode_column(finished),
        scheduled_new_reqs=tuple(new_requests),
        new_blocks=encoded_pairs(pick(st.permutations(new_blocks))),
        num_scheduled_tokens=encoded_pairs(pick(st.permutations(exceptions))),
    )


@settings(max_examples=80)
@given(st.data())
def test_the_state_equals_a_plain_reference_over_random_diffs(data):
    state, reference = BatchState(INFO), Reference()
    for number in range(data.draw(st.integers(1, 12))):
        output = draw_step(data, reference, number)
        batch = state.apply(output).batch
        ran = zip(batch.rows, batch.num_scheduled_tokens, batch.num_computed_tokens, batch.samples, strict=True)
        assert [tuple(int(value) for value in row) for row in ran] == reference.apply(output)
        assert state.digest() == reference.digest()
        assert state.live_rows.tolist() == sorted(reference.rows)


@settings(max_examples=80)
@given(st.data())
def test_a_damaged_diff_is_refused_or_leaves_a_consistent_batch(data):
    """Whatever integers arrive: either ``ImpossibleDiff``, or rows within bounds covered by their blocks."""
    state, reference = BatchState(INFO), Reference()
    for number in range(3):
        output = draw_step(data, reference, number)
        state.apply(output)
        reference.apply(output)
    output = draw_step(data, reference, 3)
    name = data.draw(st.sampled_from(["finished_rows", "new_blocks", "num_scheduled_tokens", "swap_out", "swap_in"]))
    noise = data.draw(st.lists(st.one_of(st.integers(-3, 45), st.integers(-(1 << 31), (1 << 31) - 1)), max_size=6))
    damaged = msgspec.structs.replace(output, **{name: encode_column(noise)})
    try:
        batch, moves = state.apply(damaged)
    except ImpossibleDiff:
        return
    assert ((batch.rows >= 0) & (batch.rows < ROWS)).all()
    assert (np.diff(batch.rows) > 0).all()
    reached = batch.num_computed_tokens + batch.num_scheduled_tokens
    assert (batch.num_scheduled_tokens >= 1).all()
    assert (reached <= MAX_LEN).all()
    assert (batch.block_table[batch.rows] < BLOCKS).all()
    if moves is not None:
        assert ((moves.swap_out >= 0) & (moves.swap_out < [[BLOCKS], [HOST_BLOCKS]])).all()
        assert moves.swap_in.size == 0, "nothing has been swapped out before"
