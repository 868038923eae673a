"""Constrained rows beside the forward pass: masks in time; a row without one fails alone."""

import ctypes
import json
import threading
import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from headway_executor.sampling.constraints import rows as constrained
from headway_executor.sampling.constraints.lanes import Lane, Task
from headway_executor.sampling.constraints.rows import ConstrainedRows, compiler_for
from headway_executor.sampling.sampler import BAD_LOGITS, Sampler
from headway_proto.grammars import GrammarCompiler, Matcher
from headway_proto.sampling import Constraint, SamplingParams
from headway_proto.step import ERRORED_ROW
from model_core import demo_model

ENCODER = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
A, B, C = (ENCODER.encode(letter).ids[0] for letter in "abc")
END = 0
NO_TOKENS = np.zeros(0, dtype=np.int32)


def column(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def rows():
    with_demo = ConstrainedRows(compiler_for(demo_model(), vocab_size=4096, eos_token_ids=(0, 2)))
    yield with_demo
    with_demo.close()


def allowed(masks) -> list[set[int]]:
    return [set(np.flatnonzero(np.unpackbits(one.view(np.uint8), bitorder="little")).tolist()) for one in masks.words]


def test_rows_go_on_by_what_was_drawn_for_them(rows) -> None:
    rows.add(3, Constraint("regex", "ab|cc"), NO_TOKENS)
    rows.add(5, None, NO_TOKENS)
    rows.add(6, Constraint("regex", "[bc]a"), NO_TOKENS)
    first = rows.masks(column(3, 5, 6))
    assert first.places.tolist() == [0, 2]
    assert {A, C} < allowed(first)[0]
    assert B in allowed(first)[1]
    first.advance(column(A, B, ERRORED_ROW))
    second = rows.masks(column(3, 6))
    assert second.places.tolist() == [0, 1]
    assert allowed(second) == [{B}, allowed(first)[1]]
    assert second.only.tolist() == [B, -1]
    second.advance(column(B, C))
    assert allowed(rows.masks(column(3)))[0] == {0, 2}
    assert rows.masks(column(6)).only.tolist() == [A]


def test_a_row_that_comes_with_output_goes_on_behind_it(rows) -> None:
    rows.add(0, Constraint("choice", '["abc", "acb"]'), column(A, C))
    assert rows.masks(column(0)).only.tolist() == [B]


def test_a_row_number_is_its_new_owners(rows) -> None:
    rows.add(0, Constraint("regex", "a"), NO_TOKENS)
    masks = rows.masks(column(0))
    rows.forget(column(0))
    rows.add(0, Constraint("regex", "b"), NO_TOKENS)
    masks.advance(column(A))
    assert rows.masks(column(0)).only.tolist() == [B]
    rows.forget(column(0))
    assert len(rows.masks(column(0))) == 0


@pytest.mark.parametrize(
    ("constraint", "output", "reason"),
    [
        (Constraint("regex", "("), NO_TOKENS, "unclosed group"),
        (Constraint("regex", "a+"), column(A, B), "the output does not follow its constraint"),
    ],
)
def test_a_row_whose_constraint_cannot_be_followed_fails_alone(rows, constraint, output, reason) -> None:
    rows.add(1, constraint, output)
    rows.add(2, Constraint("regex", "a"), NO_TOKENS)
    masks = rows.masks(column(1, 2))
    assert reason in masks.failures[1]
    assert masks.places.tolist() == [1]
    assert masks.only.tolist() == [A]


def test_a_dead_end_is_that_rows_failure() -> None:
    tokenizer = Tokenizer(models.BPE({"<end>": 0, "a": 1, "b": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    rows = ConstrainedRows(GrammarCompiler(tokenizer.to_str(), vocab_size=3, eos_token_ids=(0,)))
    rows.add(0, Constraint("regex", "az|b"), NO_TOKENS)
    rows.add(1, Constraint("regex", "ab"), NO_TOKENS)
    rows.masks(column(0, 1)).advance(column(1, 1))
    masks = rows.masks(column(0, 1))
    assert "no token of the model continues" in masks.failures[0]
    assert masks.only.tolist() == [2]
    rows.close()


def test_without_a_tokenizer_no_row_can_be_constrained(tmp_path) -> None:
    rows = ConstrainedRows(compiler_for(tmp_path, vocab_size=10, eos_token_ids=(0,)))
    assert not rows.is_supported
    rows.add(0, Constraint("regex", "a"), NO_TOKENS)
    assert rows.masks(column(0)).failures == {0: "this executor cannot follow a constraint"}


def test_a_grammar_is_compiled_once_for_all_its_rows(rows, monkeypatch) -> None:
    compiled = []
    original = GrammarCompiler.compile
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, one: compiled.append(one) or original(self, one))
    for row in range(4):
        rows.add(row, Constraint("regex", "a" if row < 3 else "b"), NO_TOKENS)
    rows.masks(column(0, 1, 2, 3))
    assert [one.text for one in compiled] == ["a", "b"]


@pytest.mark.parametrize(("name", "most"), [("_MOST_GRAMMARS", 2), ("_MOST_CHARACTERS", 5)])
def test_the_grammars_of_late_are_kept_within_bounds(rows, monkeypatch, name, most) -> None:
    monkeypatch.setattr(constrained, name, most)
    compiled = []
    original = GrammarCompiler.compile
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, one: compiled.append(one.text) or original(self, one))
    for text in ("aa", "bb", "aa", "cc", "aa", "bb"):
        rows.add(0, Constraint("regex", text), NO_TOKENS)
        rows.masks(column(0))
    assert compiled == ["aa", "bb", "cc", "bb"]


def work_until(done: threading.Event) -> None:
    """Keep the processor busy."""
    deadline = time.monotonic() + 30
    while not done.is_set() and time.monotonic() < deadline:
        sum(range(100))


def test_time_on_the_clock_fails_no_row(rows, monkeypatch) -> None:
    """A machine that stands still for a while: nothing is known of the constraint that was compiled just then."""
    monkeypatch.setattr(constrained, "PATIENCE_S", 0.1)
    original = GrammarCompiler.compile

    def compile_late(self, constraint):
        time.sleep(0.5)
        return original(self, constraint)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_late)
    rows.add(0, Constraint("regex", "ab"), column(A))
    masks = rows.masks(column(0))
    assert masks.failures == {}
    assert masks.only.tolist() == [B]


def test_whoever_the_thread_is_stuck_with_fails_alone(rows, monkeypatch) -> None:
    """A compile that never ends, then a mask: those behind it, in its task and after it, go on with a new thread."""
    monkeypatch.setattr(constrained, "PATIENCE_S", 0.2)
    hang = threading.Event()
    original = GrammarCompiler.compile

    def compile_or_hang(self, constraint):
        if constraint.text == "stuck":
            work_until(hang)
        return original(self, constraint)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_or_hang)
    rows.add(0, Constraint("regex", "ab"), NO_TOKENS)
    rows.add(1, Constraint("regex", "stuck"), NO_TOKENS)
    rows.add(2, Constraint("regex", "ab"), NO_TOKENS)
    masks = rows.masks(column(0, 1, 2))
    assert masks.failures == {1: "its constraint took too long"}
    assert masks.places.tolist() == [0, 2]
    rows.add(3, Constraint("regex", "cb"), NO_TOKENS)
    masks = rows.masks(column(0, 2, 3))
    slow = rows._rows[2].matcher
    monkeypatch.setattr(slow, "accept", lambda token_ids: work_until(hang))
    masks.advance(column(A, A, C))
    masks = rows.masks(column(0, 2, 3))
    assert masks.failures == {2: "its constraint took too long"}
    assert masks.only.tolist() == [B, B]
    hang.set()
    time.sleep(0.05)
    assert rows.masks(column(0, 2, 3)).failures == {2: "its constraint took too long"}


