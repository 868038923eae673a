"""The form of a step's answer.

Owns: checking a ``StepResult``. Must not know: which tokens are right.
"""

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from headway_conformance.failures import require
from headway_executor.backend import StepResult
from headway_proto.columns import decode_floats, encode_column
from headway_proto.sampling import NO_LOGPROBS
from headway_proto.step import ERRORED_ROW, BackendInfo, PooledOutput, RowLogprobs

_ROUNDING = 1e-5


class AskedStep(msgspec.Struct, frozen=True, kw_only=True):
    """``rows`` ran; ``sampling_rows`` (ascending) drew a token and asked for ``num_logprobs``; ``prompts`` have rows
    ascending. ``pooled_rows`` are those of ``sampling_rows`` that want a vector, ascending.
    """

    where: str
    rows: frozenset[int]
    sampling_rows: tuple[int, ...]
    num_logprobs: tuple[int, ...]
    has_moves: bool
    prompts: tuple["AskedPrompt", ...] = ()
    pooled_rows: tuple[int, ...] = ()


class AskedPrompt(msgspec.Struct, frozen=True):
    """A step reports positions ``first`` to ``end - 1``."""

    row: int
    first: int
    end: int
    num_alternatives: int


def check_answer(asked: AskedStep, result: StepResult, info: BackendInfo) -> None:
    """Check an answer. Raises ``ConformanceFailure``: says what is wrong."""
    require(isinstance(result, StepResult), f"{asked.where}: execute gave {type(result).__name__}, not a StepResult")
    tokens = _check_tokens(asked, result)
    errors = _check_errors(asked, result)
    for row, token in zip(asked.sampling_rows, tokens, strict=True):
        if row in errors:
            require(token == ERRORED_ROW, f"{asked.where}: row {row} is in errors and its token is {token}, not -1")
        else:
            allowed = f"allowed: 0 to {info.vocab_size - 1}"
            require(0 <= token < info.vocab_size, f"{asked.where}: row {row} drew token {token}; {allowed}")
    _check_logprobs(asked, dict(zip(asked.sampling_rows, tokens, strict=True)), errors, result, info)
    _check_prompts(asked, result, info)
    _check_vectors(asked, errors, result, info)
    _check_times(asked, result)
    _check_it_travels(asked, result)


def parts_of(result: StepResult, sampling_rows: tuple[int, ...]) -> list[tuple[StepResult, tuple[int, ...]]]:
    """Split a speculating step's result into parts with one token a row, each with its rows.

    Raises:
        ConformanceFailure: ``accepted_tokens`` says another number of tokens or log probabilities.
    """
    accepted = {} if result.accepted_tokens is None else dict(result.accepted_tokens[[0, 2]].T.tolist())
    num_tokens = {row: 1 + accepted.get(row, 0) for row in sampling_rows}
    total = sum(num_tokens.values())
    require(len(result.sampled_token_ids) == total, f"{len(result.sampled_token_ids)} tokens came, not {total}")
    owners = [row for row in sampling_rows for _ in range(num_tokens[row])]
    columns: dict[int, list[int]] = {row: [] for row in sampling_rows}
    for row, token in zip(owners, result.sampled_token_ids.tolist(), strict=True):
        columns[row].append(token)
    reported: dict[int, list[RowLogprobs]] = {}
    for entry in result.logprobs:
        reported.setdefault(entry.row, []).append(entry)
    for row, entries in reported.items():
        require(
            len(entries) <= num_tokens.get(row, 0), f"row {row}: {len(entries)} log probabilities of too many tokens"
        )
    parts = []
    for place in range(max(num_tokens.values(), default=0)):
        rows = tuple(row for row in sampling_rows if num_tokens[row] > place)
        part = StepResult(
            sampled_token_ids=np.array([columns[row][place] for row in rows], dtype=np.int32),
            logprobs=tuple(reported[row][place] for row in rows if len(reported.get(row, ())) > place),
            errors=() if place else result.errors,
            device_time_us=result.device_time_us,
        )
        parts.append((part, rows))
    return parts


def _check_tokens(asked: AskedStep, result: StepResult) -> list[int]:
    tokens = result.sampled_token_ids
    is_column = isinstance(tokens, np.ndarray) and tokens.dtype == np.int32 and tokens.ndim == 1
    require(is_column, f"{asked.where}: sampled_token_ids is not an int32 array of one dimension")
    count = len(asked.sampling_rows)
    require(len(tokens) == count, f"{asked.where}: {len(tokens)} tokens for {count} sampling rows")
    listed: list[int] = tokens.tolist()
    return listed


def _check_errors(asked: AskedStep, result: StepResult) -> frozenset[int]:
    rows = [error.row for error in result.errors]
    require(len(set(rows)) == len(rows), f"{asked.where}: errors names a row twice: {rows}")
    strangers = sorted(set(rows) - asked.rows)
    require(not strangers, f"{asked.where}: errors names rows that did not run: {strangers}")
    require(all(error.message for error in result.errors), f"{asked.where}: an error has no message")
    return frozenset(rows)


