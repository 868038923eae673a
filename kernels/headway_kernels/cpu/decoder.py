"""A whole decoder on the compiled library, or the part of it that one rank of several has.

Owns: a model's and a step's arguments. Must not know: checkpoints, the executor, how ranks meet.

The library gets addresses, so every object here keeps its arrays alive.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from headway_kernels.cpu.adapters import PackedAdapter, addresses_of
from headway_kernels.cpu.experts import PackedExperts
from headway_kernels.cpu.feed_forward import Activation, DenseFeedForward
from headway_kernels.cpu.latent import PackedLatent
from headway_kernels.cpu.library import CpuLibrary, PackedLinear, Team, WeightForm, address, made, rounded
from headway_kernels.cpu.recurrence import PackedRecurrence
from headway_kernels.cpu.structs import (
    HeadsStruct,
    LayerInputsStruct,
    LayerStruct,
    NormStruct,
    ShapeStruct,
    SharedRowsStruct,
    StepStruct,
)

_T = TypeVar("_T")

_MOST_BEYOND = 48
"""A register of biases may reach so far behind the last one: its lanes, at most 16, and the positions of a tile, at most 32,
whose first row reads as far as its last one sees.
"""


class NormKind(IntEnum):
    """Root mean squares, or mean and variance."""

    RMS = 0
    LAYER = 1


class GateKind(IntEnum):
    """Of gates behind attention: none, their sigmoids, or ``ln(1 + e^x)``."""

    NONE = 0
    SIGMOID = 1
    SOFTPLUS = 2


class _KvForm(IntEnum):
    """float32; bfloat16 that is widened; bfloat16 of which pairs are multiplied."""

    FLOAT32 = 0
    BFLOAT16 = 1
    PAIRS = 2


class NormWeights(NamedTuple):
    """Both float32, ``[width]``, contiguous, on the CPU."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class OwnColumns:
    """What one rank of several computes of each wide row; see ``decoder_structs.h``. Starts are multiples of ``panel``."""

    all_heads: int
    first_head: int
    hidden_start: int
    hidden_columns: int
    activation_start: int
    logits_start: int


class LayerTable:
    """Inputs of each layer's own; see ``decoder_structs.h``. ``table`` ``[vocab, layers * size]``, float32 or bfloat16; ``norm``
    ``[layers, size]``, float32; both contiguous, on the CPU. ``factors`` are of the projection, of the table, of the sum.
    """

    def __init__(
        self, projection: PackedLinear, norm: Tensor, table: Tensor, factors: tuple[float, float, float]
    ) -> None:
        self._kept = (projection, norm, table)
        self.struct = LayerInputsStruct(
            size=norm.shape[1],
            projection=projection.handle,
            norm=norm.data_ptr(),
            table=table.data_ptr(),
            is_narrow=table.dtype == torch.bfloat16,
            projection_factor=factors[0],
            table_factor=factors[1],
            sum_factor=factors[2],
        )