def test_after_too_many_that_would_not_end_none_is_taken(rows, monkeypatch) -> None:
    monkeypatch.setattr(constrained, "PATIENCE_S", 0.01)
    monkeypatch.setattr(constrained, "_MOST_ABANDONED", 2)
    hang = threading.Event()
    monkeypatch.setattr(GrammarCompiler, "compile", lambda self, constraint: work_until(hang))
    for row in range(3):
        rows.add(row, Constraint("regex", "a"), NO_TOKENS)
        assert rows.masks(column(row)).failures == {row: "its constraint took too long"}
    rows.add(4, Constraint("regex", "a"), NO_TOKENS)
    assert "too many constraints would not end" in rows.masks(column(4)).failures[4]
    hang.set()


def test_a_panic_of_the_library_is_the_rows_failure(rows, monkeypatch) -> None:
    def panic(self, constraint):
        raise KeyboardInterrupt

    monkeypatch.setattr(GrammarCompiler, "compile", panic)
    rows.add(0, Constraint("regex", "a"), NO_TOKENS)
    assert rows.masks(column(0)).failures == {0: "its constraint failed: KeyboardInterrupt"}


def test_a_lane_runs_its_tasks_in_order_and_ends_when_it_is_closed() -> None:
    lane, made = Lane("test"), []
    tasks = [Task([lambda number=number: made.append(number)]) for number in range(20)]
    for task in tasks:
        lane.put(task)
    lane.close()
    assert lane.wait(tasks[-1], 5.0)
    assert made == list(range(20))