def _check_logprobs(
    asked: AskedStep, tokens: dict[int, int], errors: frozenset[int], result: StepResult, info: BackendInfo
) -> None:
    wanted = {
        row: count
        for row, count in zip(asked.sampling_rows, asked.num_logprobs, strict=True)
        if count != NO_LOGPROBS and row not in errors
    }
    found = [entry.row for entry in result.logprobs]
    require(
        found == list(wanted),
        f"{asked.where}: logprobs came for the rows {found}; asked for by the rows {list(wanted)}, ascending",
    )
    for entry in result.logprobs:
        _check_entry(
            f"{asked.where}: row {entry.row}", entry, tokens[entry.row], min(wanted[entry.row], info.vocab_size)
        )


def _check_entry(where: str, entry: RowLogprobs, token: int, count: int) -> None:
    ids, values = entry.top_token_ids, entry.top_logprobs
    require(len(ids) == len(values) == count, f"{where}: {len(ids)} ids and {len(values)} logprobs; asked for {count}")
    require(len(set(ids)) == count, f"{where}: top_token_ids names a token twice")
    require(all(map(math.isfinite, (entry.logprob, *values))), f"{where}: a logprob is not finite")
    require(max((entry.logprob, *values)) <= _ROUNDING, f"{where}: a logprob is above 0")
    require(_is_descending(values), f"{where}: top_logprobs is not best first: {values}")
    if token in ids:
        listed = values[ids.index(token)]
        require(abs(listed - entry.logprob) <= _ROUNDING, f"{where}: token {token} has two logprobs")


def _check_prompts(asked: AskedStep, result: StepResult, info: BackendInfo) -> None:
    found = [entry.row for entry in result.prompt_logprobs]
    wanted = [prompt.row for prompt in asked.prompts]
    require(
        found == wanted, f"{asked.where}: prompts are reported of the rows {found}; asked for of {wanted}, ascending"
    )
    for entry, prompt in zip(result.prompt_logprobs, asked.prompts, strict=True):
        where, values = f"{asked.where}: the prompt of row {entry.row}", entry.values
        problem = values.problem()
        require(problem is None, f"{where}: {problem}")
        reported = (values.first_position, values.end, values.num_alternatives)
        owed = (prompt.first, prompt.end, min(prompt.num_alternatives, info.vocab_size))
        require(reported == owed, f"{where}: first position, end and alternatives are {reported}, and should be {owed}")
        own, top_ids, tops = values.values()
        both = np.concatenate((own, tops.ravel()))
        require(
            bool(np.isfinite(both).all()) and both.max() <= _ROUNDING, f"{where}: a logprob is above 0 or not finite"
        )
        require(bool((np.diff(tops, axis=1) <= 0).all()), f"{where}: alternatives are not best first")
        distinct = all(len(set(ids)) == len(ids) for ids in top_ids.tolist())
        require(distinct, f"{where}: alternatives name a token twice")


def _check_vectors(asked: AskedStep, errors: frozenset[int], result: StepResult, info: BackendInfo) -> None:
    wanted = [row for row in asked.pooled_rows if row not in errors]
    found = [entry.row for entry in result.vectors]
    require(found == wanted, f"{asked.where}: vectors came for the rows {found}; asked for by {wanted}, ascending")
    for entry in result.vectors:
        where = f"{asked.where}: the vector of row {entry.row}"
        values = decode_floats(entry.values)
        require(len(values) == info.embedding_size, f"{where} has {len(values)} numbers, not {info.embedding_size}")
        require(bool(np.isfinite(values).all()), f"{where}: a number is not finite")


def _is_descending(values: Sequence[float]) -> bool:
    return all(first >= second for first, second in itertools.pairwise(values))


def _check_times(asked: AskedStep, result: StepResult) -> None:
    for name, value in (("device_time_us", result.device_time_us), ("move_time_us", result.move_time_us)):
        require(
            isinstance(value, int) and value >= 0, f"{asked.where}: {name} is {value!r}; allowed: an integer, 0 or more"
        )
    require(asked.has_moves or not result.move_time_us, f"{asked.where}: move_time_us is not 0 and nothing was moved")


def _check_it_travels(asked: AskedStep, result: StepResult) -> None:
    """A numpy number, for example, does not fit into its message."""
    output = PooledOutput(
        epoch=1,
        step=0,
        sampled_token_ids=encode_column(result.sampled_token_ids),
        logprobs=result.logprobs,
        errors=result.errors,
        device_time_us=result.device_time_us,
        move_time_us=result.move_time_us,
        prompt_logprobs=result.prompt_logprobs,
        vectors=result.vectors,
    )
    try:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=PooledOutput)
    except (TypeError, msgspec.MsgspecError) as error:
        require(condition=False, message=f"{asked.where}: the result cannot be sent: {error}")
    else:
        require(again.errors == output.errors, f"{asked.where}: the result changes when it is sent")
