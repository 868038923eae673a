"""Builds a decoder of plain torch operators from a checkpoint.

Owns: which tensor becomes which part of a layer. Must not know: how a product or a norm is made, how it computes.
"""

from collections.abc import Sequence
from functools import cache

import torch

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.adapted import StepAdapters
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.alibi import ScoreBiases, score_biases
from headway_executor.models.altup import States
from headway_executor.models.altup_loading import alternating_layer, states_at_ends
from headway_executor.models.attention import AttentionShape
from headway_executor.models.config import ModelConfig, RecurrenceConfig
from headway_executor.models.decoder import (
    ACTIVATIONS,
    Attention,
    Beside,
    Decoder,
    DecoderLayer,
    Embedding,
    FeedForward,
    HeadLayerNorms,
    Layer,
    LayerInput,
    LayerNorm,
    LayerTable,
    Product,
    Recurrent,
    RmsNorm,
    SpanNorms,
)
from headway_executor.models.eager_experts import eager_experts
from headway_executor.models.eager_products import EagerProducts
from headway_executor.models.key_index import INDEX_EPS, KeyIndex
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.latent import InTurn, LatentQkv, LatentValues
from headway_executor.models.latent_tensors import LATENT_EPS, Expansion, IndexTensors, LatentTensors
from headway_executor.models.linear import GatheredLinear
from headway_executor.models.part import whole
from headway_executor.models.recurrence import Recurrence
from headway_executor.models.rope import query_factors, table_of
from headway_executor.models.stage import Stage
from headway_kernels.states import Convolution


def load_eager(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    places: Sequence[KvPlace | None],
    stage: Stage | None = None,
    adapters: StepAdapters | None = None,
    rounds_inputs: bool = True,
) -> tuple[Decoder, Embedding | None]:
    """Load a checked checkpoint, or a stage's part of it; return the layers and the embedding. ``places``: see ``KvLayout``.

    ``rounds_inputs``: of dense products, where the checkpoint asks for rounding whole rows.
    """
    stage = stage or Stage(whole(config))
    make = EagerProducts(config, checkpoint, stage, dtype, device, adapters, rounds_inputs=rounds_inputs)
    loader, part, tensors = _Loader(config, make, max_model_len, places), make.part, make.tensors
    biases, final_norm = score_biases(config.attention, max_model_len), tensors.final_norm()
    decoder = Decoder(
        rotations={rotary: table_of(rotary, max_model_len).to(device) for rotary in config.rotaries},
        layers=tuple(loader.layer(place, index) for place, index in enumerate(part.layers)),
        final_norm=None if final_norm is None else make.norm(final_norm),
        head=loader.head() if part.place.is_last_stage and config.has_head else None,
        biases=None if biases is None else loader.biases(biases),
        table=loader.table(),
        states=loader.states(),
        logits_factor=config.scalings.logits,
        logits_softcap=config.scalings.logits_softcap,
    )
    return decoder, loader.embedding(max_model_len) if part.place.is_first_stage else None


