"""Programmatic dependent launch: a kernel's blocks arrive while the grid before it ends.

Owns: which devices have it, where a kernel waits. Must not know: what a kernel computes.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". The wait ends when the grid
before has ended and its writes can be seen. That grid has waited too, so everything before it has ended as well. Hence
the rule: every program of such a kernel calls ``await_grid`` before it returns, and before it writes anything or reads
anything but weights.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl

_FIRST_CAPABILITY = (9, 0)


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch whose kernel calls ``await_grid(PDL)``.

    ``HEADWAY_KERNEL_OVERLAP=off`` in the environment does without, to tell whether an error comes from kernels that overlap.
    """
    if os.environ.get("HEADWAY_KERNEL_OVERLAP") == "off":
        return {"PDL": False}
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def await_grid(PDL: tl.constexpr):
    """Let the next grid's blocks come as soon as there is room for them; wait for the grid before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
