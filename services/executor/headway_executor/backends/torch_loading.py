"""Opening a model of the torch backend: its kernels, its threads, its pool; of a rank of several, its part.

Owns: what "auto" and 0 mean here. Must not know: steps, sampling.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.memory.kv_pool import CODES, KvPool
from headway_executor.models.adapted import StepAdapters
from headway_executor.models.adapters import ModelAdapters, on_device
from headway_executor.models.compiled import CompiledModel, kernels_lack, library_for, part_for
from headway_executor.models.compiled_adapters import adapters_for
from headway_executor.models.compiled_loading import compiled_layout, load_compiled
from headway_executor.models.config import ModelConfig
from headway_executor.models.eager import EagerModel
from headway_executor.models.eager_loading import load_eager
from headway_executor.models.forward import ForwardPass
from headway_executor.models.kv_layout import KvLayout, vectors_layout
from headway_executor.models.model_settings import ModelSettings, require_head, require_head_of_draft
from headway_executor.models.part import ModelPart, part_of, whole
from headway_executor.models.pool_sizes import pool_sizes
from headway_executor.models.recurrence import RowStates
from headway_executor.models.rope import interleaved
from headway_executor.models.stage import stage_of
from headway_executor.models.state_memory import check_draft, check_speculation, states_of
from headway_executor.models.stored_names import as_stored
from headway_executor.models.tensor_shapes import check_tensors
from headway_executor.rank_place import ALONE, RankPlace
from headway_executor.ranks.group import RankGroup
from headway_executor.sampling.sampler import Sampler
from headway_executor.sampling.speculation.draft_model import DraftForward, DraftModel
from headway_executor.setting_checks import TORCH, option_of
from headway_kernels.cpu.library import CpuLibrary
from headway_process.processors import num_usable_cores
from headway_proto.wording import shown

_PARAMETERS_PER_THREAD = 16_000_000


def checked(checkpoint: Checkpoint, settings: ModelSettings, config: BackendConfig) -> ModelSettings:
    """Check the tensors against the model's configuration.

    Raises:
        ModelFilesError, BackendConfigError: see ``check_tensors``.
    """
    check_tensors(settings.model_config, checkpoint, config.quantization)
    model_config = as_stored(settings.model_config, checkpoint, config.warn)
    if config.speculation != "off":
        require_head(
            model_config, f"speculation {shown(config.speculation)}", "off"
        )  # Nothing is drawn that could be proposed.
    check_speculation(model_config, config)
    return settings._replace(model_config=model_config)


def load(
    config: BackendConfig,
    settings: ModelSettings,
    checkpoint: Checkpoint,
    device: torch.device,
    group: RankGroup | None = None,
    block_bytes_beside: int = 0,
) -> ForwardPass:
    """Load a model or this rank's part of it. The draft model's blocks take ``block_bytes_beside``.

    Raises:
        BackendConfigError: a setting cannot be honoured.
    """
    _check_threads(config.num_threads)
    model_config, dtype, max_model_len = settings
    library = _kernels(config, model_config, dtype, device)
    num_own_parameters = checkpoint.num_parameters // config.place.size
    num_threads = config.num_threads or _threads_that_pay(num_own_parameters, config.place)
    part = _part(config, model_config, library)
    between_stages = dtype if library is None else torch.float32
    stage = stage_of(part, group, dtype=between_stages, most_tokens=config.max_num_batched_tokens)
    places = _Places(config, settings, part, device, group, block_bytes_beside)
    layout = _layout(config, settings, part, library)
    if library is None:
        _warn_of_widening(config, checkpoint, dtype)
        torch.set_num_threads(num_threads)
        beside = StepAdapters(ModelAdapters(model_config, interleaved, part, place=partial(on_device, device=device)))
        decoder, embedding = load_eager(
            model_config,
            checkpoint,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            places=layout.places,
            stage=stage,
            adapters=beside,
            rounds_inputs=option_of(config, TORCH, "activations") == "auto",
        )
        states = places.states()
        pool = places.pool(layout, states)
        return EagerModel(model_config, decoder, embedding, pool, dtype, stage, beside, states)
    # Torch's threads spin for a while after each operator; this would disturb the threads of the kernels.
    torch.set_num_threads(1)
    compiled = load_compiled(
        model_config,
        checkpoint,
        library,
        quantization=config.quantization,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_threads=num_threads,
        stage=stage,
        activations=option_of(config, TORCH, "activations"),
        dtype=dtype,
    )
    # Codes that are rounded lose more than adapters in bfloat16.
    narrow = dtype if config.quantization == "none" else torch.bfloat16
    adapters = adapters_for(library, model_config, part, narrow)
    states = places.states()
    pool = places.pool(layout, states)
    return CompiledModel(compiled, pool, stage, adapters, states)


def draft_proposer(
    config: BackendConfig, draft: ModelSettings, pool: KvPool, device: torch.device, sampler: Sampler
) -> DraftModel:
    """Load the draft model, with as many blocks as ``pool``. All of it is here, on the cores of this rank."""
    with Checkpoint(Path(config.draft_model), config.progress) as checkpoint:
        own = msgspec.structs.replace(
            config,
            model=config.draft_model,
            place=ALONE,
            num_threads=config.num_threads or _threads_that_pay(checkpoint.num_parameters, config.place),
            num_kv_blocks=pool.num_blocks,
            swap_space_mib=0,
            adapters={},
            host_memory=lambda *_: None,
        )
        found = checked(checkpoint, draft, msgspec.structs.replace(own, speculation="off"))
        require_head_of_draft(found.model_config, config.draft_model)
        check_draft(found.model_config, config.draft_model)
        forward = load(own, found, checkpoint, device)
    return DraftModel(
        DraftForward(forward, sampler),
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        max_model_len=draft.max_model_len,
    )


def draft_block_bytes(config: BackendConfig, draft: ModelSettings, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of one of the draft model's blocks."""
    own = msgspec.structs.replace(config, place=ALONE, warn=lambda _: None)
    library = _kernels(own, draft.model_config, dtype, device)
    return _layout(own, draft._replace(dtype=dtype), whole(draft.model_config), library).block_bytes


