"""Room for the states of rows, in a model that has layers with a state; and what such a model cannot do.

Owns: the share of the memory, how many rows have a state, these refusals. Must not know: which backend asks, how a state is
computed.
"""

from collections.abc import Sequence

import torch

from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.memory.kv_pool import free_bytes
from headway_executor.models.config import ModelConfig
from headway_executor.models.recurrence import RowStates, state_bytes
from headway_executor.ranks.group import RankGroup
from headway_proto.wording import shown

_SHARE = 0.25
_MOST_EMPTY_BLOCKS = 1 << 18
"""Of a model without keys and values: they only count tokens, and the scheduler has columns of them."""


def states_of(
    model_config: ModelConfig,
    layers: Sequence[int],
    config: BackendConfig,
    device: torch.device,
    group: RankGroup | None = None,
) -> RowStates | None:
    """Of these layers, for as many rows as a part of the free memory has room for, on all ranks; None if the model has none.

    Raises:
        BackendConfigError: there is no room for one.
    """
    if not model_config.has_states:
        return None
    own = model_config.recurrences(layers)
    room = free_bytes(device) * _SHARE / (config.place.size if device.type == "cpu" else 1)
    num_rows = min(config.max_num_seqs, int(room // max(1, state_bytes(own))))
    if group is not None:
        (num_rows,) = group.least([num_rows])
    if not num_rows:
        raise BackendConfigError(
            f"the model's state of one request, {state_bytes(own) >> 20} MiB, does not fit in {int(room) >> 20} MiB, a "
            "quarter of the free memory"
        )
    if num_rows < config.max_num_seqs:
        config.warn(
            f"each request has a state of {state_bytes(own) / (1 << 20):.1f} MiB, so {num_rows} fit in a quarter of the "
            f"free memory, and not max_num_seqs {config.max_num_seqs}"
        )
    return RowStates(own, num_rows, device)


def counting_blocks(model_config: ModelConfig, config: BackendConfig, num_blocks: int, max_model_len: int) -> int:
    """``num_blocks`` that fit, or as many as are of use in a model without keys and values."""
    if model_config.num_cached(range(model_config.num_layers)) or config.num_kv_blocks:
        return num_blocks
    return min(num_blocks, max(_MOST_EMPTY_BLOCKS, -(-max_model_len // config.block_size)))


def check_speculation(model_config: ModelConfig, config: BackendConfig) -> None:
    """Raise ``BackendConfigError``: a state cannot go back to before a token that was proposed."""
    if model_config.has_states and config.speculation != "off":
        raise BackendConfigError(
            f"speculation {shown(config.speculation)} is not allowed with this model, which has layers with a state instead of "
            "attention; allowed: off"
        )


def check_draft(model_config: ModelConfig, draft_model: str) -> None:
    """The same of a model that proposes tokens."""
    if model_config.has_states:
        raise BackendConfigError(
            f"draft_model {shown(draft_model)} is not allowed; it has layers with a state instead of attention, which "
            "cannot go back; allowed: a model with attention in all layers"
        )
