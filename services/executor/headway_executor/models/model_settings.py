"""A backend's settings, checked against the model and the host.

Owns: these checks, "auto" and 0. Must not know: any backend.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from headway_executor.backend import BackendConfig, BackendConfigError, ModelFilesError
from headway_executor.checkpoint.fields import read_json_object
from headway_executor.checkpoint.stored_weights.formats import asks_for_kv_codes
from headway_executor.models.config import ModelConfig
from headway_executor.models.families import read_model_config
from headway_executor.setting_checks import check_num_kv_blocks, max_model_len_of
from headway_proto.wording import shown


class ModelSettings(NamedTuple):
    """``max_model_len`` is in tokens."""

    model_config: ModelConfig
    dtype: torch.dtype
    max_model_len: int


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def settings_of(config: BackendConfig, device: torch.device) -> ModelSettings:
    """Check the settings against the model's configuration.

    Raises:
        BackendConfigError: a setting does not fit the model.
        ModelFilesError: see ``read_model_config``.
    """
    model_config = read_model_config(Path(config.model))
    dtype = dtype_of(config, device, model_config.dtype)
    max_model_len = max_model_len_of(config.max_model_len, model_config.context)
    _check_block_size(config.block_size)
    check_num_kv_blocks(config.num_kv_blocks, block_size=config.block_size, max_model_len=max_model_len)
    _check_max_num_seqs(config.max_num_seqs)
    beyond = [rope for rope in model_config.ropes if rope.kind == "dynamic" and max_model_len > rope.original_context]
    if beyond:
        config.warn(
            f"rope_type dynamic: max_model_len {max_model_len} is beyond the model's own context, "
            f"{beyond[0].original_context}; a longer prompt gets other tokens than from transformers (see docs/models.md)"
        )
    if model_config.context_note:
        config.warn(model_config.context_note)
    if config.kv_cache_dtype == "auto" and asks_for_kv_codes(Path(config.model)):
        config.warn(
            f"the checkpoint is meant for keys and values of few bits; kv_cache_dtype auto keeps them in {str(dtype).removeprefix('torch.')}, "
            "which is more exact and takes more memory"
        )
    return ModelSettings(model_config, dtype, max_model_len)


def device_of(config: BackendConfig) -> torch.device:
    """Return the device. Raises ``BackendConfigError``: this host does not have it."""
    try:
        device = torch.device(config.device)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in {"cpu", "cuda"}:
        raise BackendConfigError(f"device {shown(config.device)} is not allowed; allowed: cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise BackendConfigError(f"device {shown(config.device)} is not allowed; this host has {count} CUDA devices")
    return device


def require_full_precision() -> None:
    """Let CUDA's libraries multiply what they are given and add in float32, whatever the environment says.

    Sums in 16 bits would save little time and lose much precision. Some containers ask for TF32 in place of float32.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def draft_settings_of(config: BackendConfig, model_config: ModelConfig, max_model_len: int) -> ModelSettings:
    """Read and check the draft model's configuration.

    Raises:
        BackendConfigError: the two models have different tokens.
        ModelFilesError: see ``read_model_config``.
    """
    draft = read_model_config(Path(config.draft_model))
    if draft.vocab_size != model_config.vocab_size or not _have_same_tokens(config.model, config.draft_model):
        raise BackendConfigError(
            f"draft_model {shown(config.draft_model)} is not allowed; its vocabulary is another than the model's, with "
            f"{draft.vocab_size} tokens beside {model_config.vocab_size}; allowed: a model with the same tokens"
        )
    dtype = dtype_of(config, device_of(config), model_config.dtype)
    return ModelSettings(draft, dtype, min(max_model_len, draft.context))


def require_head(model_config: ModelConfig, field: str, allowed: str) -> None:
    """Raise ``BackendConfigError``, which names the ``field``: this model makes no text."""
    if not model_config.has_head:
        raise BackendConfigError(
            f"{field} is not allowed with a model without a head, which makes vectors and no text; allowed: {allowed}"
        )


def require_head_of_draft(model_config: ModelConfig, draft_model: str) -> None:
    """Raise ``BackendConfigError``: the draft model makes no text."""
    require_head(model_config, f"draft_model {shown(draft_model)}", "one with a head")


def _have_same_tokens(model: str, draft_model: str) -> bool:
    files = [Path(directory) / "tokenizer.json" for directory in (model, draft_model)]
    if not all(file.is_file() for file in files):
        return True
    vocabulary, draft_vocabulary = (_vocabulary(file) for file in files)
    return bool(vocabulary == draft_vocabulary)


def _vocabulary(file: Path) -> object:
    model = read_json_object(file).values.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise ModelFilesError(f"{file}: names no vocabulary; allowed: a Hugging Face tokenizer file")
    return model["vocab"]


def dtype_of(config: BackendConfig, device: torch.device, stored: str = "float32") -> torch.dtype:
    """What the model computes in. On a CPU, float32 is the fastest and holds every ``stored`` value.

    Raises:
        BackendConfigError: it is none of the allowed.
    """
    if config.dtype == "auto":
        return _DTYPES["float32" if device.type == "cpu" else stored]
    if config.dtype not in _DTYPES:
        raise BackendConfigError(f"dtype {shown(config.dtype)} is not allowed; allowed: auto, {', '.join(_DTYPES)}")
    return _DTYPES[config.dtype]


def _check_max_num_seqs(max_num_seqs: int) -> None:
    if max_num_seqs < 1:
        raise BackendConfigError(f"max_num_seqs {max_num_seqs} is not allowed; allowed: 1 or more")


def _check_block_size(block_size: int) -> None:
    if block_size < 1 or block_size & (block_size - 1):
        raise BackendConfigError(f"block_size {block_size} is not allowed; allowed: a power of two")