class BeforeHead(NamedTuple):
    """A product, ``[hidden, hidden]``, an activation and a norm of what that gives."""

    dense: PackedLinear
    activation: Activation
    norm: NormWeights


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Sizes and variants of a model, and its tensors outside of layers.

    ``embedding`` ``[vocab, hidden]``: float32, contiguous, on the CPU. Soft caps of 0 are none, as is a ``qkv_clip``,
    which bounds queries, keys and values on both sides. ``positions`` ``[context, hidden]``: the same, or None; they are
    added to embeddings. ``score_biases`` ``[heads, context]``, float32, on the CPU, or None: added to the scores of keys,
    each at the key's position, or, with ``biases_distances``, at its distance. ``is_parallel``: attention and
    feed-forward read the same hidden state. ``norms_sums``: norms behind both are of the hidden state after the
    addition. ``post_norm_eps``: of these norms; None: as of others. ``norms_all_heads``: together, not each by itself; ``norms_rotated``: behind the rotation;
    ``head_norm_kind``: of what kind these are. ``clips_normed``: bounds are behind norms of heads. With
    ``gates``, ``qkv`` gives as many gates as queries, last. A rank of several says in ``own`` what it has; its
    heads are counted alone, and its embedding has ``own.hidden_columns``, or is None in a later stage. ``kv_dtype``,
    of keys and values: float32 or bfloat16. ``block_stride``: numbers from a block of a layer to its next one; None: those
    of a layer. ``before_head``: between the final norm and the head, or None. ``inputs``: of each layer's own, or None. With ``norms_values``, a ``qk_norm`` has rows for values, too, last.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    norm_eps: float
    score_scale: float
    embedding: Tensor | None
    final_norm: NormWeights | None
    before_head: BeforeHead | None = None
    positions: Tensor | None = None
    score_biases: Tensor | None = None
    biases_distances: bool = False
    norm_kind: NormKind = NormKind.RMS
    is_parallel: bool = False
    norms_sums: bool = False
    post_norm_eps: float | None = None
    norms_all_heads: bool = False
    norms_rotated: bool = False
    norms_values: bool = False
    gates: GateKind = GateKind.NONE
    head_norm_kind: NormKind = NormKind.RMS
    clips_normed: bool = False
    score_softcap: float = 0.0
    qkv_clip: float = 0.0
    residual_factor: float = 1.0
    logits_factor: float = 1.0
    logits_softcap: float = 0.0
    own: OwnColumns | None = None
    kv_dtype: torch.dtype = torch.float32
    block_stride: int | None = None
    inputs: LayerTable | None = None


class Rotations(NamedTuple):
    """Both float32, ``[context, head_dim // 2]``, contiguous, on the CPU."""

    cosines: Tensor
    sines: Tensor


