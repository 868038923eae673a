"""The settings of the simulated backend.

Owns: parsing and checking. Must not know: rows.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec

from headway_executor.backend import (
    AUTOMATIC_SWAP_SPACE,
    BackendConfig,
    BackendConfigError,
    ModelFilesError,
)
from headway_executor.models.families import read_model_config
from headway_executor.setting_checks import check_num_kv_blocks, max_model_len_of
from headway_proto.wording import shown

_AtLeast0 = Annotated[float, msgspec.Meta(ge=0)]
_MAX_DEFAULT_BLOCKS = 16_384
_MAX_HOST_BLOCKS = 1 << 24
# Keys and values of one token in a model of 8 billion parameters: 32 layers of 8 heads of 128 numbers, 16 bits each.
_TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
_SWAP_BYTES_PER_US = 25_000


class SimulatedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The backend's own options, given as text.

    ``vocab_size``, ``eos_token_id`` and ``context_length`` count without a checkpoint directory. A step takes
    ``step_base_us + per_token_us * tokens + per_seq_us * rows + per_context_token_us * attended tokens`` microseconds,
    and ``swap_us_per_block`` for every swapped block (None: an 8-billion-parameter model at 25 GB/s).

    Failures: a row whose last token is ``nan_row_token`` reports NaN logits. A step of more than ``oom_over_tokens``
    tokens runs out of memory. A prompt with ``fail_on_token`` fails the step, with ``lose_device_on_token`` loses the
    device, with ``kill_on_token`` kills the process.
    """

    vocab_size: Annotated[int, msgspec.Meta(ge=2)] = 32_000
    eos_token_id: Annotated[int, msgspec.Meta(ge=0)] = 2
    context_length: Annotated[int, msgspec.Meta(ge=1)] = 4096
    eos_probability: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    verify_kv: bool = True
    real_time: bool = True
    step_base_us: _AtLeast0 = 0.0
    per_token_us: _AtLeast0 = 0.0
    per_seq_us: _AtLeast0 = 0.0
    per_context_token_us: _AtLeast0 = 0.0
    swap_us_per_block: _AtLeast0 | None = None
    nan_row_token: int | None = None
    oom_over_tokens: int | None = None
    fail_on_token: int | None = None
    lose_device_on_token: int | None = None
    kill_on_token: int | None = None
    max_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    speculative_acceptance: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5


class _Model(msgspec.Struct, frozen=True):
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    context_length: int


class _CheckpointConfig(msgspec.Struct, frozen=True):
    vocab_size: Annotated[int, msgspec.Meta(ge=2)]
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1)]
    eos_token_id: int | list[int] | None = None


