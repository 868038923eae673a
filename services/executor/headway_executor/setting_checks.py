"""The settings of the built-in backends, and the checks that need neither PyTorch nor a device.

Owns: their packages, quantizations, options. Must not know: how a backend runs. Errors are ``BackendConfigError``.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from headway_executor.backend import BackendConfig, BackendConfigError
from headway_proto.wording import shown

KV_CACHE_DTYPES = ("auto", "fp8")
SPECULATIONS = ("off", "ngram", "draft")
MOST_SPECULATIVE_TOKENS = 64


class Takes(NamedTuple):
    """``options``: names and values, the default first; an empty tuple allows any text. ``rank_devices``: the kinds of devices
    that several ranks may have. ``most_rows``: of ``max_num_seqs``.
    """

    packages: tuple[str, ...]
    quantizations: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    rank_devices: tuple[str, ...]
    most_rows: int = 1 << 16


RANK_TRANSPORT = "rank_transport"
_RANK_TRANSPORTS = ("auto", "shared", "gloo", "zmq")
TORCH = Takes(
    packages=("torch", "safetensors"),
    quantizations=("none", "int8", "int4"),
    options=MappingProxyType(
        {
            "kernels": ("auto", "compiled", "eager"),
            "tensor_parallel_form": ("exact", "fast"),
            RANK_TRANSPORT: _RANK_TRANSPORTS,
            "activations": ("auto", "bfloat16", "exact", "int8"),
        }
    ),
    rank_devices=("cpu",),
)
TRITON = Takes(
    packages=("torch", "safetensors", "triton", "cupy"),
    quantizations=("none", "int8", "int4", "fp8"),
    options=MappingProxyType(
        {
            "activations": ("auto", "exact", "fp8"),
            "chunk_attention": ("triton", "flash", "flashinfer", "auto"),
            "graphs": ("auto", "off"),
            RANK_TRANSPORT: _RANK_TRANSPORTS,
            "step_log": (),
            "tuning": (),
            "weights": ("checkpoint", "random"),
        }
    ),
    rank_devices=("cpu", "cuda"),
    # Some kernels take a row each along a grid's second dimension, which has no more places (CUDA C++ Programming Guide,
    # table of technical specifications).
    most_rows=65_535,
)
BUILT_IN: Mapping[str, Takes] = MappingProxyType({"torch": TORCH, "triton": TRITON})
"""The backends of real models, by name."""


def check_settings(config: BackendConfig, takes: Takes) -> None:
    """Check that the backend takes the settings."""
    if config.quantization not in takes.quantizations:
        raise BackendConfigError(
            f"quantization {shown(config.quantization)} is not allowed; allowed: {', '.join(takes.quantizations)}"
        )
    if config.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise BackendConfigError(
            f"kv_cache_dtype {shown(config.kv_cache_dtype)} is not allowed; allowed: {', '.join(KV_CACHE_DTYPES)}"
        )
    if config.max_num_seqs > takes.most_rows:
        raise BackendConfigError(
            f"max_num_seqs {config.max_num_seqs} is not allowed with this backend; allowed: 1 to {takes.most_rows}"
        )
    _check_options(config.options, takes.options)
    _check_speculation(config)
    _check_group(config, takes)


def check_interpreted(environment: Mapping[str, str]) -> None:
    """On a CPU, Triton can only interpret its kernels."""
    if environment.get("TRITON_INTERPRET") != "1":
        raise BackendConfigError(
            "device 'cpu' is not allowed for backend 'triton'; allowed: cuda, cuda:N, or cpu where the environment has "
            "TRITON_INTERPRET=1 (to try the kernels, slowly)"
        )


def option_of(config: BackendConfig, takes: Takes, name: str) -> str:
    """The value of an option, or its default."""
    return config.options.get(name, takes.options[name][0])


def max_model_len_of(max_model_len: int, context: int) -> int:
    """The most tokens of one request; 0 stands for the context."""
    if not 0 <= max_model_len <= context:
        raise BackendConfigError(
            f"max_model_len {max_model_len} is not allowed; allowed: 1 to the model's context, {context}, or 0 for all of it"
        )
    return max_model_len or context


def check_num_kv_blocks(num_kv_blocks: int, *, block_size: int, max_model_len: int) -> None:
    """Refuse blocks that cannot hold one request; 0 stands for as many as fit."""
    needed = -(-max_model_len // block_size)
    if num_kv_blocks and num_kv_blocks < needed:
        raise BackendConfigError(
            f"num_kv_blocks {num_kv_blocks} is not allowed; one request of max_model_len {max_model_len} takes {needed} "
            f"blocks of {block_size} tokens, so allowed: {needed} or more"
        )


def _check_options(options: Mapping[str, str], allowed: Mapping[str, Collection[str]]) -> None:
    for name, value in sorted(options.items()):
        if name not in allowed:
            raise BackendConfigError(f"backend_options {shown(name)} is not allowed; allowed: {', '.join(allowed)}")
        if allowed[name] and value not in allowed[name]:
            raise BackendConfigError(
                f"backend_options {name} {shown(value)} is not allowed; allowed: {', '.join(allowed[name])}"
            )


def _check_group(config: BackendConfig, takes: Takes) -> None:
    num_ranks = config.place.size
    if num_ranks == 1:
        return
    if config.device.partition(":")[0] not in takes.rank_devices:
        raise BackendConfigError(
            f"device {shown(config.device)} is not allowed with {num_ranks} ranks; allowed: {', '.join(takes.rank_devices)}"
        )


def _check_speculation(config: BackendConfig) -> None:
    if config.speculation not in SPECULATIONS:
        raise BackendConfigError(
            f"speculation {shown(config.speculation)} is not allowed; allowed: {', '.join(SPECULATIONS)}"
        )
    if not 1 <= config.num_speculative_tokens <= MOST_SPECULATIVE_TOKENS:
        raise BackendConfigError(
            f"num_speculative_tokens {config.num_speculative_tokens} is not allowed; "
            f"allowed: 1 to {MOST_SPECULATIVE_TOKENS}"
        )
    if (config.speculation == "draft") != bool(config.draft_model):
        raise BackendConfigError(
            f"draft_model {shown(config.draft_model)} is not allowed with speculation {config.speculation}; allowed: a "
            "checkpoint directory with speculation draft, nothing with any other"
        )