class LayerHeads(NamedTuple):
    """The heads of one layer, and where its keys and values are: in the pool's layer ``kv_layer``, from the number
    ``kv_first`` of each block on. A layer that ``is_reading`` has queries alone: one before it stores what it reads.
    Latent attention has one key-value head, as wide as ``latent_row``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_layer: int
    kv_first: int = 0
    is_reading: bool = False


class LayerInput(NamedTuple):
    """What a layer makes of its own inputs: gates, and the way back with a norm behind it."""

    gate: PackedLinear
    back: PackedLinear
    norm: NormWeights


class WideRows(NamedTuple, Generic[_T]):
    """Rows of a step that several ranks fill, each its own columns; or something about each kind of them.

    ``pairs`` are a token with one of its experts; of the shared expert are those of each token.
    """

    hidden: _T
    attended: _T
    activations: _T
    logits: _T
    pairs: _T
    shared_expert: _T


class StageMates(Protocol):
    """The ranks that share a step. ``meet`` and ``context`` are addresses of a ``meet_others`` and its argument."""

    meet: int
    context: int
    is_shared: bool

    def wide_rows(self, sizes: WideRows[tuple[int, int]]) -> WideRows[Tensor]:
        """Return float32 memory of these rows and columns; the step before is over when the next one meets."""
        ...

    def check(self) -> None:
        """Raise what went wrong in a meeting."""
        ...

    def giving_hidden_states(self) -> "StageMates":
        """Return the same ranks, where logits are hidden states; steps of both take turns."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer; ``qkv`` outputs and ``output`` inputs have heads of ``CpuLibrary.padded_head_dim``; both None: no attention.
    Beside attention, or in its place, there may be a ``recurrence``.

    Norms that a model does not have are None; those behind attention and feed-forward are only for a rank that is alone.
    ``output_norm``: root mean squares of what ``output`` reads, float32, as wide, on the CPU.
    ``qk_norm`` and ``qk_norm_bias`` ``[heads + kv_heads, head_dim]``, float32, contiguous, on the CPU. A token sees ``window`` positions;
    None: all. ``sinks`` ``[heads]``, float32, or None: in each head's softmax a score without a value. ``query_factors``
    ``[context]``, float32, on the CPU, multiply queries by position; None: nothing does. ``heads`` None: as in the shape, and
    in a layer of the pool behind those of all layers before. ``factor`` multiplies the hidden state behind the layer.
    """

    qkv: PackedLinear | PackedLatent | None
    output: PackedLinear | None
    recurrence: PackedRecurrence | None = None
    feed_forward: DenseFeedForward | PackedExperts | None
    attention_norm: NormWeights | None
    mlp_norm: NormWeights | None
    attention_post_norm: NormWeights | None = None
    mlp_post_norm: NormWeights | None = None
    output_norm: Tensor | None = None
    qk_norm: Tensor | None
    qk_norm_bias: Tensor | None = None
    rotations: Rotations | None
    window: int | None
    sinks: Tensor | None = None
    query_factors: Tensor | None = None
    heads: LayerHeads | None = None
    own_input: LayerInput | None = None
    factor: float = 1.0


class Decoder:
    """A whole model, or the part of one rank of several with its ``mates``. Without a ``head`` it gives no logits."""

    def __init__(
        self,
        library: CpuLibrary,
        team: Team,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        head: PackedLinear | None,
        mates: StageMates | None = None,
    ) -> None:
        self.library = library
        self._team = team
        biases = None if shape.score_biases is None else _laid_out(shape.score_biases, shape.biases_distances)
        self._kept = (shape, tuple(layers), head, biases)
        self._shape = shape
        self.kv_dtype = shape.kv_dtype
        self._own = shape.own or _all_columns(shape)
        self._has_head = head is not None
        self._experts = next(
            (made.feed_forward for made in layers if isinstance(made.feed_forward, PackedExperts)), None
        )
        self._attended_width = _attended_width(library, shape, self._own, layers)
        self._recurrences = [made.recurrence for made in layers if made.recurrence is not None]
        self._mates = mates
        struct = _shape_struct(library, shape, self._own, len(layers), biases)
        self.block_floats = struct.block_stride
        self._logits_stride = int(library.functions.headway_logits_stride(shape.vocab_size))
        structs = (LayerStruct * len(layers))(*_layer_structs(library, shape, layers))
        self._handle = made(
            library.functions.headway_decoder_new(ctypes.byref(struct), structs, None if head is None else head.handle),
            "the model",
        )

    def giving_hidden_states(self) -> "Decoder":
        """Return the same layers with the identity as head: ``forward`` gives hidden states behind the final norm.

        Both share the weights, and each has a workspace of its own.
        """
        shape, layers, *_ = self._kept
        own, start = self._own, self._own.hidden_start
        identity = torch.eye(shape.hidden_size)[start : start + own.hidden_columns]
        head = PackedLinear(self.library, identity, None, WeightForm.BFLOAT16)  # exact: it holds 0 and 1
        alike = replace(
            shape,
            vocab_size=shape.hidden_size,
            logits_factor=1.0,
            logits_softcap=0.0,
            before_head=None,
            own=replace(own, logits_start=start),
        )
        mates = None if self._mates is None else self._mates.giving_hidden_states()
        return Decoder(self.library, self._team, alike, layers, head, mates)

    def keep_states(self, past: Sequence[Tensor], heads: Sequence[Tensor]) -> None:
        """Keep rows' states in this memory, of each layer that has some; see ``PackedRecurrence.use``."""
        for recurrence, *memory in zip(self._recurrences, past, heads, strict=True):
            recurrence.use(*memory)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.library.functions.headway_decoder_free(self._handle)

    def forward(
        self,
        *,
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        first_positions: NDArray[np.int64],
        tables: NDArray[np.int32],
        sampled: NDArray[np.int64],
        pool: Tensor,
        row_numbers: NDArray[np.int64] | None = None,
        hidden_in: Tensor | None = None,
        adapters: Sequence[PackedAdapter | None] | None = None,
    ) -> Tensor:
        """Store keys and values of all tokens; return float32 logits, ``[len(sampled), vocab]``.

        ``token_ids``: row after row, ``num_tokens[i]`` of row i, from position ``first_positions[i]`` on, with the
        block table ``tables[i]``. ``sampled``: ascending indices into ``token_ids``. ``pool`` ``[layers, num_blocks,
        block_floats]``, of the shape's ``kv_dtype``. ``row_numbers[i]``: of row i's states.
        All contiguous.

        ``adapters``: of each row; None if no row has one.

        Without a head, return the own columns of the hidden state, float32, ``[tokens, hidden_columns]``; without an
        embedding, take those of the stage before from ``hidden_in``. With mates, the result lasts until the next step.

        Raises:
            MemoryError: the step is too large; nothing has changed.
        """
        arrays = (token_ids, num_tokens, first_positions, tables, sampled)
        assert all(array.flags.c_contiguous for array in arrays)
        assert row_numbers is None or row_numbers.flags.c_contiguous
        assert not self._recurrences or (row_numbers is not None and self._recurrences[0].has_memory)
        assert pool.dtype == self.kv_dtype
        starts = np.cumsum(num_tokens) - num_tokens
        wide = None if self._mates is None else self._mates.wide_rows(self._sizes(len(token_ids), len(sampled)))
        logits = torch.empty(len(sampled), self._logits_stride) if wide is None else wide.logits
        shared = None if wide is None else self._shared_struct(wide, hidden_in)
        of_tokens = None if adapters is None else addresses_of(adapters, num_tokens)
        some = [adapter for adapter in adapters or () if adapter is not None]
        step = StepStruct(
            num_rows=len(num_tokens),
            num_tokens=len(token_ids),
            num_sampled=len(sampled),
            token_ids=token_ids.ctypes.data,
            row_starts=starts.ctypes.data,
            row_tokens=num_tokens.ctypes.data,
            row_positions=first_positions.ctypes.data,
            row_numbers=None if row_numbers is None else row_numbers.ctypes.data,
            tables=tables.ctypes.data,
            table_stride=tables.shape[1],
            sampled=sampled.ctypes.data,
            logits=logits.data_ptr(),
            pool=pool.data_ptr(),
            layer_stride=pool.stride(0),
            shared=None if shared is None else ctypes.addressof(shared),
            adapters=None if of_tokens is None else of_tokens.ctypes.data,
            most_rank=max((adapter.most_rank for adapter in some), default=0),
            most_expert_rank=max((adapter.most_expert_rank for adapter in some), default=0),
        )
        done = self.library.functions.headway_decoder_run(self._handle, self._team.handle, ctypes.byref(step))
        made(done, f"a step of {len(token_ids)} tokens")
        if self._mates is not None:
            self._mates.check()
        if wide is not None and not self._has_head:
            return wide.hidden[:, self._own.hidden_start :][:, : self._own.hidden_columns]
        return logits[:, : self._shape.vocab_size]

    def _sizes(self, num_tokens: int, num_sampled: int) -> WideRows[tuple[int, int]]:
        """Rows and columns; the experts of all layers are alike, and their states."""
        panel, experts = self.library.panel, self._experts
        return WideRows(
            hidden=(num_tokens, rounded(self._shape.hidden_size, panel)),
            attended=(num_tokens, rounded(self._attended_width, panel)),
            activations=(num_tokens, rounded(self._shape.intermediate_size, panel)),
            logits=(num_sampled if self._has_head else 0, self._logits_stride),
            pairs=(0, 0) if experts is None else (num_tokens * experts.num_chosen, experts.inner_size),
            shared_expert=(0, 0) if experts is None else (num_tokens, experts.inner_size),
        )

    def _shared_struct(self, wide: WideRows[Tensor], hidden_in: Tensor | None) -> SharedRowsStruct:
        assert self._mates is not None
        assert hidden_in is None or hidden_in.is_contiguous()
        return SharedRowsStruct(
            meet=self._mates.meet,
            context=self._mates.context,
            is_shared=int(self._mates.is_shared),
            hidden=wide.hidden.data_ptr(),
            attended=wide.attended.data_ptr(),
            activations=wide.activations.data_ptr(),
            pairs=wide.pairs.data_ptr(),
            shared_expert=wide.shared_expert.data_ptr(),
            hidden_in=address(hidden_in),
        )