class _Loader:
    def __init__(
        self, config: ModelConfig, make: EagerProducts, max_model_len: int, places: Sequence[KvPlace | None]
    ) -> None:
        self._config = config
        self._make = make
        self._tensors = make.tensors
        self._part = make.part
        self._places = places
        # One for layers alike.
        self._growth = cache(lambda growth: query_factors(growth, max_model_len).to(make.device))

    def layer(self, place: int, index: int) -> Layer:
        """Layer ``index`` of the model, ``place`` of the stage."""
        made, states, config = self._layer(place, index), self._tensors.states(), self._config.states
        if states is None or config is None:
            return made
        tensors = states.of_layer(index)
        scale = self._make.placed(tensors.output_scale) if config.scales_output else None
        return alternating_layer(made, tensors, linear=self._make.linear, norm=self._make.rms_norm, output_scale=scale)

    def states(self) -> States | None:
        """Of the ends of a model whose tokens have several states."""
        tensors = self._tensors.states()
        return None if tensors is None else states_at_ends(tensors, self._make.linear)

    def _layer(self, place: int, index: int) -> DecoderLayer:
        config, has_feed_forward = self._config, self._config.layers[index].has_feed_forward
        eps = (None, config.norm.eps_behind) * 2
        norms = [
            None if norm is None else self._make.norm(norm, own)
            for norm, own in zip(self._tensors.norms_of_layer(index), eps, strict=True)
        ]
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = norms
        factor = self._tensors.layer_factor(index)
        return DecoderLayer(
            attention_norm=attention_norm,
            attention=self._mixer(place, index),
            attention_post_norm=attention_post_norm,
            mlp_norm=mlp_norm,
            feed_forward=self._feed_forward(place, index) if has_feed_forward else None,
            mlp_post_norm=mlp_post_norm,
            residual=config.scalings.residual,
            is_parallel=config.is_parallel,
            norms_sums=config.norms_sums,
            own_input=self._own_input(index),
            factor=None if factor is None else self._make.placed(factor),
        )

    def table(self) -> LayerTable | None:
        """Of the inputs of each layer's own, which every rank has whole."""
        inputs, tensors = self._config.layer_inputs, self._tensors.layer_inputs()
        if inputs is None or tensors is None:
            return None
        words = self._make.placed(tensors.table())
        return LayerTable(
            words, self._make.linear(tensors.projection()), self._make.rms_norm(tensors.norm()), inputs.size
        )

    def _own_input(self, index: int) -> LayerInput | None:
        tensors = self._tensors.layer_inputs()
        if tensors is None:
            return None
        gate, back, norm = tensors.of_layer(index)
        activation = self._config.layers[index].feed_forward.activation
        ways = (self._make.linear(gate), activation, self._make.linear(back))
        return LayerInput(index, *ways, self._make.rms_norm(norm, self._config.norm.eps_behind))

    def embedding(self, num_positions: int) -> Embedding:
        """Of this part."""
        positions = self._tensors.positions(num_positions)
        return Embedding(
            self._make.placed(self._tensors.embedding(self._make.dtype)),
            None if positions is None else self._make.placed(positions),
        )

    def biases(self, of_all: ScoreBiases) -> ScoreBiases:
        """Of this part's heads."""
        own = of_all.of_heads(self._part.heads)
        return own._replace(table=self._make.wide(own.table))

    def _mixer(self, place: int, index: int) -> Attention | Recurrent | Beside | None:
        layer = self._config.layers[index]
        attention = self._attention(place, index) if layer.attends else None
        if layer.recurrence is None:
            return attention
        recurrent = self._recurrent(place, index, layer.recurrence)
        return recurrent if attention is None else Beside(attention, recurrent)

    def _attention(self, place: int, index: int) -> Attention:
        config, tensors = self._config, self._tensors
        sinks, latent = tensors.sinks(index), tensors.latent(index)
        layer, attention = config.layers[index], config.attention_of(index)
        num_heads, num_kv_heads, is_reading, kv_place = (
            len(self._part.heads_of(attention.num_heads)),
            len(self._part.kv_heads_of(attention.num_kv_heads)),
            layer.keys_of is not None,
            self._places[place],
        )
        assert kv_place is not None
        head_dim = attention.vector_dim
        if latent is not None:
            num_kv_heads = 1
        num_rotated = num_heads + (0 if is_reading else num_kv_heads)
        has_values = attention.norms_values and not is_reading
        growth = layer.query_growth
        latent_qkv, values, key_index = (None, None, None) if latent is None else self._latent(place, index, latent)
        if latent is not None or attention.value_dim:  # Groups of inputs cannot be padded.
            padded = tensors.wide_output(index) if latent is None else (latent.output(), None)
            output = self._make.adapted(self._make.linear(*padded), place, AdapterSite.OUTPUT)
        else:
            output = self._make.dense(lambda read: read.output(index), place, AdapterSite.OUTPUT)
        back = self._make.back(
            self._make.behind_norm(index, config.names.output_norm, output),
            self._part.attended(attention.num_heads, attention.attended_dim),
        )
        return Attention(
            shape=AttentionShape(
                num_heads,
                num_kv_heads,
                head_dim,
                attention.scale,
                attention.softcap,
                sinks is not None,
                keys_are_values=latent is not None,
            ),
            place=kv_place,
            is_reading=is_reading,
            qkv=latent_qkv or self._make.dense(lambda read: read.qkv(index), place, AdapterSite.QKV),
            num_normed=num_rotated + num_kv_heads * has_values,
            num_rotated=num_rotated,
            qk_norm=self._qk_norm(index),
            norms_rotated=attention.norms_rotated,
            rope=config.rotary(index),
            growth=None if growth is None else self._growth(growth),
            output=back if values is None else InTurn((values, back)),
            window=layer.window,
            sinks=None if sinks is None else self._make.wide(sinks),
            clip=attention.clip,
            clips_normed=attention.clips_normed,
            num_gates=0 if attention.gates == "none" else num_heads * head_dim,
            gate_kind=attention.gate_kind,
            index=key_index,
            sees_as_before=layer.sees_as_before,
        )

    def _recurrent(self, place: int, index: int, recurrence: RecurrenceConfig) -> Recurrent:
        config, tensors = self._config, self._tensors.recurrence(index)
        taps, bias = tensors.convolution()
        numbers = tensors.head_numbers()
        further = {
            "selection": (tensors.selection(), AdapterSite.STATE_SELECTION),
            "steps": (tensors.steps(), AdapterSite.STATE_STEPS),
            "gates": (tensors.gates(), AdapterSite.STATE_GATES),
        }
        return Recurrent(
            inputs=self._make.adapted(self._make.linear(*tensors.inputs()), place, AdapterSite.STATE_INPUTS),
            recurrence=Recurrence(
                recurrence,
                len(config.recurrences(self._part.layers[:place])),
                Convolution(self._make.wide(taps), None if bias is None else self._make.wide(bias)),
                None if numbers is None else numbers.each(self._make.wide),
                config.norm.eps if recurrence.norm_eps is None else recurrence.norm_eps,
                **{
                    name: self._make.adapted(self._make.linear(weight), place, site)
                    for name, (weight, site) in further.items()
                    if weight is not None
                },
            ),
            output=self._make.adapted(self._make.linear(*tensors.output()), place, AdapterSite.STATE_OUTPUT),
        )

    def head(self) -> Product:
        """The product that gives the logits."""
        head = GatheredLinear(
            self._make.linear(self._tensors.head(), self._tensors.head_bias()),
            self._make.mates,
            outputs=self._part.vocab,
        )
        before, config = self._tensors.before_head(), self._config.before_head
        if before is None or config is None:
            return head
        weight, bias, norm = before
        return InTurn((self._make.linear(weight, bias), ACTIVATIONS[config.activation], self._make.norm(norm), head))

    def _latent(self, place: int, index: int, latent: LatentTensors) -> tuple[LatentQkv, LatentValues, KeyIndex | None]:
        config, query, gates = latent.config, latent.query(), latent.gates()
        expansion, query_in = latent.query_expansion(), latent.query_in()
        key_index: KeyIndex | None = None
        if expansion is None or query_in is None:
            assert query is not None
            queries: Product = self._make.adapted(self._make.linear(query), place, AdapterSite.LATENT_QUERY)
        else:
            compress = self._make.adapted(self._make.linear(query_in), place, AdapterSite.LATENT_QUERY_IN)
            norm, expand = self._expansion(expansion, place, AdapterSite.LATENT_QUERY)
            queries = InTurn((compress, norm, expand))
            if config.index is not None and not self._config.layers[index].sees_as_before:
                key_index = self._key_index(InTurn((compress, norm)), latent.index(), config.index.num_chosen)
        num_heads, (keys, values) = len(self._part.heads), latent.keys_and_values()
        qkv = LatentQkv(
            query=queries,
            compress=self._make.adapted(self._make.linear(latent.key_value_in()), place, AdapterSite.LATENT_IN),
            norm=RmsNorm(self._make.placed(latent.row_norm()), LATENT_EPS),
            absorb=self._make.of_heads(keys, place, AdapterSite.LATENT_KEYS),
            rank=config.rank,
            num_heads=num_heads,
            gates=None
            if gates is None
            else self._make.adapted(self._make.linear(gates), place, AdapterSite.LATENT_GATES),
        )
        expand = self._make.of_heads(values.transpose(1, 2), place, AdapterSite.LATENT_VALUES)
        return qkv, LatentValues(expand, config.rank, num_heads), key_index

    def _key_index(self, compress: Product, tensors: IndexTensors, num_chosen: int) -> KeyIndex:
        """It computes the compressed row again, a twentieth of attention."""
        norm = LayerNorm(self._make.wide(tensors.norm_weight), self._make.wide(tensors.norm_bias), INDEX_EPS)
        return KeyIndex(
            compress=compress,
            queries=self._make.linear(tensors.queries),
            keys=InTurn((self._make.linear(tensors.keys), norm)),
            weights=self._make.wide(tensors.weights),
            num_chosen=num_chosen,
        )

    def _expansion(self, expansion: Expansion, place: int, site: AdapterSite) -> tuple[Product, Product]:
        norm = RmsNorm(self._make.placed(expansion.norm), LATENT_EPS)
        return norm, self._make.adapted(self._make.linear(expansion.weight), place, site)

    def _feed_forward(self, place: int, index: int) -> Product:
        feed = self._config.layers[index].feed_forward
        inner, curve = self._part.inner(feed.intermediate_size), self._tensors.curve(index)
        if feed.experts is not None:
            return eager_experts(self._make, place, self._tensors.experts(index), feed, feed.experts)
        down = self._make.dense(lambda read: read.down(index), place, AdapterSite.DOWN)
        return FeedForward(
            up=self._make.dense(lambda read: read.gate_up(index), place, AdapterSite.GATE_UP),
            activation=feed.activation,
            is_gated=feed.is_gated,
            down=self._make.back(self._make.behind_norm(index, self._config.names.down_norm, down), inner),
            curve=None if curve is None else self._make.placed(curve),
            limit=feed.limit,
            sparsity=feed.sparsity,
        )

    def _qk_norm(self, index: int) -> Product | None:
        weight = self._tensors.head_norms.weight(index)
        if weight is not None and self._config.attention.qk_norm == "layer":
            bias = self._tensors.head_norms.bias(index)
            return HeadLayerNorms(
                self._make.wide(weight), None if bias is None else self._make.wide(bias), self._config.norm.eps
            )
        if weight is None or self._config.attention.qk_norm != "all":
            return None if weight is None else self._make.rms_norm(weight)
        num_heads = len(self._part.heads)
        queries, keys = (self._make.rms_norm(part.flatten()) for part in (weight[:num_heads], weight[num_heads:]))
        return SpanNorms(queries, keys, num_heads)
