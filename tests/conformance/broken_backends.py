"""Backends that are wrong on purpose: each is ``torch`` with one plausible mistake.

``found_by`` names the scenarios that must fail. A backend that keeps its own state may read something one step too
early, or once too often.
"""

import json
import random
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from headway_executor.backend import BackendConfigError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.sampling.pooling import PooledRows
from headway_proto.pooling import POOL_MEAN
from headway_proto.sampling import SamplingParams
from headway_proto.step import ERRORED_ROW

replace = msgspec.structs.replace
NOTHING = np.empty((2, 0), dtype=np.int32)


class WrappedBackend:
    executes_inline: ClassVar[bool] = False
    found_by: ClassVar[tuple[str, ...]] = ()
    timeout_s: ClassVar[float] = 60.0

    def __init__(self):
        self.inner = TorchBackend()

    def open(self, config):
        self.info = self.inner.open(replace(config, options={"kernels": "eager"} | config.options))
        return self.info

    def execute(self, batch):
        return self.inner.execute(batch)

    def move_blocks(self, *, copies, swap_out, swap_in):
        self.inner.move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in)

    def load_blocks(self, contents, blocks):
        self.inner.load_blocks(contents, blocks)

    def close(self):
        self.inner.close()


class ReportsOneLogprobPerRow(WrappedBackend):
    found_by = ("proposals_change_no_token",)

    def execute(self, batch):
        result = super().execute(batch)
        first = {entry.row: entry for entry in reversed(result.logprobs)}
        return replace(result, logprobs=tuple(first[row] for row in sorted(first)))


class KeepsAWrongProposal(WrappedBackend):
    """Leaves a proposal in the place of the last accepted token."""

    found_by = ("proposals_change_no_token",)

    def execute(self, batch):
        result = super().execute(batch)
        if result.accepted_tokens is not None:
            store = self.inner._opened._token_ids
            ends = dict(zip(batch.rows.tolist(), (batch.num_computed_tokens + 1).tolist(), strict=True))
            for row, proposed, accepted in result.accepted_tokens.T.tolist():
                if proposed:
                    store[row, ends[row] + accepted] = 1
        return result


class SpeculatesInLanes(WrappedBackend):
    found_by = ("proposals_change_no_token",)

    def open(self, config):
        return replace(super().open(config), num_lanes=2)