def _all_columns(shape: DecoderShape) -> OwnColumns:
    return OwnColumns(
        all_heads=shape.num_heads,
        first_head=0,
        hidden_start=0,
        hidden_columns=shape.hidden_size,
        activation_start=0,
        logits_start=0,
    )


def _attended_width(library: CpuLibrary, shape: DecoderShape, own: OwnColumns, layers: Sequence[LayerWeights]) -> int:
    """Of all ranks, in the layer that needs most: heads, and what a state beside them gives."""
    ranks, widths = own.all_heads // shape.num_heads, [0]
    for layer in layers:
        heads = layer.heads or LayerHeads(shape.num_heads, shape.num_kv_heads, shape.head_dim, 0)
        width = library.padded_head_dim(heads.head_dim)
        if isinstance(layer.qkv, PackedLatent):
            width = layer.qkv.attended_dim
        attended = ranks * heads.num_heads * width
        inner = 0 if layer.recurrence is None else layer.recurrence.inner
        widths.append((0 if layer.output is None else attended) + inner)
    return max(widths)


def _laid_out(biases: Tensor, biases_distances: bool) -> Tensor:
    """In the order of keys, with zeros behind the last one. A key's bias then stands as far from the query's own as the key
    does.
    """
    return functional.pad(biases.flip(1) if biases_distances else biases, (0, _MOST_BEYOND)).contiguous()


