"""What the devices or ranks that share a layer send each other, and how long it takes on a link. Must not know: arithmetic.

A *meeting* is a moment in which each waits for all. Two forms:

- *All-reduce*, ``tensor_parallel_form=fast``: two per layer, after the output and the down projection (Shoeybi et al.,
  Megatron-LM, 2019); each sends ``2 (n - 1) / n`` of the hidden state (Patarasuk and Yuan, 2009).
- *Gather*, Headway's ``exact``: four per layer, of the attended values, the hidden state, the activations of the MLP and the
  hidden state again; each receives the ``n - 1`` parts of the others, ``(n - 1) / n`` of the whole.

``time = meetings * latency + bytes / bandwidth``. Nothing is hidden behind arithmetic.
"""

from typing import NamedTuple

from headway_lab.simulate.model_shapes import ModelShape

ALL_REDUCES_PER_LAYER = 2
GATHERS_PER_LAYER = 4
GATHERS_PER_STEP = 4
"""The start, the embedding, the rows that draw, and the logits."""


class Meetings(NamedTuple):
    """Of one step. ``token_bytes``: over the link of each device, per token of the step; ``sample_bytes``: per row that draws."""

    number: int
    token_bytes: float
    sample_bytes: float = 0.0

    def seconds(self, num_tokens: int, num_samples: int, *, latency_s: float, bandwidth: float) -> float:
        """Return their time. ``latency_s`` of one; ``bandwidth`` in bytes per second and device."""
        sent = num_tokens * self.token_bytes + num_samples * self.sample_bytes
        return self.number * latency_s + sent / bandwidth


def all_reduces(shape: ModelShape, tensor_parallel: int, num_layers: int) -> Meetings:
    """Return the meetings of ``num_layers`` layers in the fast form; none for one device."""
    if tensor_parallel == 1:
        return Meetings(0, 0.0)
    number = ALL_REDUCES_PER_LAYER * num_layers
    sent = 2 * (tensor_parallel - 1) / tensor_parallel * shape.hidden_size * shape.bytes_per_value
    return Meetings(number, number * sent)


def gathers(shape: ModelShape, tensor_parallel: int, num_layers: int) -> Meetings:
    """Return the meetings of a whole model of ``num_layers`` layers in the exact form; none for one rank."""
    if tensor_parallel == 1:
        return Meetings(0, 0.0)
    others = (tensor_parallel - 1) / tensor_parallel * shape.bytes_per_value
    values = shape.num_heads * shape.head_dim + 2 * shape.hidden_size + shape.intermediate_size
    return Meetings(
        GATHERS_PER_LAYER * num_layers + GATHERS_PER_STEP,
        others * (num_layers * values + shape.hidden_size),
        others * (shape.hidden_size + shape.vocab_size),
    )
