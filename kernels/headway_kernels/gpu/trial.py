"""A trial of each toolkit: one kernel is compiled, launched and checked.

Owns: the trials. Must not know: real kernels.

At the first launch, Triton needs a C compiler on the host, CuPy a compiler library that fits the driver.
"""

import torch
import triton
import triton.language as tl

_COUNT = 100
_SIZE = 128


class TrialFailed(RuntimeError):  # noqa: N818 (it names the finding)
    """A kernel ran and gave a wrong result."""


@triton.jit
def _add_one(values, count, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    inside = places < count
    tl.store(values + places, tl.load(values + places, mask=inside) + 1, mask=inside)


def try_triton(device: torch.device) -> None:
    """Run a Triton kernel; raise any error that it meets."""
    values = torch.zeros(_SIZE, device=device)
    _add_one[(1,)](values, _COUNT, _SIZE)
    if values.sum().item() != _COUNT:
        raise TrialFailed("a kernel has computed something else than it should")


def try_cupy(device: torch.device) -> None:
    """Move a block to main memory and back with CuPy; raise any error."""
    from headway_kernels.gpu import block_moves

    layers = torch.arange(2 * 2 * _SIZE, device=device).reshape(2, 2, _SIZE)
    host = torch.zeros((1, 2, _SIZE), dtype=layers.dtype, pin_memory=True)
    block_moves.swap_out(layers, host, torch.tensor([[1], [0]], dtype=torch.int32, device=device))
    block_moves.swap_in(layers, host, torch.tensor([[0], [0]], dtype=torch.int32, device=device))
    torch.cuda.synchronize(device)
    if not torch.equal(layers[:, 0], layers[:, 1]):
        raise TrialFailed("a block has not come back as it went")
