"""An encoder opened by the torch backend: it makes vectors, or scores of pairs, and no text.

Owns: its settings, and which inputs run in a step. Must not know: the forward pass, the scheduler.

A prompt may arrive in chunks, which cost nothing; all of it runs in the step of its last chunk. There is no KV cache: blocks
are only numbers, so it does not matter what of a prompt was cached.
"""

import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headway_executor.backend import BackendConfig, BackendConfigError, StepBatch, StepResult
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.encoder import Encoder, load_encoder
from headway_executor.models.families.bert import read_encoder_config
from headway_executor.models.model_settings import dtype_of
from headway_executor.models.sentence_pooling import default_pooling
from headway_executor.sampling.pooling import NOT_FINITE, pooled
from headway_executor.setting_checks import TORCH, check_num_kv_blocks, max_model_len_of, option_of
from headway_proto.columns import Int32Array, encode_floats
from headway_proto.pooling import POOL_MEAN, POOL_SCORE
from headway_proto.step import ERRORED_ROW, BackendInfo, RowError, RowVector
from headway_proto.wording import shown


class OpenEncoder:
    """The steps of an open encoder."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        self._encoder = encoder
        self._device = device
        self._rows: dict[int, tuple[torch.Tensor, int]] = {}

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``ExecutorBackend.execute``."""
        started = time.perf_counter_ns()
        for row in batch.finished_rows.tolist():
            self._rows.pop(row, None)
        for new in batch.new_rows:
            self._rows[new.row] = torch.from_numpy(new.token_ids.astype(np.int64)).to(self._device), new.pooling
        sampling = batch.rows[batch.samples != 0].tolist()
        vectors, errors = self._vectors(sampling)
        failed = {error.row for error in errors}
        return StepResult(
            sampled_token_ids=np.array([ERRORED_ROW if row in failed else 0 for row in sampling], dtype=np.int32),
            errors=tuple(errors),
            vectors=tuple(vectors),
            device_time_us=(time.perf_counter_ns() - started) // 1000,
        )

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> None:
        """There is nothing in a block."""

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """Nor in one of another executor."""

    def _vectors(self, sampling: list[int]) -> tuple[list[RowVector], list[RowError]]:
        vectors: list[RowVector] = []
        errors: list[RowError] = []
        if not sampling:
            return vectors, errors
        hidden = self._encoder.run([self._rows[row][0] for row in sampling])
        for row, states in zip(sampling, hidden, strict=True):
            values = self._result_of(states, self._rows[row][1]).numpy()
            if np.isfinite(values).all():
                vectors.append(RowVector(row, encode_floats(values)))
            else:
                errors.append(RowError(row, NOT_FINITE))
        return vectors, errors

    def _result_of(self, states: torch.Tensor, pooling: int) -> torch.Tensor:
        if pooling == POOL_SCORE:
            assert self._encoder.head is not None
            return self._encoder.head(states)
        return pooled(states.to("cpu", torch.float64), pooling)


def open_encoder(config: BackendConfig, device: torch.device) -> tuple[OpenEncoder, BackendInfo]:
    """Open it.

    Raises:
        BackendConfigError: a setting cannot be honoured.
        ModelFilesError: the checkpoint cannot be served.
    """
    directory = Path(config.model)
    model = read_encoder_config(directory)
    _check(config)
    max_input = max_model_len_of(config.max_model_len, model.context)
    # The scheduler counts a token behind each input, which no encoder has.
    max_model_len = max_input + 1
    check_num_kv_blocks(config.num_kv_blocks, block_size=config.block_size, max_model_len=max_model_len)
    num_blocks = config.num_kv_blocks or -(-max_model_len // config.block_size) * config.max_num_seqs
    dtype = dtype_of(config, device)
    if config.num_threads:
        torch.set_num_threads(config.num_threads)
    with torch.inference_mode(), Checkpoint(directory, config.progress) as checkpoint:
        encoder = load_encoder(model, checkpoint, dtype=dtype, device=device)
        fingerprint = checkpoint.fingerprint()
    info = BackendInfo(
        backend="torch",
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        model_name=directory.resolve().name,
        model_fingerprint=fingerprint,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=(),
        max_num_rows=config.max_num_seqs,
        embedding_size=1 if model.scores_pairs else model.hidden_size,
        default_pooling=POOL_SCORE if model.scores_pairs else default_pooling(directory, POOL_MEAN),
        generates=False,
    )
    return OpenEncoder(encoder, device), info


def _check(config: BackendConfig) -> None:
    for field, value, allowed in (
        ("quantization", config.quantization, "none"),
        ("speculation", config.speculation, "off"),
    ):
        if value != allowed:
            raise BackendConfigError(f"{field} {value!r} is not allowed for an encoder; allowed: {allowed}")
    for name, value, allowed in (
        ("kernels", "compiled", "auto, eager"),
        ("activations", "bfloat16", "auto, exact"),
        ("activations", "int8", "auto, exact"),
    ):
        if option_of(config, TORCH, name) == value:
            raise BackendConfigError(
                f"backend_options {name} {value!r} is not allowed for an encoder; allowed: {allowed}"
            )
    if config.adapters:
        raise BackendConfigError(f"adapter {shown(min(config.adapters))} is not allowed for an encoder; allowed: none")
    if not config.place.is_alone:
        raise BackendConfigError(f"{config.place.size} ranks are not allowed for an encoder; allowed: 1")
    if config.num_threads < 0 or config.max_num_seqs < 1 or config.block_size < 1:
        raise BackendConfigError(
            f"num_threads {config.num_threads}, max_num_seqs {config.max_num_seqs} or block_size {config.block_size} is "
            "not allowed; allowed: 0, 1 and 1 or more"
        )
