"""What the kernels of ``gpu`` compute, in plain torch, one function for each: slow, obvious, on any device.

Owns: the oracles. Must not know: how a kernel cuts its work.
"""

from torch import Tensor


def copy_blocks(layers: Tensor, pairs: Tensor) -> None:
    """``block_moves.copy_blocks``: every source is read before the first destination is written."""
    sources, destinations = pairs.long()
    layers[:, destinations] = layers[:, sources]


def swap_out(layers: Tensor, host: Tensor, pairs: Tensor) -> None:
    """``block_moves.swap_out``."""
    blocks, host_blocks = pairs.long()
    host[host_blocks.to(host.device)] = layers[:, blocks].transpose(0, 1).to(host.device)


def swap_in(layers: Tensor, host: Tensor, pairs: Tensor) -> None:
    """``block_moves.swap_in``."""
    host_blocks, blocks = pairs.long()
    layers[:, blocks] = host[host_blocks.to(host.device)].transpose(0, 1).to(layers.device)
