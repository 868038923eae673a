"""Configuration errors that can be found before the executor starts.

Owns: quick checks without PyTorch or a device. Must not know: how a backend runs. The backend checks everything again.
"""

import os
import subprocess
import sys
from pathlib import Path

from headway_executor.backend import BackendConfigError, ModelFilesError
from headway_executor.checkpoint.fields import CONFIG_FILE, PICKLE_SUFFIXES, WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from headway_executor.config import ExecutorConfig
from headway_executor.host.torch_build import torch_build
from headway_executor.models.families import read_model_config
from headway_executor.models.families.bert import is_encoder, read_encoder_config
from headway_executor.setting_checks import (
    BUILT_IN,
    check_interpreted,
    check_num_kv_blocks,
    check_settings,
    max_model_len_of,
)
from headway_executor.startup.registry import check_installed
from headway_proto.wording import shown

_COUNT_S = 20.0
# The driver's library keeps devices open, so a short process loads it.
_COUNT_DEVICES = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print(0)
else:
    count = ctypes.c_int(0)
    if driver.cuInit(0) == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    print(count.value)
"""


def check(config: ExecutorConfig) -> None:
    """Check whether the executor could start; ``config`` has passed ``validate``.

    Raises:
        BackendConfigError: a setting does not fit this backend, model or host.
        ModelFilesError: the checkpoint lacks a file, or cannot be served.
    """
    check_installed(config.backend)
    if config.backend == "simulated":
        from headway_executor.simulated.settings import settings_of as check_simulated

        check_simulated(config.backend_config())
        return
    takes = BUILT_IN.get(config.backend)
    if takes is None:
        return
    _check_device(config)
    check_settings(config.backend_config(), takes)
    _check_quantization(config)
    directory = Path(config.model)
    if config.backend_options.get("weights") != "random":
        _check_files(directory)
    max_model_len = max_model_len_of(config.max_model_len, _context_of(directory, config.backend))
    check_num_kv_blocks(config.num_kv_blocks, block_size=config.block_size, max_model_len=max_model_len)
    if config.draft_model and config.backend_config().place.rank == 0:
        read_model_config(Path(config.draft_model))


def _context_of(directory: Path, backend: str) -> int:
    if backend == "torch" and is_encoder(directory):
        return read_encoder_config(directory).context
    return read_model_config(directory).context


def _check_files(directory: Path) -> None:
    lacking = [] if (directory / CONFIG_FILE).exists() else [CONFIG_FILE]
    # Loading reports weights of another kind.
    has_others = any(path.suffix in PICKLE_SUFFIXES for path in directory.iterdir())
    if not has_others and not any((directory / name).exists() for name in (WEIGHTS_FILE, WEIGHTS_INDEX_FILE)):
        lacking.append(WEIGHTS_FILE)
    if lacking:
        raise ModelFilesError(
            f"{directory}: no {' and no '.join(lacking)}; allowed: a Hugging Face checkpoint directory with {CONFIG_FILE}, "
            f"tokenizer.json and {WEIGHTS_FILE} or {WEIGHTS_INDEX_FILE}"
        )


def _check_quantization(config: ExecutorConfig) -> None:
    if config.backend == "torch" and config.quantization != "none":
        if config.device != "cpu":
            raise BackendConfigError(
                f"device {shown(config.device)} is not allowed with quantization {config.quantization}; allowed: cpu"
            )
        if config.dtype not in {"auto", "float32", "bfloat16"}:
            raise BackendConfigError(
                f"dtype {shown(config.dtype)} is not allowed with quantization {config.quantization}; "
                "allowed: auto, float32, bfloat16"
            )


def _check_device(config: ExecutorConfig) -> None:
    kind, _, index = config.device.partition(":")
    if kind == "cpu":
        if config.backend == "triton":
            check_interpreted(os.environ)
        return
    build = torch_build()
    if build is None or build.hip:
        return
    if not build.cuda:
        raise BackendConfigError(
            f"device {shown(config.device)} is not allowed; this PyTorch ({build.version}) is built without CUDA, so allowed: "
            "cpu"
        )
    count, num_ranks = num_cuda_devices(), config.backend_config().place.size
    # Each rank takes the device of its number.
    if count is not None and int(index or num_ranks - 1) >= count:
        ranks = f" with {num_ranks} ranks" if num_ranks > 1 else ""
        raise BackendConfigError(
            f"device {shown(config.device)} is not allowed{ranks}; this host has {count} CUDA devices"
        )


def num_cuda_devices() -> int | None:
    """Count the devices that the driver shows here; None if unknown."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _COUNT_DEVICES], capture_output=True, timeout=_COUNT_S, check=True
        )
        return int(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