def _layout(config: BackendConfig, settings: ModelSettings, part: ModelPart, library: CpuLibrary | None) -> KvLayout:
    if library is None:
        return vectors_layout(settings.model_config, part, config.block_size, settings.dtype, config.kv_cache_dtype)
    return compiled_layout(settings.model_config, part, library, config.block_size, settings.dtype)


def _check_threads(num_threads: int) -> None:
    if num_threads < 0:
        raise BackendConfigError(f"num_threads {num_threads} is not allowed; allowed: 0 (as the model needs) or more")


def _threads_that_pay(num_parameters: int, place: RankPlace) -> int:
    """For so many parameters on this rank, which has cores of its own. In a small model, threads wait longer than they work."""
    return max(1, min(num_usable_cores(place.size), num_parameters // _PARAMETERS_PER_THREAD))


def _part(config: BackendConfig, model_config: ModelConfig, library: CpuLibrary | None) -> ModelPart:
    is_fast = option_of(config, TORCH, "tensor_parallel_form") == "fast"
    if library is None:
        return part_of(model_config, config.place, is_fast=is_fast)
    if is_fast and config.place.tensor_parallel > 1:
        raise BackendConfigError(
            "backend_options tensor_parallel_form 'fast' is not allowed with the CPU kernels; allowed: exact, or fast with "
            "kernels eager"
        )
    return part_for(library, model_config, config.place)


def _kernels(
    config: BackendConfig, model_config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> CpuLibrary | None:
    asked = option_of(config, TORCH, "kernels")
    library = None if asked == "eager" else library_for(device, dtype)
    if library is not None and config.kv_cache_dtype == CODES:
        if asked == "compiled" or config.quantization != "none":
            other = f"kernels {asked}" if asked == "compiled" else f"quantization {config.quantization}"
            raise BackendConfigError(
                f"kv_cache_dtype {CODES!r} is not allowed with {other}, which needs the CPU kernels; allowed: auto"
            )
        config.warn("the CPU kernels have no KV cache of 8 bits; the model runs on torch operators, which are slower")
        library = None
    if library is not None and (lack := kernels_lack(library, model_config, config.place)):
        if asked == "compiled" or config.quantization != "none":
            name, value = (
                ("backend_options kernels", asked) if asked == "compiled" else ("quantization", config.quantization)
            )
            raise BackendConfigError(
                f"{name} {value!r} is not allowed with this model: the CPU kernels lack {lack}; allowed: "
                f"{'auto, eager' if asked == 'compiled' else 'none'}"
            )
        config.warn(f"the CPU kernels lack {lack}, which this model has; it runs on torch operators, which are slower")
        library = None
    if library is None:
        missing = "needs the CPU kernels: installed, on a processor they know, dtype float32 or bfloat16, device cpu"
        if asked == "compiled":
            raise BackendConfigError(f"backend_options kernels 'compiled' {missing}; allowed here: auto, eager")
        activations = option_of(config, TORCH, "activations")
        if activations not in ("auto", "exact"):
            raise BackendConfigError(
                f"backend_options activations {activations!r} {missing}; allowed here: auto, exact"
            )
        if config.quantization != "none":
            raise BackendConfigError(f"quantization {config.quantization!r} {missing}; allowed here: none")
    return library


def _warn_of_widening(config: BackendConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    if checkpoint.format is not None:
        config.warn(
            f"torch operators have no codes: the weights of the checkpoint ({checkpoint.format}) are widened to "
            f"{str(dtype).removeprefix('torch.')}, and take its memory"
        )


@dataclass(frozen=True, slots=True)
class _Places:
    """What decides the size of the pool."""

    config: BackendConfig
    settings: ModelSettings
    part: ModelPart
    device: torch.device
    group: RankGroup | None
    block_bytes_beside: int

    def states(self) -> RowStates | None:
        """Of this rank's layers; None if the model has none."""
        model_config = self.settings.model_config
        return states_of(model_config, self.part.layers, self.config, self.device, self.group)

    def pool(self, layout: KvLayout, states: RowStates | None) -> KvPool:
        """Make it, in the size that all ranks have."""
        config, device = self.config, self.device
        num_blocks, num_beside = pool_sizes(
            config,
            self.settings,
            states,
            self.group,
            device,
            block_bytes=layout.block_bytes,
            block_bytes_beside=self.block_bytes_beside,
        )
        return KvPool(
            num_layers=layout.num_layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            block=layout.block,
            device=device,
            num_host_blocks=num_beside,
            host_memory=config.host_memory,
            part_of=self.part.in_words,
        )
