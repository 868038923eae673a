"""Speculation on the triton backend, its kernels interpreted: the same tokens, to the bit where decodes have the same bits."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import make_checkpoint
from headway_executor.backend import BackendConfig, NewRow, StepBatch
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu.draft import DeviceDraftPass
from headway_executor.gpu.host_tokens import HostTokens
from headway_executor.gpu.speculation import DeviceSpeculation, most_rows_of
from headway_executor.models.forward import StepRows
from headway_executor.sampling.speculation.verification import as_rows_of_one_token, asked_of, with_proposals
from headway_proto.sampling import SamplingParams
from speculative_engine import GREEDY, SpeculativeEngine, write_first_layers
from step_columns import NO_PAIRS

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted; on a device, the conformance suite runs"),
]
NUM_OUTPUT = 4
SETTINGS = {"max_num_seqs": 4, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 64, "max_num_batched_tokens": 64}
PROMPTS = [[3, 8, 4], [250, 17, 250, 17, 250]]


def varied(place):
    return (
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.9, seed=5, top_k=20, repetition_penalty=1.3, logprobs=0),
        SamplingParams(temperature=0.0, logprobs=1),
    )[place % 3]


class Guesses:
    """Proposes the same tokens again and again."""

    def propose(self, asked, token_ids):
        for row, num_tokens, limit in zip(*(part.tolist() for part in (asked.numbers, asked.num_tokens, asked.limits)), strict=True):  # fmt: skip
            token_ids[row, num_tokens : num_tokens + limit] = 7
        return asked.limits


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    make_checkpoint(directory, "llama3")
    return directory


def engine(directory, speculation, draft="", **changes):
    config = {"dtype": "float32", "num_speculative_tokens": 3} | SETTINGS | changes
    asked = BackendConfig(model=str(directory), speculation=speculation, draft_model=str(draft or ""), **config)
    backend = TritonBackend()
    return backend, SpeculativeEngine(asked, backend=backend, clock=lambda: 0.0, always=True)


def told(engine):
    return [[msgspec.structs.astuple(entry)[1:] for entry in entries] for entries in engine.logprobs.values()]


def outputs(engine, sampling, *, speculates, prompts=PROMPTS, num_output=NUM_OUTPUT):
    return engine.run(prompts, num_output, speculates=speculates, sampling=sampling), told(engine)


def agree(found, expected, dtype):
    if dtype == "bfloat16":
        assert found == expected
        return
    assert found[0] == expected[0]
    values = [[entry[0] for row in rows for entry in row] for rows in (found[1], expected[1])]
    assert values[0] == pytest.approx(values[1], abs=1e-4)


def test_a_draft_that_is_the_model_itself_is_always_right(model):
    """So its keys and values are complete, whatever was verified before; in bfloat16, each log probability has the same bits."""
    _, drafting = engine(model, "draft", model, dtype="bfloat16")
    alone = outputs(drafting, varied, speculates=False)
    assert outputs(drafting, varied, speculates=True) == alone
    counters = drafting.counters()
    assert counters.num_draft_tokens == counters.num_accepted_tokens > 3


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.deep), "bfloat16"])
def test_proposals_from_the_text_change_no_bit(model, dtype):
    """Wrong ones, and right ones, with a bias that lets the text go round in a circle.

    In float32 no token: there torch multiplies, and may round a row differently in a step of another size.
    """
    backend, looking = engine(model, "ngram", dtype=dtype)
    proposer = backend._model._steps._speculation.proposer
    lookup, proposer._lookup = proposer._lookup, Guesses()
    alone = outputs(looking, lambda _: GREEDY, speculates=False)
    sizes = []
    target = backend._model.parts.target
    target.sizes = target.step_sizes(recorded=True)
    original = target.launch
    target.launch = lambda size, batch: (sizes.append(size), original(size, batch))
    agree(outputs(looking, lambda _: GREEDY, speculates=True), alone, dtype)
    assert looking.counters().num_draft_tokens > 5
    # Rows with proposals run in graphs of decodes, with the draws inside.
    verified = [size for size in sizes if size.num_tokens > len(PROMPTS) and not size.has_chunks]
    assert verified
    assert {*verified} <= {*target.sizes.recorded()}
    assert all(size.draws for size in verified)

    proposer._lookup = lookup

    def circles(place):
        return SamplingParams(temperature=0.0, logit_bias=((5 + place, 100.0),), frequency_penalty=0.2, logprobs=0)

    one = {"prompts": PROMPTS[:1], "num_output": 7}
    alone = outputs(looking, circles, speculates=False, **one)
    agree(outputs(looking, circles, speculates=True, **one), alone, dtype)
    assert looking.counters().num_accepted_tokens > 0


@pytest.mark.deep
def test_a_draft_that_is_often_wrong_changes_no_token(model, tmp_path):
    draft = write_first_layers(model, tmp_path / "draft", 1)
    _, drafting = engine(model, "draft", draft)
    alone = drafting.run(PROMPTS, 16, speculates=False, sampling=varied)
    assert drafting.run(PROMPTS, 16, speculates=True, sampling=varied) == alone
    counters = drafting.counters()
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def column(values):
    return np.array(values, dtype=np.int32)


def step(rows, counts, computed, samples, allowed):
    return StepBatch(
        step=0,
        finished_rows=column([]),
        new_rows=(),
        new_blocks=NO_PAIRS,
        rows=column(rows),
        num_scheduled_tokens=column(counts),
        num_computed_tokens=column(computed),
        samples=column(samples),
        block_table=np.zeros((10, 9), dtype=np.int32),
        num_speculative_tokens=column(allowed),
    )


@st.composite
def steps(draw):
    """Decodes, some of which may have proposals, and chunks, of which some end their prompt."""
    rows = sorted(draw(st.sets(st.integers(0, 9), min_size=1)))
    kinds = [draw(st.sampled_from(["speculates", "decodes", "ends", "goes on"])) for _ in rows]
    counts = [1 if kind in {"speculates", "decodes"} else draw(st.integers(1, 5)) for kind in kinds]
    computed = [draw(st.integers(1, 20)) for _ in rows]
    allowed = [draw(st.integers(1, 4)) if kind == "speculates" else 0 for kind in kinds]
    batch = step(rows, counts, computed, [int(kind != "goes on") for kind in kinds], allowed)
    return batch, np.array([draw(st.integers(0, count)) for count in allowed if count], dtype=np.int64)


@given(steps())
def test_rows_of_one_token_are_the_step_with_its_proposals(asked_and_counts):
    batch, counts = asked_and_counts
    asked = asked_of(batch, batch.num_speculative_tokens, frozenset())
    rows, draws = as_rows_of_one_token(batch, asked, counts)
    together, expected = with_proposals(batch, asked, counts)
    for name in ("numbers", "positions", "places"):
        assert getattr(draws, name).tolist() == getattr(expected, name).tolist()
    tokens = [
        (row, first + i)
        for row, first, count in zip(
            rows.rows.tolist(), rows.num_computed_tokens.tolist(), rows.num_scheduled_tokens.tolist(), strict=True
        )
        for i in range(count)
    ]
    places, positions = together.token_places()
    assert tokens == list(zip(together.numbers[places].tolist(), positions.tolist(), strict=True))
    # Only rows that run several tokens of their own do so.
    assert (rows.num_scheduled_tokens > 1).sum() == (batch.num_scheduled_tokens > 1).sum()


class Eager:
    """Proposes as much as it may."""

    def propose(self, asked):
        self.limits = asked.limits.tolist()
        return asked.limits, lambda: np.zeros(int(asked.limits.sum()), dtype=np.int32)


@pytest.mark.parametrize(("most_rows", "most_tokens", "limits"), [(9, 64, [3, 2]), (99, 7, [1, 0]), (4, 64, [0, 0])])
def test_a_step_has_no_more_proposals_than_there_is_room_for(most_rows, most_tokens, limits):
    proposer = Eager()
    speculation = DeviceSpeculation(proposer, most_rows=most_rows, most_tokens=most_tokens)
    found = speculation.propose(step([0, 1, 2, 5], [1, 1, 3, 1], [4] * 4, [1, 1, 0, 1], [3, 0, 0, 3]), frozenset())
    assert proposer.limits == limits
    assert len(found.batch.rows) == 4 + sum(limits)


def test_a_backend_takes_memory_for_so_many_rows():
    assert most_rows_of(256, 2048, 0) == 256
    assert most_rows_of(4, 2048, 8) == 36
    assert most_rows_of(256, 2048, 8) == 512
    assert most_rows_of(256, 300, 8) == 300
    assert most_rows_of(65_500, 1 << 20, 8) == 65_535


class Reached:
    """A mark that tells when it is waited for."""

    def __init__(self, waited):
        self.wait = lambda: waited.append(self)


def test_tokens_on_the_host_follow_those_of_the_device_in_order():
    """A row may change hands while draws of its last owner are still under way."""
    tokens, waited = HostTokens(4, 20), []

    def new(row, token_ids):
        sampling = SamplingParams()
        return NewRow(
            row=row, token_ids=column(token_ids), num_prompt_tokens=1, num_computed_tokens=0, sampling=sampling
        )

    def draw(rows, computed, drawn):
        batch = step(rows, [1] * len(rows), computed, [1] * len(rows), [0] * len(rows))
        tokens.draw(batch, lambda: column(drawn), Reached(waited))

    tokens.add_rows((new(1, [5, 6]),))
    draw([1, 3], [1, 7], [8, -1])
    tokens.add_rows((new(1, [9]),))
    assert not waited
    tokens.catch_up()
    assert len(waited) == 1
    assert tokens.token_ids[1, :3].tolist() == [9, 6, 8]
    assert tokens.token_ids[3, 8] == 0
    tokens.write(column([2, 0]), column([3, 4]), column([11, -1]))
    tokens.catch_up()
    assert (tokens.token_ids[2, 3], tokens.token_ids[0, 4]) == (11, 0)
    for number in range(40):
        draw([0], [number % 10], [number])
    # Without anyone who asks, it does not fall behind without end.
    assert len(waited) == 1 + 40 - 16


def test_a_draft_that_has_much_to_catch_up_with_runs_in_several_steps():
    launched = []

    class Pass(DeviceDraftPass):
        def _launch(self, batch, token_ids):
            launched.append([column.tolist() for column in (batch.rows, batch.num_scheduled_tokens, batch.num_computed_tokens, batch.samples)])  # fmt: skip

    rows = StepRows(
        np.array([2, 4, 5]), np.array([7, 1, 4]), np.array([0, 30, 9]), np.zeros((3, 1), np.int32), np.zeros(3)
    )
    drawn = Pass(None, None, None, most_tokens=5)(rows, torch.zeros(1))
    assert launched == [
        [[2], [5], [0], [0]],
        [[2, 4, 5], [2, 1, 2], [5, 30, 9], [1, 1, 0]],
        [[5], [2], [11], [1]],
    ]
    assert drawn.tolist() == [0, 0, 0]
