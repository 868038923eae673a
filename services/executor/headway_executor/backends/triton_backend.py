"""The backend for GPUs: Triton and CuPy kernels, CUDA graphs, and a host that never makes the device wait.

Owns: opening a model, one step. Must not know: epochs, how a kernel computes.

Token ids, block tables and sampling parameters stay on the device. Step k + 1 is launched while step k runs, so
``execute`` returns a future.

Decode steps and small steps with chunks are CUDA graphs. ``open`` runs the largest step, which allocates everything;
the pool gets the rest of the memory. Tests run it on a CPU (``TRITON_INTERPRET=1``), without graphs, streams and CuPy.
"""

import contextlib
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from headway_executor.backend import BackendConfig, BackendConfigError, ReadAdapter, StepBatch, StepResult
from headway_executor.backends.joining import joined, num_lanes_of, parting_on_error, slowest
from headway_executor.checkpoint.random_weights import RandomCheckpoint
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.gpu.chunk_library import OPTION, OWN_KERNEL
from headway_executor.gpu.decoder import check_kernels_have
from headway_executor.gpu.device_adapters import DeviceAdapter, with_table, without_shared_channels
from headway_executor.gpu.device_parts import DeviceParts, ModelFiles
from headway_executor.gpu.device_stage import DeviceStage
from headway_executor.gpu.drawing_steps import DrawingSteps
from headway_executor.gpu.following_steps import FollowingSteps
from headway_executor.gpu.open_model import OpenModel, StepLauncher
from headway_executor.gpu.preparation import open_pools, record_graphs, try_every_size
from headway_executor.gpu.runtime import runtime_for
from headway_executor.gpu.tokens_among_mates import TokensAmongMates
from headway_executor.host.device_errors import translating
from headway_executor.models.adapters import AdapterWeights, ModelAdapters, on_device
from headway_executor.models.config import ModelConfig
from headway_executor.models.families.bert import is_encoder
from headway_executor.models.model_settings import (
    ModelSettings,
    device_of,
    draft_settings_of,
    require_full_precision,
    require_head,
    require_head_of_draft,
    settings_of,
)
from headway_executor.models.part import ModelPart, part_of, whole
from headway_executor.models.rope import halves_in_front
from headway_executor.models.state_memory import check_draft, check_speculation
from headway_executor.models.stored_names import as_stored
from headway_executor.models.tensor_shapes import check_tensors, expected_tensors
from headway_executor.ranks.group import RankGroup
from headway_executor.sampling.constraints.rows import ConstrainedRows, compiler_for
from headway_executor.sampling.drawn_tokens import DrawnTokensOut, drawn_channel
from headway_executor.setting_checks import TRITON, check_settings, option_of
from headway_kernels.gpu.linear.float8 import is_native
from headway_proto.adapters import LoadedAdapter
from headway_proto.columns import Int32Array
from headway_proto.step import BackendInfo


