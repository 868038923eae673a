"""The sizes of the suite's models and scripts."""

import msgspec


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """A pool of ``num_kv_blocks`` holds at least three requests of ``max_model_len`` tokens."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    sliding_window: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_output: int


SMALL = Size(
    name="small",
    num_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=101,
    sliding_window=11,
    max_model_len=96,
    block_size=8,
    num_kv_blocks=64,
    max_num_seqs=8,
    max_num_batched_tokens=160,
    num_output=4,
)
"""Fast enough for kernels under an interpreter."""

LARGE = Size(
    name="large",
    num_layers=4,
    hidden_size=256,
    intermediate_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1009,
    sliding_window=75,
    max_model_len=1024,
    block_size=16,
    num_kv_blocks=512,
    max_num_seqs=64,
    max_num_batched_tokens=2560,
    num_output=12,
)
"""For devices: many rows, long contexts, heads as wide as those of real models."""

SIZES = {size.name: size for size in (SMALL, LARGE)}