def _shape_struct(
    library: CpuLibrary, shape: DecoderShape, own: OwnColumns, num_layers: int, biases: Tensor | None
) -> ShapeStruct:
    before = shape.before_head
    return ShapeStruct(
        num_layers=num_layers,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=library.padded_head_dim(shape.head_dim),
        true_head_dim=shape.head_dim,
        block_size=shape.block_size,
        block_stride=shape.block_stride or block_floats(library, shape.num_kv_heads, shape.head_dim, shape.block_size),
        all_heads=own.all_heads,
        first_head=own.first_head,
        hidden_start=own.hidden_start,
        hidden_columns=own.hidden_columns,
        activation_start=own.activation_start,
        logits_start=own.logits_start,
        norm_kind=shape.norm_kind,
        is_parallel=shape.is_parallel,
        norms_all_heads=shape.norms_all_heads,
        norms_rotated=shape.norms_rotated,
        norms_values=shape.norms_values,
        gates=shape.gates,
        head_norm_kind=shape.head_norm_kind,
        clips_normed=shape.clips_normed,
        norms_sums=shape.norms_sums,
        norm_eps=shape.norm_eps,
        post_norm_eps=shape.norm_eps if shape.post_norm_eps is None else shape.post_norm_eps,
        score_scale=shape.score_scale,
        score_softcap=shape.score_softcap,
        qkv_clip=shape.qkv_clip,
        residual_factor=shape.residual_factor,
        logits_factor=shape.logits_factor,
        logits_softcap=shape.logits_softcap,
        kv_form=_kv_form(library, shape.kv_dtype),
        embedding=address(shape.embedding),
        positions=address(shape.positions),
        score_biases=address(biases),
        bias_stride=0 if biases is None else biases.shape[1],
        last_distance=0 if biases is None or not shape.biases_distances else biases.shape[1] - _MOST_BEYOND - 1,
        final_norm=_norm_struct(shape.final_norm),
        before_head=None if before is None else before.dense.handle,
        head_activation=0 if before is None else before.activation,
        head_norm=_norm_struct(None if before is None else before.norm),
        inputs=None if shape.inputs is None else ctypes.addressof(shape.inputs.struct),
    )