class TritonBackend:
    """The ``ExecutorBackend`` for Triton.

    Of several ranks, each has a device, and a part of the model; see ``gpu.device_stage`` and ``gpu.stage_mates``.

    Options: ``activations``: see ``gpu.device_weights``; ``chunk_attention``: see ``gpu.chunk_library``; ``graphs``, "auto" or
    "off"; ``rank_transport``: see ``backends.joining``; ``step_log``, a file with a line per step; ``tuning``: see ``gpu.tuning_file``;
    ``weights``, "checkpoint" or "random" (needs only config.json).
    """

    reads_block_table = False
    """It keeps its own block tables, from ``new_blocks``."""

    def __init__(self) -> None:
        self._model: OpenModel | None = None
        self._group: RankGroup | None = None

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``."""
        device = device_of(config)
        check_settings(config, TRITON)
        graphs = option_of(config, TRITON, "graphs") != "off"
        runtime = runtime_for(device)
        if is_encoder(Path(config.model)):
            raise BackendConfigError("backend 'triton' is not allowed with an encoder; allowed: backend torch")
        settings = settings_of(config, device)
        model_config, dtype, max_model_len = settings
        check_kernels_have(model_config, config.kv_cache_dtype, config.place)
        if config.place.tensor_parallel > 1 and option_of(config, TRITON, OPTION) != OWN_KERNEL:
            raise BackendConfigError(
                f"backend_options {OPTION} {option_of(config, TRITON, OPTION)!r} is not allowed with tensor_parallel "
                f"{config.place.tensor_parallel}; allowed: {OWN_KERNEL}"
            )
        if option_of(config, TRITON, "activations") == "fp8" and not is_native(device):
            raise BackendConfigError(
                "backend_options activations 'fp8' is not allowed with a compute capability below 8.9; allowed here: auto, exact"
            )
        require_full_precision()
        draft = _draft_settings(config, settings)
        part = part_of(model_config, config.place)
        self._group = joined(config, TRITON)
        with (
            parting_on_error(self._group),
            torch.inference_mode(),
            runtime.on_stream(),
            _open_weights(config, settings, device) as weights,
            _open_draft(config, draft) as draft_weights,
        ):
            settings = settings._replace(model_config=as_stored(model_config, weights, config.warn))
            require_head(settings.model_config, "backend 'triton'", "backend torch")
            check_speculation(settings.model_config, config)
            adapters = _adapters(config, settings.model_config, part, device)
            draft_files = None
            if draft is not None and draft_weights is not None:
                found = as_stored(draft.model_config, draft_weights, config.warn)
                require_head_of_draft(found, config.draft_model)
                check_draft(found, config.draft_model)
                draft_files = ModelFiles(draft._replace(model_config=found), draft_weights, whole(found))
            files = ModelFiles(settings, weights, part)
            parts = DeviceParts(config, files, runtime, self._group, adapters, draft_files)
            fingerprint = weights.fingerprint()
            mover = open_pools(parts)
            constraints = _constraints(config, model_config) if config.place.rank == 0 else None
            self._model = OpenModel(parts, mover, _steps(config, parts, constraints))
            if runtime.is_cuda and graphs:
                record_graphs(parts)
            elif runtime.is_cuda:
                try_every_size(parts)
            swap_us_per_block = slowest(mover.measure_swap_us(), self._group)
        return BackendInfo(
            backend="triton",
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            model_name=Path(config.model).resolve().name,
            model_fingerprint=fingerprint,
            num_blocks=parts.target.num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            max_num_rows=parts.max_num_rows,
            num_host_blocks=mover.num_host_blocks,
            swap_us_per_block=swap_us_per_block,
            max_num_batched_tokens=config.max_num_batched_tokens,
            supports_prompt_logprobs=True,
            supports_constraints=constraints is not None and constraints.is_supported,
            max_speculative_tokens=0 if config.speculation == "off" else config.num_speculative_tokens,
            num_lanes=num_lanes_of(config),
            supports_adapters=True,
            adapters=adapters.loaded,
            keeps_states=parts.states is not None,
        )

    def execute(self, batch: StepBatch) -> StepResult | Future[StepResult]:
        """See ``ExecutorBackend.execute``."""
        model = self._opened
        with translating(batch), torch.inference_mode(), model.parts.runtime.on_stream():
            return model.execute(batch)

    def move_blocks(self, *, copies: Int32Array, swap_out: Int32Array, swap_in: Int32Array) -> Future[None] | None:
        """See ``ExecutorBackend.move_blocks``."""
        model = self._opened
        with translating(), torch.inference_mode(), model.parts.runtime.on_stream():
            return model.move(copies=copies, swap_out=swap_out, swap_in=swap_in)

    def load_blocks(self, contents: NDArray[np.uint8], blocks: Int32Array) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        model = self._opened
        with translating(), torch.inference_mode(), model.parts.runtime.on_stream():
            model.load(contents, blocks)

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """See ``AdapterBackend.read_adapter``. Only ``load_adapter`` uses the device: it may be recording."""
        return self._opened.adapters.read(name, directory)

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``."""
        model = self._opened
        with translating(), torch.inference_mode(), model.parts.runtime.on_stream():
            return model.load_adapter(read)

    def unload_adapter(self, name: str) -> None:
        """See ``AdapterBackend.unload_adapter``."""
        self._opened.adapters.unload(name)

    def close(self) -> None:
        """See ``ExecutorBackend.close``."""
        if self._model is not None:
            self._model.close()
            self._model = None
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def _opened(self) -> OpenModel:
        if self._model is None:
            raise RuntimeError("the backend is not open")
        return self._model


def _open_weights(
    config: BackendConfig, settings: ModelSettings, device: torch.device
) -> Checkpoint | RandomCheckpoint:
    model_config, dtype, _ = settings
    if option_of(config, TRITON, "weights") == "random":
        return RandomCheckpoint(expected_tensors(model_config), seed=config.seed, dtype=dtype, device=device)
    checkpoint = Checkpoint(Path(config.model))
    check_tensors(model_config, checkpoint, config.quantization)
    return checkpoint


def _constraints(config: BackendConfig, model_config: ModelConfig) -> ConstrainedRows:
    ends = model_config.eos_token_ids
    return ConstrainedRows(compiler_for(Path(config.model), vocab_size=model_config.vocab_size, eos_token_ids=ends))


def _steps(config: BackendConfig, parts: DeviceParts, constraints: ConstrainedRows | None) -> StepLauncher:
    """What this rank does in a step; ``constraints``: of the rank that draws tokens."""
    group, mates = parts.stage.group, parts.mates
    stage = DeviceStage(parts.stage, parts.runtime, parts.target.decoder.hidden)
    among = TokensAmongMates(parts, mates) if mates is not None and config.place.pipeline_parallel == 1 else None
    drawn = None if group is None or among is not None else drawn_channel(group, config)
    if constraints is not None:
        return DrawingSteps(parts, stage, constraints, among, None if drawn is None else DrawnTokensOut(drawn))
    return FollowingSteps(parts, stage, among, drawn)


def _draft_settings(config: BackendConfig, settings: ModelSettings) -> ModelSettings | None:
    """Those of the model that proposes tokens, if one does on this rank: the first tells others what it proposes."""
    if config.speculation != "draft" or config.place.rank:
        return None
    draft = draft_settings_of(config, settings.model_config, settings.max_model_len)
    check_kernels_have(draft.model_config, config.kv_cache_dtype)
    return draft._replace(dtype=settings.dtype)


def _open_draft(config: BackendConfig, draft: ModelSettings | None) -> AbstractContextManager[Checkpoint | None]:
    if draft is None:
        return contextlib.nullcontext()
    checkpoint = Checkpoint(Path(config.draft_model))
    check_tensors(draft.model_config, checkpoint, config.quantization)
    return checkpoint


def _adapters(config: BackendConfig, model_config: ModelConfig, part: ModelPart, device: torch.device) -> ModelAdapters:
    def placed(weights: AdapterWeights) -> DeviceAdapter:
        return with_table(on_device(without_shared_channels(weights, model_config.attention), device))

    adapters = ModelAdapters(model_config, halves_in_front, part, place=placed)
    for name, directory in config.adapters.items():
        adapters.load(adapters.read(name, directory))
    return adapters
