"""How many blocks a model's pool has, on the device and in main memory: the same on all ranks.

Owns: this agreement. Must not know: which backend asks, where the memory comes from.
"""

import torch

from headway_executor.backend import BackendConfig
from headway_executor.memory.host_pool import num_host_blocks
from headway_executor.memory.kv_pool import DEVICE_SHARE, num_pool_blocks
from headway_executor.models.model_settings import ModelSettings
from headway_executor.models.recurrence import RowStates
from headway_executor.models.state_memory import counting_blocks
from headway_executor.ranks.group import RankGroup


def pool_sizes(
    config: BackendConfig,
    settings: ModelSettings,
    states: RowStates | None,
    group: RankGroup | None,
    device: torch.device,
    *,
    block_bytes: int,
    block_bytes_beside: int,
    device_share: float = DEVICE_SHARE,
) -> tuple[int, int]:
    """Return the blocks on the device and those outside. A model with ``states`` has none outside: they would not suffice.

    ``block_bytes``: of this rank's part; a draft model's blocks take ``block_bytes_beside``. ``device_share``: see
    ``num_pool_blocks``.

    Raises:
        BackendConfigError: see ``num_pool_blocks`` and ``num_host_blocks``.
    """
    num_blocks = num_pool_blocks(
        config,
        max_model_len=settings.max_model_len,
        block_bytes=block_bytes + block_bytes_beside,
        device=device,
        device_share=device_share,
        bytes_beside=0 if states is None else states.num_bytes,
    )
    num_blocks = counting_blocks(settings.model_config, config, num_blocks, settings.max_model_len)
    num_beside = num_host_blocks(
        swap_space_mib=config.swap_space_mib if states is None else 0,
        block_bytes=block_bytes,
        num_device_blocks=num_blocks,
        device=device,
        num_ranks=config.place.size,
    )
    if group is not None:
        num_blocks, num_beside = group.least([num_blocks, num_beside])
    return num_blocks, num_beside