def _kv_form(library: CpuLibrary, dtype: torch.dtype) -> _KvForm:
    if dtype == torch.float32:
        return _KvForm.FLOAT32
    return _KvForm.PAIRS if library.multiplies_pairs else _KvForm.BFLOAT16


def block_floats(library: CpuLibrary, num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Numbers of a block of one layer."""
    shape = ShapeStruct(num_kv_heads=num_kv_heads, head_dim=library.padded_head_dim(head_dim), block_size=block_size)
    return int(library.functions.headway_block_floats(ctypes.byref(shape)))


def _layer_structs(library: CpuLibrary, shape: DecoderShape, layers: Sequence[LayerWeights]) -> Iterator[LayerStruct]:
    count = 0
    for layer in layers:
        heads = layer.heads or LayerHeads(shape.num_heads, shape.num_kv_heads, shape.head_dim, count)
        yield _layer_struct(library, layer, heads)
        count += layer.output is not None


def _layer_struct(library: CpuLibrary, layer: LayerWeights, heads: LayerHeads) -> LayerStruct:
    feed, state, own = layer.feed_forward, layer.recurrence, layer.own_input
    dense = feed if isinstance(feed, DenseFeedForward) else None
    return LayerStruct(
        qkv=layer.qkv.handle if isinstance(layer.qkv, PackedLinear) else None,
        output=None if layer.output is None else layer.output.handle,
        state_inputs=None if state is None else state.inputs.handle,
        state_selection=None if state is None else _handle_of(state.selection),
        state_steps=None if state is None else _handle_of(state.steps),
        state_gates=None if state is None else _handle_of(state.gates),
        state_output=None if state is None else state.output.handle,
        gate_up=None if dense is None else dense.gate_up.handle,
        down=None if dense is None else dense.down.handle,
        attention_norm=_norm_struct(layer.attention_norm),
        attention_post_norm=_norm_struct(layer.attention_post_norm),
        mlp_norm=_norm_struct(layer.mlp_norm),
        mlp_post_norm=_norm_struct(layer.mlp_post_norm),
        output_norm=address(layer.output_norm),
        down_norm=None if dense is None else address(dense.norm),
        qk_norm=address(layer.qk_norm),
        qk_norm_bias=address(layer.qk_norm_bias),
        cosines=None if layer.rotations is None else layer.rotations.cosines.data_ptr(),
        sines=None if layer.rotations is None else layer.rotations.sines.data_ptr(),
        query_factors=address(layer.query_factors),
        window=layer.window or 0,
        activation=0 if feed is None else feed.activation,
        is_gated=dense is None or dense.is_gated,
        curve=None if dense is None else address(dense.curve),
        sinks=address(layer.sinks),
        experts=ctypes.addressof(feed.struct) if isinstance(feed, PackedExperts) else None,
        latent=ctypes.addressof(layer.qkv.struct) if isinstance(layer.qkv, PackedLatent) else None,
        recurrence=None if state is None else ctypes.addressof(state.struct),
        input_gate=None if own is None else own.gate.handle,
        input_back=None if own is None else own.back.handle,
        input_norm=_norm_struct(None if own is None else own.norm),
        heads=HeadsStruct(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=library.padded_head_dim(heads.head_dim),
            true_head_dim=heads.head_dim,
            kv_layer=heads.kv_layer,
            kv_first=heads.kv_first,
            is_reading=heads.is_reading,
        ),
        factor=layer.factor,
    )


def _handle_of(product: PackedLinear | None) -> int | None:
    return None if product is None else product.handle


def _norm_struct(norm: NormWeights | None) -> NormStruct:
    return NormStruct() if norm is None else NormStruct(weight=norm.weight.data_ptr(), bias=address(norm.bias))
