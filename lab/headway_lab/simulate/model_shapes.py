"""The dimensions of simulated models, and the resulting costs. Must not know: hardware.

Dimensions are from each model's published config.json; the resulting number of parameters equals the published one.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=1, le=1 << 24)]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A dense decoder with grouped queries and a gated MLP. ``kv_numbers``: of one token's keys and values, where layers differ
    in these; None: all layers have ``num_kv_heads`` of ``head_dim``. ``own_parameters``: of all layers' weights without those of
    experts, if layers are anything else; a token goes through an ``expert_share`` of ``expert_parameters``.
    """

    name: str
    num_layers: _Count
    hidden_size: _Count
    intermediate_size: _Count
    num_heads: _Count
    num_kv_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    context_length: Annotated[int, Meta(ge=2, le=1 << 24)]
    bytes_per_value: Annotated[int, Meta(ge=1, le=8)] = 2
    kv_numbers: _Count | None = None
    own_parameters: Annotated[int, Meta(ge=0)] | None = None
    expert_parameters: Annotated[int, Meta(ge=0)] = 0
    expert_share: float = 1.0

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of all layers' matrices."""
        if self.own_parameters is not None:
            return self.own_parameters + self.expert_parameters
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    def num_read_parameters(self, batch: int) -> int:
        """Those of layers that some of ``batch`` tokens go through, if each chooses its experts by itself."""
        unread = self.expert_parameters * (1 - self.expert_share) ** batch
        return self.num_layer_parameters - int(unread)

    @property
    def num_head_parameters(self) -> int:
        """Parameters of the matrix to logits; the token embedding has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, with embedding and norms."""
        norms = (2 * self.num_layers + 1) * self.hidden_size
        return self.num_layer_parameters + 2 * self.num_head_parameters + norms

    def elementwise_bytes_per_token(self, tensor_parallel: int = 1) -> float:
        """Bytes that the operators between products move per token, on each of ``tensor_parallel`` devices.

        Per layer: two additions with a norm (two values of the hidden state read, two written), the activation (two
        read, one written), the rotation of queries and keys, and keys and values on their way into the cache.
        """
        heads = 2 * self.num_heads + 4 * self.num_kv_heads
        values = 8 * self.hidden_size + (3 * self.intermediate_size + heads * self.head_dim) / tensor_parallel
        return self.num_layers * values * self.bytes_per_value

    def kv_bytes_per_token(self, tensor_parallel: int = 1) -> int:
        """Bytes on each device; each has at least one whole KV head."""
        if self.kv_numbers is not None:
            return -(-self.kv_numbers // tensor_parallel) * self.bytes_per_value
        num_kv_heads = -(-self.num_kv_heads // tensor_parallel)
        return 2 * self.num_layers * num_kv_heads * self.head_dim * self.bytes_per_value


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama-2-7b",
            num_layers=32,
            hidden_size=4096,
            intermediate_size=11008,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            vocab_size=32_000,
            context_length=4096,
        ),
        ModelShape(
            name="llama-2-13b",
            num_layers=40,
            hidden_size=5120,
            intermediate_size=13824,
            num_heads=40,
            num_kv_heads=40,
            head_dim=128,
            vocab_size=32_000,
            context_length=4096,
        ),
        ModelShape(
            name="llama-3-8b",
            num_layers=32,
            hidden_size=4096,
            intermediate_size=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128_256,
            context_length=8192,
        ),
        ModelShape(
            name="llama-2-70b",
            num_layers=80,
            hidden_size=8192,
            intermediate_size=28672,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=32_000,
            context_length=4096,
        ),
        ModelShape(
            name="llama-3-70b",
            num_layers=80,
            hidden_size=8192,
            intermediate_size=28672,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=128_256,
            context_length=8192,
        ),
    )
}
