"""The description of attention, and of how positions enter it. Must not know: layers, files, who computes."""

from typing import Literal, NamedTuple, TypeAlias

import msgspec

QkNorm: TypeAlias = Literal["none", "head", "all", "plain", "plain_if_rotated", "layer"]
Gates: TypeAlias = Literal["none", "apart", "by_head", "of_heads"]
GateKind: TypeAlias = Literal["sigmoid", "softplus"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding; see ``rope``. ``factors`` divide the frequencies of longrope. Of "proportional", so large a
    ``share`` of the frequencies turns.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()
    share: float = 1.0


class IndexConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A query sees the ``num_chosen`` keys whose products with ``num_heads`` queries of ``head_dim`` channels, behind a ReLU and
    each times a weight, add up to the most. Rotated are as many channels as of keys.
    """

    num_heads: int
    head_dim: int
    num_chosen: int
    is_interleaved: bool


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of all heads come from one compressed row of ``rank``, queries from one of ``query_rank`` (None:
    from the hidden state). Heads of keys have ``plain_dim`` channels of their own and share ``rotary_dim``. Tensors have names
    behind ``prefix``, which is behind that of the layer: among them the ``output``, and ``gates``, if there are any. With an
    ``index``, a query sees some of the keys alone.
    """

    query_rank: int | None
    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    prefix: str = "self_attn."
    output: str = "o_proj"
    gates: str | None = None
    index: IndexConfig | None = None

    @property
    def key_dim(self) -> int:
        """Channels of a key."""
        return self.plain_dim + self.rotary_dim

    @property
    def row_dim(self) -> int:
        """Channels of a token's row, which serves all heads: what keys share, and the compressed part."""
        return self.rotary_dim + self.rank


class AlibiConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Scores fall with the distance of a key, in each head at a slope of its own; see ``alibi``. ``is_rounded``: slopes and
    biases are rounded to bfloat16, and then scaled as scores are.
    """

    is_rounded: bool = False


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``scale`` multiplies scores; then ``softcap`` (None: none) bounds them.

    The first ``rotary_dim`` channels of a head are rotated in pairs: channel i with i + rotary_dim / 2, or neighbours if
    ``is_interleaved``; with ``turns_back``, the other way round. ``qk_norm`` normalises queries and keys by head, or over all heads of a token, or "plain": by
    head, without weights; "plain_if_rotated": the same, in layers with a rope alone; "layer" is a layer norm by head, each with weights of its own, or, with
    ``shares_head_norms``, of one weight and one bias. It
    does so before they are rotated; with ``norms_rotated``, behind that. With ``latent``, keys and values are made of
    a compressed row. ``clip`` (None: none) bounds queries, keys and values on both sides, before all else; with
    ``clips_normed``, behind norms. ``alibi`` adds to scores (None: nothing does).

    ``gates`` multiply what heads give, each channel by its own; ``gate_kind`` is what is taken of a gate. They are stored
    "apart", as the fourth of ``TensorNames.qkv``, or "by_head", each head's behind its queries. Those "of_heads" are stored
    apart, one for a whole head.

    With ``norms_values``, values are normalised by head, without weights. With ``values_are_keys``, they are what the
    projection to keys gives, which is neither normalised as keys are nor rotated. Values have ``value_dim`` channels
    (0: as keys), and zeros behind them. ``has_sinks``: of a model that has attention sinks, whether this attention does.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    scale: float
    is_interleaved: bool = False
    turns_back: bool = False
    softcap: float | None = None
    qk_norm: QkNorm = "none"
    norms_rotated: bool = False
    shares_head_norms: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    latent: LatentConfig | None = None
    clip: float | None = None
    clips_normed: bool = False
    gates: Gates = "none"
    gate_kind: GateKind = "sigmoid"
    alibi: AlibiConfig | None = None
    norms_values: bool = False
    values_are_keys: bool = False
    value_dim: int = 0
    has_sinks: bool = True

    @property
    def num_vectors(self) -> int:
        """Stored of a token: keys and values, or one row."""
        return 2 * self.num_kv_heads if self.latent is None else 1

    @property
    def vector_dim(self) -> int:
        """Channels of each, which are those of a query as it meets them."""
        return self.head_dim if self.latent is None else self.latent.row_dim

    @property
    def num_shared(self) -> int:
        """Channels of a row that are key alone; the others are value, too."""
        return 0 if self.latent is None else self.latent.rotary_dim

    @property
    def summed_dim(self) -> int:
        """Channels of a head's sum of vectors."""
        return self.vector_dim - self.num_shared

    @property
    def attended_dim(self) -> int:
        """Channels that a head gives: other values than those of latent attention are as wide as keys."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def stored_value_dim(self) -> int:
        """Channels of a value in the checkpoint."""
        return self.value_dim or (self.head_dim if self.latent is None else self.latent.value_dim)


class QueryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Queries grow with their position p, by the factor ``1 + beta * ln(1 + floor((p + first) / step))``."""

    beta: float
    step: int
    first: int = 0


class Rotary(NamedTuple):
    """A rope of heads of one size."""

    rope: RopeConfig
    head_dim: int
    rotary_dim: int
