"""From ``open`` to ``close``."""

from typing import Any

import numpy as np

from headway_conformance.checkpoints import EOS_TOKEN_ID
from headway_conformance.failures import ConformanceFailure, require
from headway_conformance.scenario import scenario
from headway_conformance.stage import Stage
from headway_executor.backend import BackendConfigError, ExecutorBackend, ModelFilesError, StepBatch
from headway_proto.columns import EMPTY_COLUMN


@scenario
def what_is_announced(stage: Stage) -> None:
    """``BackendInfo`` agrees with the settings, and is the same when the same model is opened again."""
    backend = stage.create_backend()
    require(isinstance(backend, ExecutorBackend), "it lacks one of open, execute, move_blocks, load_blocks, close")
    config = stage.config()
    info = backend.open(config)
    backend.close()
    announced = {
        "block_size": (info.block_size, config.block_size),
        "num_blocks": (info.num_blocks, config.num_kv_blocks),
        "max_model_len": (info.max_model_len, config.max_model_len),
        "max_num_rows": (info.max_num_rows, config.max_num_seqs),
    }
    if stage.has_numerics(info):
        announced["vocab_size"] = (info.vocab_size, stage.size.vocab_size)
        require(info.eos_token_ids == (EOS_TOKEN_ID,), f"eos_token_ids is {info.eos_token_ids}; expected (0,)")
    for field, (found, expected) in announced.items():
        require(found == expected, f"{field} is {found}; asked for {expected}")
    for field in ("backend", "device", "dtype", "model_name", "model_fingerprint"):
        require(bool(getattr(info, field)), f"{field} is empty")
    taken = info.max_num_batched_tokens
    enough = taken == 0 or taken >= config.max_num_batched_tokens
    require(enough, f"max_num_batched_tokens is {taken}; asked for {config.max_num_batched_tokens}")
    require(info.num_host_blocks >= 0 and info.swap_us_per_block >= 0, "num_host_blocks or its cost is negative")
    again = stage.create_backend()
    fingerprint = again.open(config).model_fingerprint
    again.close()
    require(fingerprint == info.model_fingerprint, "the model_fingerprint of one model differs between two lives")


@scenario
def without_host_blocks(stage: Stage) -> None:
    """With ``swap_space_mib`` 0 there are no host blocks."""
    backend = stage.create_backend()
    info = backend.open(stage.config(swap_space_mib=0))
    backend.close()
    require(info.num_host_blocks == 0, f"num_host_blocks is {info.num_host_blocks} with swap_space_mib 0")


@scenario
def settings_that_cannot_be_honoured(stage: Stage) -> None:
    """``open`` refuses them with ``BackendConfigError``: one line with the field, its value and what is allowed."""
    size = stage.size
    for field, value in (
        ("max_model_len", size.max_model_len + 1),
        ("max_model_len", -1),
        ("num_kv_blocks", size.max_model_len // size.block_size - 1),
        ("num_kv_blocks", -1),
        ("block_size", 0),
        ("max_num_seqs", 0),
    ):
        _check_refusal(stage, field, str(value), {field: value})
    options = stage.config().options | {"no_such_option": "1"}
    _check_refusal(stage, "backend_options", "no_such_option", {"options": options})


@scenario
def a_model_that_is_not_there(stage: Stage) -> None:
    """``open`` refuses a directory without a checkpoint with ``ModelFilesError``, in one line."""
    stage.require_numerics()
    backend = stage.create_backend()
    try:
        backend.open(stage.config(model=f"{stage.config().model}/no-such-model"))
    except ModelFilesError as error:
        require("\n" not in str(error), f"the message is not one line: {error!r}")
        require("no-such-model" in str(error), f"the message does not name the directory: {error}")
    else:
        backend.close()
        raise ConformanceFailure("a directory that does not exist was opened")


@scenario
def closed_twice(stage: Stage) -> None:
    """``close`` may be called twice; after it ``execute`` raises, or gives a future that does."""
    backend = stage.create_backend()
    backend.open(stage.config())
    stage.execute(backend, _empty_step())
    backend.close()
    backend.close()
    try:
        stage.execute(backend, _empty_step())
    except ConformanceFailure:
        raise
    except Exception:  # noqa: BLE001 (no error is an answer)
        return
    raise ConformanceFailure("execute gave a result after close")


def _check_refusal(stage: Stage, field: str, value: str, changes: dict[str, Any]) -> None:
    asked = f"{field} {value}"
    backend = stage.create_backend()
    try:
        backend.open(stage.config(**changes))
    except BackendConfigError as error:
        text = str(error)
        require("\n" not in text, f"{asked}: the message is not one line: {text!r}")
        for part in (field, value, "allowed"):
            require(part in text, f"{asked}: {part!r} is missing in the message: {text}")
    except Exception as error:
        raise ConformanceFailure(f"{asked}: refused by {type(error).__name__}, not BackendConfigError") from error
    else:
        backend.close()
        raise ConformanceFailure(f"{asked} was accepted")


def _empty_step() -> StepBatch:
    nothing = np.empty((2, 0), dtype=np.int32)
    return StepBatch(
        step=0,
        finished_rows=EMPTY_COLUMN,
        new_rows=(),
        new_blocks=nothing,
        rows=EMPTY_COLUMN,
        num_scheduled_tokens=EMPTY_COLUMN,
        num_computed_tokens=EMPTY_COLUMN,
        samples=EMPTY_COLUMN,
        block_table=nothing,
    )


SCENARIOS = (
    what_is_announced,
    without_host_blocks,
    settings_that_cannot_be_honoured,
    a_model_that_is_not_there,
    closed_twice,
)