class SortsBlocks(WrappedBackend):
    found_by = ("blocks_in_any_order", "lengths_around_block_boundaries", "swapped_out_and_in")

    def execute(self, batch):
        table = batch.block_table.copy()
        for row, reached in zip(batch.rows, batch.num_computed_tokens + batch.num_scheduled_tokens, strict=True):
            width = -(-reached // self.info.block_size)
            table[row, :width].sort()
        return super().execute(replace(batch, block_table=table))


class ReadsTheTableOfAnEarlierStep(WrappedBackend):
    """Appends to a row's table without checking which row is new."""

    found_by = ("a_row_changes_hands", "a_new_epoch", "steps_in_flight_1")

    def open(self, config):
        info = super().open(config)
        self.table = np.zeros((info.max_num_rows, 1000), dtype=np.int32)
        self.lengths = np.zeros(info.max_num_rows, dtype=np.int32)
        return info

    def execute(self, batch):
        for row, block in batch.new_blocks.T:
            self.table[row, self.lengths[row]] = block
            self.lengths[row] += 1
        return super().execute(replace(batch, block_table=self.table))


class LateFuture(Future):
    """Computes its result when a caller waits for it."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def result(self, timeout=None):
        if not self.done():
            self.run()
        return super().result(timeout)


class ReadsTheTableTooLate(WrappedBackend):
    """Its block table has changed by then."""

    found_by = ("steps_in_flight_2", "steps_in_flight_3", "steps_in_flight_4")
    executes_inline = True

    def __init__(self):
        super().__init__()
        self.late = None

    def execute(self, batch):
        self.run_late()
        self.late = batch, LateFuture(self.run_late)
        return self.late[1]

    def run_late(self):
        if self.late is not None:
            (batch, future), self.late = self.late, None
            future.set_result(super().execute(batch))

    def move_blocks(self, *, copies, swap_out, swap_in):
        self.run_late()
        super().move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in)


class KeepsTheParametersOfARow(WrappedBackend):
    found_by = ("a_row_changes_hands", "a_new_epoch", "steps_in_flight_2")

    def __init__(self):
        super().__init__()
        self.sampling = {}

    def execute(self, batch):
        new_rows = tuple(
            replace(new, sampling=self.sampling.setdefault(new.row, new.sampling)) for new in batch.new_rows
        )
        return super().execute(replace(batch, new_rows=new_rows))


class StartsEveryRowAtZero(WrappedBackend):
    found_by = ("a_prefix_that_is_there", "a_prefix_of_the_same_step", "swapped_out_and_in", "copied_blocks")

    def open(self, config):
        info = super().open(config)
        self.computed = np.zeros(info.max_num_rows, dtype=np.int32)
        return info

    def execute(self, batch):
        for new in batch.new_rows:
            self.computed[new.row] = 0
        computed = self.computed[batch.rows]
        self.computed[batch.rows] += batch.num_scheduled_tokens
        return super().execute(replace(batch, num_computed_tokens=computed))


class CountsRowsThatSitOut(WrappedBackend):
    found_by = ("rows_that_sit_out",)

    def open(self, config):
        info = super().open(config)
        self.extra = np.zeros(info.max_num_rows, dtype=np.int32)
        self.live = set()
        return info

    def execute(self, batch):
        self.live -= set(batch.finished_rows.tolist())
        for new in batch.new_rows:
            self.live.add(new.row)
            self.extra[new.row] = 0
        for row in self.live - set(batch.rows.tolist()):
            self.extra[row] += 1
        computed = np.minimum(batch.num_computed_tokens + self.extra[batch.rows], self.info.max_model_len - 1)
        wide_table = np.pad(batch.block_table, ((0, 0), (0, 20)))
        return super().execute(replace(batch, num_computed_tokens=computed.astype(np.int32), block_table=wide_table))


class DropsSwapIn(WrappedBackend):
    found_by = ("swapped_out_and_in", "out_and_in_in_one_step", "host_blocks_of_a_new_epoch", "steps_in_flight_1")

    def move_blocks(self, *, copies, swap_out, swap_in):
        super().move_blocks(copies=copies, swap_out=swap_out, swap_in=NOTHING)


class AlwaysHasHostBlocks(WrappedBackend):
    found_by = ("without_host_blocks",)

    def open(self, config):
        return super().open(replace(config, swap_space_mib=-1))


class ReportsOtherTokens(WrappedBackend):
    found_by = ("logprobs_among_rows_without",)

    def execute(self, batch):
        new_rows = tuple(
            replace(new, sampling=replace(new.sampling, logprobs=min(20, new.sampling.logprobs + 1)))
            if new.sampling.logprobs > 0
            else new
            for new in batch.new_rows
        )
        result = super().execute(replace(batch, new_rows=new_rows))
        entries = tuple(
            replace(entry, top_token_ids=entry.top_token_ids[1:], top_logprobs=entry.top_logprobs[1:])
            if 0 < len(entry.top_token_ids) < 20
            else entry
            for entry in result.logprobs
        )
        return replace(result, logprobs=entries)


class ReportsPromptsFromTheirOwnLogits(WrappedBackend):
    """Reports the log probability of the token before."""

    found_by = ("prompts_that_are_reported", "parameters_mixed_in_a_batch")

    def execute(self, batch):
        result = super().execute(batch)
        return replace(result, prompt_logprobs=tuple(map(self._shifted, result.prompt_logprobs)))

    def _shifted(self, entry):
        values = entry.values
        return replace(entry, values=replace(values, logprobs=values.logprobs[-4:] + values.logprobs[:-4]))


class ForgetsPromptsOfChunks(WrappedBackend):
    found_by = ("prompts_that_are_reported",)

    def execute(self, batch):
        result = super().execute(batch)
        drawn = set(batch.rows[batch.samples != 0].tolist())
        kept = tuple(entry for entry in result.prompt_logprobs if entry.row in drawn)
        return replace(result, prompt_logprobs=kept)


class SwapsInBeforeOut(WrappedBackend):
    """Reads host blocks before the step has written them."""

    found_by = ("out_and_in_in_one_step", "moved_within_one_step")

    def move_blocks(self, *, copies, swap_out, swap_in):
        super().move_blocks(copies=NOTHING, swap_out=NOTHING, swap_in=swap_in)
        super().move_blocks(copies=copies, swap_out=swap_out, swap_in=NOTHING)


class SwapsOutAfterTheStep(WrappedBackend):
    """Other rows have written to them by then."""

    found_by = ("swapped_out_and_in",)

    def __init__(self):
        super().__init__()
        self.late = NOTHING

    def move_blocks(self, *, copies, swap_out, swap_in):
        self.late = swap_out
        super().move_blocks(copies=copies, swap_out=NOTHING, swap_in=swap_in)

    def execute(self, batch):
        result = super().execute(batch)
        super().move_blocks(copies=NOTHING, swap_out=self.late, swap_in=NOTHING)
        self.late = NOTHING
        return replace(result, move_time_us=0)


class FreesHostBlocksThatWereRead(WrappedBackend):
    found_by = ("host_blocks_keep_what_was_last_written",)

    def __init__(self):
        super().__init__()
        self.read = set()

    def move_blocks(self, *, copies, swap_out, swap_in):
        self.read -= set(swap_out[1].tolist())
        kept = np.array([host not in self.read for host in swap_in[0].tolist()], dtype=bool)
        self.read |= set(swap_in[0].tolist())
        super().move_blocks(copies=copies, swap_out=swap_out, swap_in=swap_in[:, kept])


class IgnoresCopies(WrappedBackend):
    found_by = ("copied_blocks", "swapped_in_then_copied")

    def move_blocks(self, *, copies, swap_out, swap_in):
        super().move_blocks(copies=NOTHING, swap_out=swap_out, swap_in=swap_in)


class CopiesFirst(WrappedBackend):
    found_by = ("swapped_in_then_copied",)

    def move_blocks(self, *, copies, swap_out, swap_in):
        super().move_blocks(copies=copies, swap_out=NOTHING, swap_in=NOTHING)
        super().move_blocks(copies=NOTHING, swap_out=swap_out, swap_in=swap_in)


class AnswersInOrderOfArrival(WrappedBackend):
    found_by = ("rows_in_any_order", "every_split_of_a_prompt", "parameters_mixed_in_a_batch", "family_llama")

    def __init__(self):
        super().__init__()
        self.arrived = []

    def execute(self, batch):
        new = [row.row for row in batch.new_rows]
        self.arrived = [row for row in self.arrived if row not in new] + new
        result = super().execute(batch)
        rows = batch.rows[batch.samples == 1].tolist()
        order = [rows.index(row) for row in self.arrived if row in rows]
        return replace(result, sampled_token_ids=result.sampled_token_ids[order])


class KeepsRowsOfAnEarlierEpoch(WrappedBackend):
    """Ignores an epoch's first step, and new rows whose old ones did not finish."""

    found_by = ("a_new_epoch", "rows_of_an_earlier_epoch_later", "an_epoch_lost_to_an_impossible_step")

    def __init__(self):
        super().__init__()
        self.live = set()

    def execute(self, batch):
        if batch.step:
            self.live -= set(batch.finished_rows.tolist())
        new_rows = tuple(new for new in batch.new_rows if new.row not in self.live)
        self.live |= {new.row for new in new_rows}
        return super().execute(replace(batch, new_rows=new_rows))


class DrawsFromOneGenerator(WrappedBackend):
    found_by = ("a_seed_decides", "parameters_mixed_in_a_batch", "preempted_and_computed_again")

    def __init__(self):
        super().__init__()
        self.generator = random.Random(0)

    def execute(self, batch):
        new_rows = tuple(
            replace(new, sampling=replace(new.sampling, seed=self.generator.getrandbits(64))) for new in batch.new_rows
        )
        return super().execute(replace(batch, new_rows=new_rows))


class CutsSeeds(WrappedBackend):
    found_by = ("parameters_mixed_in_a_batch",)

    def execute(self, batch):
        new_rows = tuple(
            replace(new, sampling=replace(new.sampling, seed=new.sampling.seed & 0xFFFF_FFFF)) for new in batch.new_rows
        )
        return super().execute(replace(batch, new_rows=new_rows))


class TakesOutputForPrompt(WrappedBackend):
    found_by = ("preempted_and_computed_again", "swapped_out_and_in")

    def execute(self, batch):
        new_rows = tuple(replace(new, num_prompt_tokens=len(new.token_ids)) for new in batch.new_rows)
        return super().execute(replace(batch, new_rows=new_rows))


class SharesParameters(WrappedBackend):
    found_by = ("parameters_mixed_in_a_batch",)

    def execute(self, batch):
        penalties = [new.sampling.repetition_penalty for new in batch.new_rows]
        new_rows = tuple(
            replace(new, sampling=replace(new.sampling, repetition_penalty=max(penalties))) for new in batch.new_rows
        )
        return super().execute(replace(batch, new_rows=new_rows))


class ReportsProcessedLogprobs(WrappedBackend):
    """Reports log probabilities as if the drawn token had been likelier."""

    found_by = ("logprobs_among_rows_without", "every_split_of_a_prompt")

    def execute(self, batch):
        result = super().execute(batch)
        entries = tuple(
            replace(entry, logprob=entry.logprob / 2, top_logprobs=tuple(value / 2 for value in entry.top_logprobs))
            for entry in result.logprobs
        )
        return replace(result, logprobs=entries)


class ReportsLogprobsForAll(WrappedBackend):
    found_by = ("logprobs_among_rows_without", "steps_in_flight_1")

    def execute(self, batch):
        new_rows = tuple(
            replace(new, sampling=replace(new.sampling, logprobs=max(0, new.sampling.logprobs)))
            for new in batch.new_rows
        )
        return super().execute(replace(batch, new_rows=new_rows))


class OneErrorFailsAll(WrappedBackend):
    found_by = ("errors_stay_in_their_row", "a_failed_row_runs_once_more")

    def execute(self, batch):
        result = super().execute(batch)
        if result.errors:
            raise RuntimeError("a row failed")
        return result


class HidesErrors(WrappedBackend):
    found_by = ("errors_stay_in_their_row", "a_failed_row_runs_once_more")

    def execute(self, batch):
        result = super().execute(batch)
        tokens = np.where(result.sampled_token_ids == ERRORED_ROW, np.int32(0), result.sampled_token_ids)
        return replace(result, sampled_token_ids=tokens, errors=())


class RunsRowByRow(WrappedBackend):
    """A row does not find what a later one writes."""

    found_by = ("a_prefix_of_the_same_step",)

    def execute(self, batch):
        parts = [super(RunsRowByRow, self).execute(part) for part in self.parts(batch)]
        return replace(
            parts[0],
            sampled_token_ids=np.concatenate([part.sampled_token_ids for part in parts]),
            logprobs=sum((part.logprobs for part in parts), ()),
            errors=sum((part.errors for part in parts), ()),
        )

    @staticmethod
    def parts(batch):
        fields = ("rows", "num_scheduled_tokens", "num_computed_tokens", "samples")
        for place in range(max(1, len(batch.rows))):
            one = {field: getattr(batch, field)[place : place + 1] for field in fields}
            yield replace(batch, **one, new_rows=() if place else batch.new_rows)


class DrawsAfterEveryChunk(WrappedBackend):
    found_by = ("chunks_of_one_token", "prompts_beside_decodes", "every_split_of_a_prompt")

    def execute(self, batch):
        return super().execute(replace(batch, samples=np.ones_like(batch.samples)))


class ChunksOfWholeBlocks(WrappedBackend):
    found_by = ("every_split_of_a_prompt", "lengths_around_block_boundaries")

    def execute(self, batch):
        is_chunk = batch.num_scheduled_tokens > 1
        down = batch.num_computed_tokens % self.info.block_size * is_chunk
        computed = (batch.num_computed_tokens - down).astype(np.int32)
        return super().execute(replace(batch, num_computed_tokens=computed))


class CannotRunAnEmptyStep(WrappedBackend):
    found_by = ("empty_steps", "rows_that_sit_out", "rows_of_an_earlier_epoch_later")

    def execute(self, batch):
        if not len(batch.rows):
            raise ValueError("nothing to run")
        return super().execute(batch)


class ForgetsNewsOfAnEmptyStep(WrappedBackend):
    """Misses the changes of a step without rows."""

    found_by = ("a_row_admitted_to_sit_out",)

    def execute(self, batch):
        if not len(batch.rows):
            batch = replace(batch, new_rows=())
        return super().execute(batch)


class Hangs(WrappedBackend):
    found_by = ("empty_steps",)
    executes_inline = True
    timeout_s = 0.2

    def execute(self, batch):
        return Future()


class AnswersAfterClose(WrappedBackend):
    found_by = ("closed_twice",)

    def close(self):
        pass


class AcceptsAnything(WrappedBackend):
    found_by = ("settings_that_cannot_be_honoured",)

    def open(self, config):
        try:
            return super().open(config)
        except BackendConfigError:
            return super().open(replace(config, max_model_len=0, num_kv_blocks=0, block_size=16, options={}))


class AnnouncesTheModelsContext(WrappedBackend):
    found_by = ("what_is_announced",)

    def open(self, config):
        return replace(super().open(config), max_num_rows=config.max_num_seqs + 1)


class IgnoresMinTokens(WrappedBackend):
    found_by = ("parameters_mixed_in_a_batch", "a_mask_that_leaves_one_token")

    def execute(self, batch):
        new_rows = tuple(replace(new, sampling=replace(new.sampling, min_tokens=0)) for new in batch.new_rows)
        return super().execute(replace(batch, new_rows=new_rows))


class IsAlwaysGreedy(WrappedBackend):
    """Ignores every parameter but logprobs."""

    found_by = ("parameters_mixed_in_a_batch", "a_seed_decides", "steps_in_flight_4")

    def execute(self, batch):
        new_rows = tuple(
            replace(new, sampling=SamplingParams(temperature=0.0, logprobs=new.sampling.logprobs))
            for new in batch.new_rows
        )
        return super().execute(replace(batch, new_rows=new_rows))


class IgnoresConstraints(WrappedBackend):
    found_by = (
        "constrained_rows_among_others",
        "constrained_rows_in_flight_and_taken_over",
        "constraints_that_end_nowhere",
    )

    def execute(self, batch):
        new_rows = tuple(replace(new, sampling=replace(new.sampling, constraint=None)) for new in batch.new_rows)
        return super().execute(replace(batch, new_rows=new_rows))


class ForgetsEarlierDraws(WrappedBackend):
    """Starts a constraint anew for a row that already has output."""

    found_by = ("constrained_rows_in_flight_and_taken_over",)

    def execute(self, batch):
        new_rows = tuple(replace(new, num_prompt_tokens=len(new.token_ids)) for new in batch.new_rows)
        return super().execute(replace(batch, new_rows=new_rows))


class IgnoresASlidingWindow(WrappedBackend):
    found_by = ("family_mistral",)

    def open(self, config):
        model = Path(config.model)
        without = model.with_name(f"{model.name}-without-window")
        shutil.copytree(model, without, dirs_exist_ok=True)
        fields = json.loads((model / "config.json").read_text()) | {"sliding_window": None}
        (without / "config.json").write_text(json.dumps(fields))
        return super().open(replace(config, model=str(without)))


class ForgetsAChunkOfAMean(WrappedBackend):
    """Takes the mean over the last chunk alone."""

    found_by = ("vectors_beside_tokens",)

    def execute(self, batch):
        for pooled in self.inner._opened._pooled._rows.values():
            if pooled.pooling == POOL_MEAN:
                pooled.value = None
        return super().execute(batch)


class GivesVectorsToOtherRows(WrappedBackend):
    found_by = ("vectors_beside_tokens",)

    def execute(self, batch):
        result = super().execute(batch)
        values = [vector.values for vector in reversed(result.vectors)]
        vectors = (replace(vector, values=value) for vector, value in zip(result.vectors, values, strict=True))
        return replace(result, vectors=tuple(vectors))


class KeepsSumsOfARow(WrappedBackend):
    """Takes a row's new request for its old one."""

    found_by = ("a_pooled_row_changes_hands",)

    def open(self, config):
        class KeepsSums(PooledRows):
            def begin_step(self, batch):
                before = dict(self._rows)
                super().begin_step(batch)
                for new in batch.new_rows:
                    if new.pooling and new.row in before:
                        self._rows[new.row].value = before[new.row].value

        info = super().open(config)
        self.inner._opened._pooled = KeepsSums()
        return info


BROKEN = tuple(kind for kind in vars().copy().values() if isinstance(kind, type) and getattr(kind, "found_by", ()))