_SIZES = ("vocab_size", "max_position_embeddings")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The checked settings of one backend."""

    options: SimulatedOptions
    model_name: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    num_blocks: int
    num_host_blocks: int
    max_speculative_tokens: int
    swap_us_per_block: float


def settings_of(config: BackendConfig) -> Settings:
    """Check the settings of ``config``.

    Raises:
        BackendConfigError: a setting cannot be honoured.
        ModelFilesError: the directory has no usable config.json.
    """
    options = _parse_options(config.options)
    _check_at_least("block_size", config.block_size, 1)
    _check_at_least("max_num_seqs", config.max_num_seqs, 1)
    model = _describe_model(config.model, options)
    max_model_len = max_model_len_of(config.max_model_len, model.context_length)
    num_blocks = _num_blocks(config, max_model_len)
    num_host_blocks = _num_host_blocks(config, num_blocks)
    num_speculative_tokens = 0 if config.speculation == "off" else config.num_speculative_tokens
    return Settings(
        options=options,
        model_name=Path(config.model).name or "simulated",
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_speculative_tokens=options.max_speculative_tokens or num_speculative_tokens,
        swap_us_per_block=_swap_us_per_block(options, config.block_size),
    )


def _parse_options(options: dict[str, str]) -> SimulatedOptions:
    fields = {field.name: field.type for field in msgspec.structs.fields(SimulatedOptions)}
    parsed = {}
    for name, text in options.items():
        if name not in fields:
            raise BackendConfigError(f"backend_options: {shown(name)} is not known; allowed: {', '.join(fields)}")
        try:
            parsed[name] = msgspec.convert(text, fields[name], strict=False)
        except msgspec.ValidationError as error:
            raise BackendConfigError(f"backend_options: {name}={shown(text)} is not allowed; {error}") from error
    result = SimulatedOptions(**parsed)
    if result.eos_token_id >= result.vocab_size:
        allowed = f"0 to {result.vocab_size - 1}"
        raise BackendConfigError(
            f"backend_options: eos_token_id={result.eos_token_id} is not allowed; allowed: {allowed}"
        )
    return result


def _describe_model(model: str, options: SimulatedOptions) -> _Model:
    path = Path(model)
    if not model or not (path.is_dir() or "/" in model):
        return _Model(options.vocab_size, (options.eos_token_id,), options.context_length)
    try:
        values = _of_text(json.loads((path / "config.json").read_bytes()))
        config = msgspec.convert(_with_defaults(path, values), _CheckpointConfig)
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"model: {shown(model)}: its config.json cannot be read: {error}") from error
    eos = config.eos_token_id
    eos_token_ids = tuple(sorted(set(eos if isinstance(eos, list) else [] if eos is None else [eos])))
    if any(not 0 <= token < config.vocab_size for token in eos_token_ids) or len(eos_token_ids) >= config.vocab_size:
        raise ModelFilesError(f"model: {shown(model)}: eos_token_id {shown(eos)} is not within the vocabulary")
    return _Model(config.vocab_size, eos_token_ids, config.max_position_embeddings)


def _of_text(values: object) -> object:
    """Of a checkpoint of several models, the fields of its text."""
    text = values.get("text_config") if isinstance(values, dict) else None
    return {**values, **text} if isinstance(values, dict) and isinstance(text, dict) else values


def _with_defaults(directory: Path, values: object) -> object:
    """Files may leave out what the family has a default for."""
    if not isinstance(values, dict) or all(values.get(field) is not None for field in _SIZES):
        return values
    with suppress(ModelFilesError):  # Of any other model, the next line will name the field.
        served = read_model_config(directory)
        return {**values, "vocab_size": served.vocab_size, "max_position_embeddings": served.context}
    return values


def _check_at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise BackendConfigError(f"{field}: {value} is not allowed; allowed: {least} or more")


def _num_blocks(config: BackendConfig, max_model_len: int) -> int:
    check_num_kv_blocks(config.num_kv_blocks, block_size=config.block_size, max_model_len=max_model_len)
    if config.num_kv_blocks:
        return config.num_kv_blocks
    for_one = -(-max_model_len // config.block_size)
    return max(for_one, min(for_one * config.max_num_seqs, _MAX_DEFAULT_BLOCKS))


def _num_host_blocks(config: BackendConfig, num_blocks: int) -> int:
    if config.swap_space_mib == AUTOMATIC_SWAP_SPACE:
        return num_blocks
    space, block_bytes = config.swap_space_mib << 20, config.block_size * _TOKEN_BYTES
    if 0 < space < block_bytes:
        raise BackendConfigError(
            f"swap_space_mib: {config.swap_space_mib} is not allowed; one block takes {block_bytes} bytes, so allowed: "
            f"0 (no swapping), -1 (automatic), {-(-block_bytes >> 20)} or more"
        )
    return min(space // block_bytes, _MAX_HOST_BLOCKS)


def _swap_us_per_block(options: SimulatedOptions, block_size: int) -> float:
    if options.swap_us_per_block is not None:
        return options.swap_us_per_block
    return block_size * _TOKEN_BYTES / _SWAP_BYTES_PER_US
