"""Vectors on their way: what the core, the links, the executor's copy and a backend make of pooled requests."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from headway_executor.backend import BackendConfig, ModelFilesError, NewRow, StepBatch, StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.batch.diff_checks import ImpossibleDiff
from headway_executor.models.forward import ForwardPass
from headway_executor.models.sentence_pooling import default_pooling
from headway_executor.sampling.pooling import NOT_FINITE, PooledRows, whole_result, without
from headway_proto.adapters import RowAdapter
from headway_proto.columns import decode_floats, encode_column, encode_columns, encode_floats
from headway_proto.ingress import Submit, SubmitPooled
from headway_proto.pooling import NO_POOLING, POOL_CLS, POOL_LAST, POOL_MEAN, POOL_SCORE
from headway_proto.sampling import SamplingParams
from headway_proto.step import (
    ERRORED_ROW,
    ExecutorOutput,
    NewRequest,
    PooledOutput,
    PoolingOutput,
    RowError,
    RowVector,
    SchedulerOutput,
)
from headway_scheduler.core.admission.door import RequestRejected
from headway_scheduler.core.scheduler import Scheduler, StateMismatch
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.flight.recorder import _encodable
from headway_scheduler.gateways.submissions import new_request, problem_of
from step_columns import backend_info, encoded_pairs

CAPACITY = ExecutorCapacity(
    num_blocks=256, block_size=4, max_model_len=64, vocab_size=64, max_num_rows=16, num_host_blocks=64, embedding_size=2
)
VECTOR = encode_floats([0.5, -0.25])
CHUNKED = SchedulerLimits(max_num_batched_tokens=8, preemption="swap")


def request(handle: int, pooling: int = POOL_LAST, **changes: object) -> NewRequestEvent:
    new = NewRequestEvent(
        origin=Origin(0, handle),
        request_id=str(handle),
        token_ids=np.arange(20, dtype=np.int32),
        num_prompt_tokens=20,
        max_tokens=1,
        sampling=SamplingParams(),
        stop_token_ids=frozenset(),
        pooling=pooling,
    )
    return msgspec.structs.replace(new, **changes)


def answer(core: Scheduler, *vectors: RowVector, **fields: object) -> ExecutorOutput:
    step = core._epoch.in_flight[0]
    sampled = encode_column([9] * len(step.sampling_rows))
    return PooledOutput(
        epoch=core.epoch,
        step=step.step,
        sampled_token_ids=sampled,
        state_digest=step.digest,
        vectors=vectors,
        **fields,
    )


def step_of(core: Scheduler) -> SchedulerOutput:
    output = core.schedule(now=0.0)
    assert output is not None
    return output


# ------------------------------------------------------------------------------------------------------------- the core


def test_a_vector_comes_with_the_step_that_ends_its_prompt() -> None:
    core = Scheduler(CHUNKED, CAPACITY)
    core.add_request(request(0, POOL_MEAN), now=0.0)
    first = step_of(core)
    assert isinstance(first, PoolingOutput)
    assert first.pooled == encode_columns(np.array([[0], [POOL_MEAN]], dtype=np.int32))
    for _ in range(2):
        assert core.update(answer(core), now=0.0).vectors == ()
        assert type(step_of(core)) is SchedulerOutput
    events = core.update(answer(core, RowVector(0, VECTOR)), now=0.0)
    assert [(event.origin.handle, event.values) for event in events.vectors] == [(0, VECTOR)]
    assert [end.num_output_tokens for end in events.finished] == [1]
    assert core.num_unfinished == 0


def test_a_step_has_pooled_rows_and_adapters_at_once() -> None:
    limits = msgspec.structs.replace(CHUNKED, max_num_batched_tokens=80)
    core = Scheduler(limits, msgspec.structs.replace(CAPACITY, supports_adapters=True))
    core.add_request(request(0), now=0.0)
    core.add_request(request(1, adapter="a"), now=0.0)
    core.add_request(request(2, NO_POOLING, adapter="b"), now=0.0)
    output = step_of(core)
    assert isinstance(output, PoolingOutput)
    assert output.pooled == encode_columns(np.array([[0, 1], [POOL_LAST] * 2], dtype=np.int32))
    assert output.adapters == (RowAdapter(1, "a"), RowAdapter(2, "b"))
    info = msgspec.structs.replace(INFO, supports_adapters=True)
    rows = BatchState(info).apply(output).batch.new_rows
    assert [(row.pooling, row.adapter) for row in rows] == [(POOL_LAST, ""), (POOL_LAST, "a"), (NO_POOLING, "b")]
    with pytest.raises(ImpossibleDiff, match="this executor takes none"):
        BatchState(INFO).apply(output)


@pytest.mark.parametrize(("pooling", "num_cached"), [(POOL_LAST, 16), (POOL_MEAN, 0), (POOL_CLS, 0)])
def test_only_the_last_hidden_state_may_stand_behind_a_cached_prefix(pooling: int, num_cached: int) -> None:
    core = Scheduler(SchedulerLimits(), CAPACITY)
    core.add_request(request(0), now=0.0)
    step_of(core)
    core.update(answer(core, RowVector(0, VECTOR)), now=0.0)
    core.add_request(request(1, pooling), now=0.0)
    assert step_of(core).scheduled_new_reqs[0].num_computed_tokens == num_cached


@pytest.mark.parametrize(("pooling", "start"), [(POOL_LAST, 8), (POOL_MEAN, 0), (POOL_CLS, 0)])
def test_after_a_preemption_only_the_last_hidden_state_needs_no_more_than_the_rest(pooling: int, start: int) -> None:
    core = Scheduler(CHUNKED, CAPACITY)
    core.add_request(request(0, pooling), now=0.0)
    step_of(core)
    core.update(answer(core), now=0.0)
    core.add_request(request(1, pooling, token_ids=np.arange(40, 60, dtype=np.int32)), now=0.0)
    core.run_alone(Origin(0, 1))
    step_of(core)  # preempts the first and starts the second
    assert core.find(Origin(0, 0)).num_preemptions == 1
    core.abort(Origin(0, 1))
    core.run_alone(None)
    core.update(answer(core), now=0.0)
    (again,) = step_of(core).scheduled_new_reqs
    assert again.num_computed_tokens == start


def test_a_request_that_failed_or_was_aborted_gets_no_vector() -> None:
    core = Scheduler(SchedulerLimits(), CAPACITY)
    core.add_request(request(0), now=0.0)
    core.add_request(request(1), now=0.0)
    core.add_request(request(2), now=0.0)
    step_of(core)
    core.abort(Origin(0, 2))
    rows = [chunk.row for chunk in core._epoch.in_flight[0].chunks]
    vectors = [RowVector(row, VECTOR) for row in (rows[0], rows[2])]
    events = core.update(answer(core, *vectors, errors=(RowError(rows[1], "NaN"),)), now=0.0)
    assert [event.origin.handle for event in events.vectors] == [0]
    assert [(end.origin.handle, end.error) for end in events.finished] == [(1, "NaN"), (0, "")]


@pytest.mark.parametrize("wrong", [RowVector(1, VECTOR), RowVector(-1, VECTOR)])
def test_a_vector_of_a_row_without_an_end_is_a_mismatch(wrong: RowVector) -> None:
    core = Scheduler(SchedulerLimits(), CAPACITY)
    core.add_request(request(0), now=0.0)
    core.add_request(request(1, 0, max_tokens=4), now=0.0)
    step_of(core)
    with pytest.raises(StateMismatch, match="which ended no prompt to pool"):
        core.update(answer(core, wrong), now=0.0)


def test_an_executor_that_lacks_what_a_request_needs_refuses_it() -> None:
    without_vectors = msgspec.structs.replace(CAPACITY, embedding_size=0)
    with pytest.raises(RequestRejected, match="the executor makes no vectors"):
        Scheduler(SchedulerLimits(), without_vectors).add_request(request(0), now=0.0)
    encoder = msgspec.structs.replace(CAPACITY, generates=False)
    with pytest.raises(RequestRejected, match="makes vectors and no text"):
        Scheduler(SchedulerLimits(), encoder).add_request(request(0, 0), now=0.0)
    with pytest.raises(RequestRejected, match="has no head that scores pairs"):
        Scheduler(SchedulerLimits(), encoder).add_request(request(0, POOL_SCORE), now=0.0)
    reranker = msgspec.structs.replace(encoder, default_pooling=POOL_SCORE)
    with pytest.raises(RequestRejected, match="scores pairs and makes no vectors"):
        Scheduler(SchedulerLimits(), reranker).add_request(request(0), now=0.0)
    Scheduler(SchedulerLimits(), reranker).add_request(request(0, POOL_SCORE), now=0.0)


def test_a_record_of_a_flight_has_no_vectors() -> None:
    output = PooledOutput(epoch=1, step=2, sampled_token_ids=encode_column([0]), vectors=(RowVector(0, VECTOR),))
    record = _encodable((0.0, output, ()))
    assert record.output == ExecutorOutput(epoch=1, step=2, sampled_token_ids=encode_column([0]))
    assert type(record.output) is ExecutorOutput


# --------------------------------------------------------------------------------------------------------- submissions

SUBMIT = Submit(
    handle=1,
    request_id="a",
    index=0,
    token_ids=encode_column([5, 6]),
    num_prompt_tokens=2,
    max_tokens=1,
    sampling=SamplingParams(),
)


def pooled_submit(**changes: object) -> SubmitPooled:
    fields = {name: getattr(SUBMIT, name) for name in SUBMIT.__struct_fields__}
    return SubmitPooled(**fields | {"pooling": POOL_MEAN} | changes)


def test_a_submission_becomes_a_request_that_is_pooled() -> None:
    assert problem_of(pooled_submit(), 64) is None
    assert new_request(0, pooled_submit(), (), "").pooling == POOL_MEAN
    assert new_request(0, SUBMIT, (), "").pooling == 0


@pytest.mark.parametrize(("changes", "field"), [({"pooling": 5}, "pooling"), ({"max_tokens": 2}, "max_tokens")])
def test_a_wrong_submission_is_refused(changes: dict[str, int], field: str) -> None:
    problem = problem_of(pooled_submit(**changes), 64)
    assert problem is not None
    assert problem.field == field


# ---------------------------------------------------------------------------------------------- the executor's copy

INFO = msgspec.structs.replace(backend_info(num_blocks=40), embedding_size=2)


def pooling_step(pooled: list[tuple[int, int]], num_computed: int = 0) -> PoolingOutput:
    new = NewRequest(
        row=1,
        token_ids=encode_column(range(8)),
        num_prompt_tokens=8,
        block_ids=encode_column([3, 4]),
        num_computed_tokens=num_computed,
        sampling=SamplingParams(),
    )
    return PoolingOutput(
        epoch=1,
        step=0,
        scheduled_new_reqs=(new,),
        num_scheduled_tokens=encoded_pairs([(1, 8 - num_computed)]),
        total_num_scheduled_tokens=8 - num_computed,
        pooled=encoded_pairs(pooled),
    )


def test_a_new_row_gets_its_pooling() -> None:
    (new,) = BatchState(INFO).apply(pooling_step([(1, POOL_LAST)], 4)).batch.new_rows
    assert new.pooling == POOL_LAST


@pytest.mark.parametrize(
    ("pooled", "num_computed", "words"),
    [
        ([(2, POOL_LAST)], 0, "row 2 is not new"),
        ([(1, 9)], 0, "row 1 has the unknown pooling 9"),
        ([(1, POOL_LAST), (1, POOL_LAST)], 0, "row 1 is listed twice"),
        ([(1, POOL_MEAN)], 4, "row 1 needs every token, but begins at 4"),
        ([(1, POOL_CLS)], 4, "row 1 needs every token, but begins at 4"),
        ([(1, POOL_SCORE)], 0, "row 1 has the pooling 4, which this executor has not"),
    ],
)
def test_an_impossible_pooling_is_refused(pooled: list[tuple[int, int]], num_computed: int, words: str) -> None:
    with pytest.raises(ImpossibleDiff, match=words):
        BatchState(INFO).apply(pooling_step(pooled, num_computed))


def test_an_executor_without_vectors_gets_none_to_make() -> None:
    with pytest.raises(ImpossibleDiff, match="makes no vectors"):
        BatchState(backend_info(num_blocks=40)).apply(pooling_step([(1, POOL_LAST)]))


# --------------------------------------------------------------------------------------------------------- a backend


class _Places(ForwardPass):
    """A pass whose hidden state is (row, position)."""

    def __init__(self) -> None:
        self.num_passes = 0

    def hidden(self, rows, token_ids):
        self.num_passes += 1
        places, positions = rows.token_places()
        return torch.from_numpy(np.stack([rows.numbers[places], positions], 1)[rows.wanted]).float()


def batch(*rows: tuple[int, int, int, int], new: tuple[NewRow, ...] = (), **fields: object) -> StepBatch:
    """Rows are (row, first position, tokens, samples)."""
    columns = np.array(rows, dtype=np.int32).reshape(-1, 4).T
    none = np.empty(0, dtype=np.int32)
    values = {
        "step": 0,
        "finished_rows": none,
        "new_rows": new,
        "new_blocks": none.reshape(2, 0),
        "rows": columns[0],
        "num_computed_tokens": columns[1],
        "num_scheduled_tokens": columns[2],
        "samples": columns[3],
        "block_table": np.zeros((8, 4), dtype=np.int32),
    }
    return StepBatch(**values | fields)


def new_row(row: int, pooling: int, num_tokens: int = 6) -> NewRow:
    return NewRow(
        row=row,
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        sampling=SamplingParams(),
        pooling=pooling,
    )


def take(pooled: PooledRows, step: StepBatch, refused: dict[int, str] | None = None):
    pooled.begin_step(step)
    part = pooled.part_of(step)
    assert part is not None
    vectors, errors = pooled.run(part, _Places(), torch.zeros(8, 8), refused or {})
    return [(entry.row, decode_floats(entry.values).tolist()) for entry in vectors], errors


def test_chunks_add_up_and_a_row_that_is_new_again_begins_anew() -> None:
    pooled = PooledRows()
    new = (new_row(1, POOL_MEAN), new_row(3, POOL_LAST), new_row(4, POOL_CLS))
    assert take(pooled, batch((1, 0, 4, 0), (2, 9, 1, 1), (3, 0, 4, 0), (4, 0, 5, 0), new=new)) == ([], ())
    # Row 1 was preempted: what it had does not count.
    step = batch((1, 0, 6, 1), (3, 4, 2, 1), (4, 5, 1, 1), new=(new_row(1, POOL_MEAN),))
    assert take(pooled, step) == ([(1, [1.0, 2.5]), (3, [3.0, 5.0]), (4, [4.0, 0.0])], ())
    finished = batch((2, 10, 1, 1), finished_rows=np.array([1, 3, 4], dtype=np.int32))
    pooled.begin_step(finished)
    assert pooled.part_of(finished) is None


def test_what_is_not_finite_or_refused_is_an_error() -> None:
    pooled = PooledRows()
    pooled.begin_step(batch(new=(new_row(1, POOL_LAST), new_row(2, POOL_LAST))))
    step = batch((1, 0, 6, 1), (2, 0, 6, 1))
    part = pooled.part_of(step)
    assert part is not None

    class Nan(_Places):
        def hidden(self, rows, token_ids):
            return super().hidden(rows, token_ids) * torch.tensor([1.0, np.nan])

    vectors, errors = pooled.run(part, Nan(), torch.zeros(8, 8), {2: "refused"})
    assert vectors == ()
    assert errors == (RowError(1, NOT_FINITE), RowError(2, "refused"))
    rest = without(step, part)
    result = whole_result(rest, StepResult(sampled_token_ids=np.empty(0, np.int32)), part, vectors, errors)
    assert result.sampled_token_ids.tolist() == [ERRORED_ROW, ERRORED_ROW]


def test_results_stand_in_the_order_of_rows_even_if_some_speculated() -> None:
    pooled = PooledRows()
    pooled.begin_step(batch(new=(new_row(2, POOL_LAST), new_row(5, POOL_LAST))))
    step = batch((1, 9, 1, 1), (2, 0, 6, 1), (4, 9, 1, 1), (5, 0, 3, 0), num_speculative_tokens=np.array([2, 0, 0, 0]))
    part = pooled.part_of(step)
    assert part is not None
    rest = without(step, part)
    assert (rest.rows.tolist(), rest.num_speculative_tokens.tolist()) == ([1, 4], [2, 0])
    accepted = np.array([[1], [2], [1]], dtype=np.int32)
    result = StepResult(sampled_token_ids=np.array([11, 12, 14], np.int32), accepted_tokens=accepted)
    vectors = (RowVector(2, VECTOR),)
    joined = whole_result(rest, result, part, vectors, ())
    assert joined.sampled_token_ids.tolist() == [11, 12, 0, 14]
    assert joined.vectors == vectors


def test_the_simulated_backend_makes_a_vector_of_the_tokens() -> None:
    backend = SimulatedBackend()
    info = backend.open(BackendConfig(model="x", num_kv_blocks=256, max_num_seqs=8, options={"real_time": "false"}))
    rows = tuple(new_row(row, pooling) for row, pooling in ((1, POOL_LAST), (2, POOL_MEAN), (3, POOL_CLS)))
    result = backend.execute(batch((1, 0, 6, 1), (2, 0, 6, 1), (3, 0, 4, 0), new=rows))
    vectors = {entry.row: decode_floats(entry.values) for entry in result.vectors}
    assert sorted(vectors) == [1, 2]
    assert all(len(vector) == info.embedding_size for vector in vectors.values())
    assert not np.array_equal(vectors[1], vectors[2])


def test_hidden_states_that_are_projected_for_the_head_make_no_vectors(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "opt-350m")
    backend = TorchBackend()
    assert backend.open(BackendConfig(model=str(tmp_path), num_kv_blocks=64)).embedding_size == 0
    backend.close()


@pytest.mark.parametrize("kernels", ["auto", "eager"])
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"opt-350m"}))
def test_the_hidden_states_of_every_family_are_those_of_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    """Behind the final norm, before what comes between it and the logits; in chunks, last and mean together."""
    model = make_checkpoint(tmp_path, name)
    backend = TorchBackend()
    config = {"dtype": "float32", "max_num_seqs": 8, "num_kv_blocks": 16, "block_size": 8, "max_model_len": 64}
    info = backend.open(BackendConfig(model=str(tmp_path), options={"kernels": kernels}, **config))
    token_ids = np.random.default_rng(4).integers(3, VOCAB_SIZE, size=20).astype(np.int32)
    new = tuple(
        msgspec.structs.replace(new_row(row, pooling, 20), token_ids=token_ids)
        for row, pooling in ((1, POOL_LAST), (2, POOL_MEAN))
    )
    blocks = np.array([[1] * 3 + [2] * 3, range(6)], dtype=np.int32)
    table = np.zeros((8, 9), dtype=np.int32)
    table[1, :3], table[2, :3] = range(3), range(3, 6)
    fields = {"new_blocks": blocks, "block_table": table}
    assert backend.execute(batch((1, 0, 12, 0), (2, 0, 7, 0), new=new, **fields)).vectors == ()
    result = backend.execute(batch((1, 12, 8, 1), (2, 7, 13, 1), **fields))
    backend.close()
    with torch.no_grad():
        base = getattr(model, model.base_model_prefix, None) or model.model  # Llama 4 names another
        states = base(torch.from_numpy(token_ids[None]).long()).last_hidden_state[0].double()
    for entry, expected in zip(result.vectors, (states[-1], states.mean(0)), strict=True):
        vector = decode_floats(entry.values)
        assert len(vector) == info.embedding_size
        length = float(expected.norm())
        assert (vector / length).tolist() == pytest.approx((expected / length).tolist(), abs=1e-5)


# ---------------------------------------------------------------------------------------- what a checkpoint asks for


def sentence_model(directory: Path, *kinds: str, pooling: object = None) -> Path:
    modules = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else "", "type": f"a.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_bytes(msgspec.json.encode(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_bytes(msgspec.json.encode(pooling))
    return directory


@pytest.mark.parametrize(
    ("kinds", "pooling", "expected"),
    [
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, POOL_MEAN),
        (("Transformer", "Pooling", "Normalize"), {"pooling_mode_lasttoken": True}, POOL_LAST),
        (("Transformer", "Pooling"), {"pooling_mode": "cls"}, POOL_CLS),
        (("Transformer", "Pooling"), {"pooling_mode": "max"}, 0),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, 0),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, 0),
    ],
)
def test_the_pooling_of_a_checkpoint(tmp_path: Path, kinds: tuple[str, ...], pooling: object, expected: int) -> None:
    assert default_pooling(sentence_model(tmp_path, *kinds, pooling=pooling), POOL_CLS) == expected


def test_a_checkpoint_without_modules_has_the_usual_one_and_a_damaged_file_is_refused(tmp_path: Path) -> None:
    assert default_pooling(tmp_path, POOL_LAST) == POOL_LAST
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"modules.json: not a list of modules"):
        default_pooling(tmp_path, POOL_LAST)
    (tmp_path / "modules.json").write_text('[{"type": "a.Pooling", "path": "../x"}]')
    with pytest.raises(ModelFilesError, match="allowed: a folder of the checkpoint"):
        default_pooling(tmp_path, POOL_LAST)
