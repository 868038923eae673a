"""The accelerators that can be simulated.

Owns: what each can do at best, and which share of that good kernels reach. Must not know: models or steps.

Peaks are NVIDIA's data sheets' (A100 80GB SXM, H100 SXM, H200 SXM): dense bf16, without sparsity; memory in decimal
gigabytes; NVLink in one direction, half of the bidirectional figure. Shares:

- GEMM 0.80 and memory 0.90: measured on one H200 with large bf16 products (790 of 989.4 TFLOP/s) and a copy (4.3 of
  4.8 TB/s). For the others the same shares are assumed.
- Attention 0.75 on Hopper: FlashAttention-3's 740 TFLOP/s on H100 (Shah et al., 2024). 0.73 on Ampere:
  FlashAttention-2's 230 TFLOP/s on A100 (Dao, 2023).
- NVLink 0.80: assumed, about what collective libraries report for large messages within one machine.
- An all-reduce of few bytes takes 10 us: assumed, the order of magnitude of one between the devices of one machine.
- From the start of a kernel that has little to do to the start of the next 2 us: assumed, for kernels that are
  replayed from a graph.
"""

import msgspec


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device. Rates per second, sizes in bytes, times in seconds; shares of the peak from 0 to 1."""

    name: str
    peak_flops: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float
    attention_share: float
    gemm_share: float = 0.80
    memory_share: float = 0.90
    link_share: float = 0.80
    all_reduce_latency_s: float = 10e-6
    kernel_launch_s: float = 2e-6


ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator(
            name="a100-80g",
            peak_flops=312e12,
            memory_bandwidth=2.039e12,
            memory_bytes=80e9,
            link_bandwidth=300e9,
            attention_share=0.73,
        ),
        Accelerator(
            name="h100",
            peak_flops=989.4e12,
            memory_bandwidth=3.35e12,
            memory_bytes=80e9,
            link_bandwidth=450e9,
            attention_share=0.75,
        ),
        Accelerator(
            name="h200",
            peak_flops=989.4e12,
            memory_bandwidth=4.8e12,
            memory_bytes=141e9,
            link_bandwidth=450e9,
            attention_share=0.75,
        ),
    )
}