@pytest.mark.parametrize("token", [0, 1, 31, 32, 4095])
def test_a_single_token_is_found_in_its_mask(token) -> None:
    class Library:
        """Fills in one token, then two."""

        tokens = (token,)

        def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
            bits = np.zeros(num_bytes * 8, dtype=np.uint8)
            bits[list(self.tokens)] = 1
            filled = np.packbits(bits, bitorder="little").tobytes()
            ctypes.memmove(address, filled, num_bytes)

        def get_error(self) -> str:
            return ""

    library, words = Library(), np.zeros(128, dtype=np.int32)
    assert Matcher(library).fill_mask(words) == token
    for other in (token ^ 1, token ^ 64):
        library.tokens = (token, other)
        assert Matcher(library).fill_mask(words) == -1


def sampled(sampler, logits, rows, masks):
    count = len(logits)
    positions = torch.full((count,), 2, dtype=torch.int64)
    return sampler.sample(logits, torch.tensor(rows), positions, torch.zeros(8, 8, dtype=torch.int32), masks)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_sampler_draws_what_masks_allow_and_others_as_without(rows, temperature) -> None:
    samplings = [
        SamplingParams(temperature=temperature, seed=row, top_k=20 if row == 2 else 0, logprobs=3 if row == 1 else -1)
        for row in range(5)
    ]
    sampler = Sampler(vocab_size=4096, max_num_rows=8, device=torch.device("cpu"))
    for row, sampling in enumerate(samplings):
        sampler.add_row(row, sampling, 1)
    rows.add(1, Constraint("regex", "[ab]"), NO_TOKENS)
    rows.add(2, Constraint("regex", "[0-9]+"), NO_TOKENS)
    rows.add(3, Constraint("regex", "c"), NO_TOKENS)
    torch.manual_seed(1)
    logits = torch.randn(5, 4096)
    masks = rows.masks(column(0, 1, 2, 3, 4))
    assert masks.only.tolist() == [-1, -1, C]
    free = sampled(sampler, logits, [0, 1, 2, 3, 4], None)
    bound = sampled(sampler, logits, [0, 1, 2, 3, 4], masks)
    assert not bound.errors
    one, two = allowed(masks)[:2]
    assert bound.token_ids[1].item() in one
    assert bound.token_ids[2].item() in two
    assert bound.token_ids[3].item() == C
    assert bound.token_ids[[0, 4]].tolist() == free.token_ids[[0, 4]].tolist()
    # Log probabilities are those of the model's own distribution.
    assert bound.logprobs[0].top_token_ids == free.logprobs[0].top_token_ids
    assert bound.logprobs[0].logprob == pytest.approx(logits[1].log_softmax(-1)[bound.token_ids[1]].item(), abs=1e-5)
    if temperature == 0.0:
        assert bound.token_ids[2].item() == max(two, key=lambda token: logits[2, token])


def test_a_row_whose_only_token_has_no_finite_logit_fails(rows) -> None:
    sampler = Sampler(vocab_size=4096, max_num_rows=2, device=torch.device("cpu"))
    sampler.add_row(0, SamplingParams(temperature=0.0), 1)
    rows.add(0, Constraint("regex", "c"), NO_TOKENS)
    logits = torch.zeros(1, 4096)
    logits[0, C] = torch.nan
    drawn = sampled(sampler, logits, [0], rows.masks(column(0)))
    assert drawn.token_ids.tolist() == [ERRORED_ROW]
    assert drawn.errors[0].message == BAD_LOGITS


def test_masks_do_not_change_how_likely_what_they_allow_is(rows) -> None:
    """Of three allowed tokens each is drawn as often as the model's own distribution among them says."""
    sampler = Sampler(vocab_size=4096, max_num_rows=1, device=torch.device("cpu"))
    sampler.add_row(0, SamplingParams(seed=3), 1)
    constraint = Constraint("choice", json.dumps(["a", "b", "c"]))
    rows.add(0, constraint, NO_TOKENS)
    masks = rows.masks(column(0))
    logits = torch.randn(1, 4096, generator=torch.Generator().manual_seed(2))
    counts = dict.fromkeys((A, B, C), 0)
    for position in range(600):
        drawn = sampler.sample(
            logits, torch.tensor([0]), torch.tensor([position]), torch.zeros(1, 600, dtype=torch.int32), masks
        )
        counts[drawn.token_ids.item()] += 1
    expected = logits[0, [A, B, C]].softmax(-1) * 600
    statistic = sum((counts[t] - e.item()) ** 2 / e.item() for t, e in zip((A, B, C), expected, strict=True))
    assert statistic < 13.8  # 0.1 % of all seeds are above, with two degrees of freedom
