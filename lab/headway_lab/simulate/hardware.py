"""The accelerators that can be simulated, and the shares of their peaks that good kernels reach. Must not know: models.

Peaks are NVIDIA's data sheets' (A100 80GB SXM, H100 SXM, H200 SXM): dense bf16 without sparsity, decimal gigabytes,
links in one direction. The rest:

- GEMM 0.80 and memory 0.90 of the peak: measured on an H200 (790 of 989.4 TFLOP/s; a copy, 4.3 of 4.8 TB/s).
- A product of few tokens reads weights at 0.80, with exponent 2.5: DeepGEMM's first published table on an H800 (7168 x
  16384 reads 2,668 of 3,350 GB/s; 64, 128 and 4,096 tokens give exponents from 2.8 to 1.6).
- Tiles of 64 tokens on Hopper (PTX ISA, ``wgmma``), and 128 on Ampere, where 257 tokens take 32% longer than 256
  (Sarathi-Serve, Agrawal et al., 2024, 4.3).
- Attention 0.75 on Hopper (FlashAttention-3, 740 TFLOP/s on H100, Shah et al., 2024), 0.73 on Ampere (FlashAttention-2,
  230 on A100, Dao, 2023); both give each head of 128 queries to one of 132 or 108 processors.
- Host memory 0.78 of the link: measured on an H200 (50 of PCI Express 5's 64 GB/s).
- Assumed: the same shares for the other devices; NVLink 0.80; 10 us for a small all-reduce; 2 us from kernel to kernel
  in a graph; 0.3 ms between two steps.
- ``compute-bound`` is the assumption of a published comparison: 0.34 ms for each token of a 70B model and 2 ms beside.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

_Positive = Annotated[float, Meta(ge=1, le=1e21)]
_Share = Annotated[float, Meta(gt=0, le=1)]
_Duration = Annotated[float, Meta(ge=0)]


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device. Rates are per second, sizes in bytes, times in seconds, shares of the peak from 0 to 1.

    ``overlap_exponent``: how far arithmetic hides reading; 1 not at all, large values wholly. ``gemm_tile_tokens`` and
    ``attention_tile_queries``: the units of a kernel, so fewer take as long.
    """

    name: str
    peak_flops: _Positive
    memory_bandwidth: _Positive
    memory_bytes: _Positive
    link_bandwidth: _Positive
    host_bandwidth: _Positive
    num_processors: Annotated[int, Meta(ge=1)]
    attention_share: _Share
    gemm_tile_tokens: Annotated[int, Meta(ge=1)]
    attention_tile_queries: Annotated[int, Meta(ge=1)] = 128
    gemm_share: _Share = 0.80
    weights_share: _Share = 0.80
    memory_share: _Share = 0.90
    link_share: _Share = 0.80
    host_share: _Share = 0.78
    overlap_exponent: Annotated[float, Meta(ge=1)] = 2.5
    all_reduce_latency_s: _Duration = 10e-6
    kernel_launch_s: _Duration = 2e-6
    step_overhead_s: _Duration = 300e-6


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator(
            name="a100-80g",
            peak_flops=312e12,
            memory_bandwidth=2.039e12,
            memory_bytes=80e9,
            link_bandwidth=300e9,
            host_bandwidth=32e9,
            num_processors=108,
            attention_share=0.73,
            gemm_tile_tokens=128,
        ),
        Accelerator(
            name="h100",
            peak_flops=989.4e12,
            memory_bandwidth=3.35e12,
            memory_bytes=80e9,
            link_bandwidth=450e9,
            host_bandwidth=64e9,
            num_processors=132,
            attention_share=0.75,
            gemm_tile_tokens=64,
        ),
        Accelerator(
            name="h200",
            peak_flops=989.4e12,
            memory_bandwidth=4.8e12,
            memory_bytes=141e9,
            link_bandwidth=450e9,
            host_bandwidth=64e9,
            num_processors=132,
            attention_share=0.75,
            gemm_tile_tokens=64,
        ),
        Accelerator(
            name="compute-bound",
            peak_flops=403e12,
            memory_bandwidth=1e18,
            memory_bytes=400e9,
            link_bandwidth=1e18,
            host_bandwidth=1e18,
            num_processors=1,
            attention_share=1.0,
            gemm_tile_tokens=1,
            attention_tile_queries=1,
            gemm_share=1.0,
            weights_share=1.0,
            memory_share=1.0,
            link_share=1.0,
            host_share=1.0,
            overlap_exponent=50.0,
            all_reduce_latency_s=0.0,
            kernel_launch_s=0.0,
            step_overhead_s=2e-3,
        ),
    )
}
