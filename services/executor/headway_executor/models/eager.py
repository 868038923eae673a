"""A model as plain torch operators: any device, any floating dtype.

Owns: building the decoder, from ids to hidden state. Must not know: files, how it computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.memory.kv_pool import KvPool
from headway_executor.models.adapted import AdaptedProduct, StepAdapters
from headway_executor.models.adapters import AdapterSite
from headway_executor.models.alibi import ScoreBiases, score_biases
from headway_executor.models.altup import States
from headway_executor.models.altup_loading import alternating_layer, states_at_ends
from headway_executor.models.attention import AttentionPlan, AttentionShape, OrderedRows
from headway_executor.models.coded_tensors import CodedTensors, Projection
from headway_executor.models.config import ExpertsConfig, FeedForwardConfig, ModelConfig, RecurrenceConfig
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
    StepPlan,
)
from headway_executor.models.expert_tensors import ExpertTensors, NormsOfExperts
from headway_executor.models.experts import Experts
from headway_executor.models.forward import StepRows
from headway_executor.models.kv_layout import KvPlace
from headway_executor.models.latent import InTurn, LatentQkv
from headway_executor.models.latent_tensors import LATENT_EPS, Expansion, LatentTensors
from headway_executor.models.linear import GatheredLinear, Linear, RoundingLinear, SummedLinear, placed
from headway_executor.models.loading import ModelTensors, NormTensors
from headway_executor.models.part import whole
from headway_executor.models.recurrence import Recurrence, RowStates, StateSpan, spans_of
from headway_executor.models.rope import interleaved, query_factors, table_of
from headway_executor.models.stage import Stage
from headway_executor.ranks.stage_mates import Alone, ColumnMates, Cut
from headway_kernels.experts import Expert
from headway_kernels.states import Convolution


class EagerModel:
    """A ``ForwardPass``. ``embedding`` is None in a later stage. ``adapters``: the loader's. ``states``: of a model that has
    them.
    """

    has_slow_start = True
    """Torch prepares its operators."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        embedding: Embedding | None,
        pool: KvPool,
        dtype: torch.dtype,
        stage: Stage | None = None,
        adapters: StepAdapters | None = None,
        states: RowStates | None = None,
    ) -> None:
        self.states = states
        self._stage = stage or Stage(whole(config))
        self._mates = _mates_of(self._stage)
        self._decoder = decoder
        self._embedding = embedding
        self._step_adapters = adapters
        self.adapters = None if adapters is None else adapters.adapters
        self.pool = pool
        self._dtype = dtype

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.run``."""
        return self._run(rows, token_ids, self._decoder.logits)

    def hidden(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.hidden``."""
        return self._run(rows, token_ids, self._decoder.normed)

    def _run(self, rows: StepRows, token_ids: Tensor, end: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """``end``: what the last stage makes of the hidden states of all tokens and the places of those wanted."""
        hidden, wanted = self._run_layers(rows, token_ids)
        part = self._stage.part
        if part.place.is_last_stage:
            return end(hidden, wanted)
        own = part.own_hidden
        self._stage.pass_on(hidden[:, own.start : own.stop])
        return hidden[:0]

    def _run_layers(self, rows: StepRows, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden states of all tokens, and the places of those that are wanted."""
        ordered = OrderedRows(rows.num_new, rows.num_computed, rows.tables)
        token_rows = ordered.token_rows()
        positions = ordered.positions(token_rows)
        block_size = self.pool.block_size
        slots = ordered.tables[token_rows, positions // block_size].astype(np.int64) * block_size
        slots += positions % block_size
        device = token_ids.device
        columns = np.stack([rows.numbers[ordered.order][token_rows], positions])
        store_rows, store_positions = torch.from_numpy(columns).to(device).unbind(0)
        attention = AttentionPlan(self.pool, ordered, slots, store_positions, self._dtype, self._decoder.biases)
        if self._step_adapters is not None:
            self._step_adapters.begin(columns[0], device)
        words = token_ids[store_rows, store_positions]
        hidden, table = self._begin(words, store_positions), self._decoder.table
        inputs = None if table is None else table(words, hidden)
        plan = StepPlan(attention, self.states, self._spans(rows, ordered, device), inputs)
        self._decoder.run_layers(hidden, store_positions, plan)
        return hidden, torch.from_numpy(_places_in_order(rows, ordered)[rows.wanted]).to(device)

    def _spans(self, rows: StepRows, ordered: OrderedRows, device: torch.device) -> list[StateSpan]:
        if self.states is None:
            return []
        self.states.advance(rows.numbers, rows.num_computed, rows.num_new)
        first = ordered.kv_length - ordered.num_new
        return spans_of(rows.numbers[ordered.order], ordered.num_new, first, device)

    def _begin(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self._embedding is None:
            own = self._stage.receive(len(token_ids), self._dtype)
            assert own is not None
        else:
            own = self._embedding(token_ids, positions)
        return self._mates.gather(own, self._stage.part.hidden)


def _places_in_order(rows: StepRows, ordered: OrderedRows) -> NDArray[np.int64]:
    starts = np.empty_like(ordered.starts)
    starts[ordered.order] = ordered.starts
    places, positions = rows.token_places()
    return starts[places] + positions - rows.num_computed[places]


def _mates_of(stage: Stage) -> ColumnMates:
    return Alone() if stage.group is None else stage.group.columns


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
    loader = _Loader(config, checkpoint, stage, dtype, device, adapters, max_model_len, places)
    loader.rounds_inputs = rounds_inputs
    part, tensors = loader.part, loader.tensors
    biases, final_norm = score_biases(config.attention, max_model_len), tensors.final_norm()
    decoder = Decoder(
        rotations={rotary: table_of(rotary, max_model_len).to(device) for rotary in config.rotaries},
        layers=tuple(loader.layer(place, index) for place, index in enumerate(part.layers)),
        final_norm=None if final_norm is None else loader.norm(final_norm),
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
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        stage: Stage,
        dtype: torch.dtype,
        device: torch.device,
        adapters: StepAdapters | None,
        max_model_len: int,
        places: Sequence[KvPlace | None],
    ) -> None:
        self._config = config
        self._places = places
        self._growth = cache(lambda growth: query_factors(growth, max_model_len).to(device))  # one for layers alike
        self._mates = _mates_of(stage)
        self._dtype = dtype
        self._device = device
        self._adapters = adapters
        self.part = stage.part
        self.tensors = ModelTensors(config, checkpoint, interleaved, part=stage.part)
        self.rounds_inputs = True
        self._coded = CodedTensors(
            checkpoint, lambda source: ModelTensors(config, source, interleaved, part=stage.part)
        )

    def layer(self, place: int, index: int) -> Layer:
        """Layer ``index`` of the model, ``place`` of the stage."""
        made, states, config = self._layer(place, index), self.tensors.states(), self._config.states
        if states is None or config is None:
            return made
        tensors = states.of_layer(index)
        scale = placed(tensors.output_scale, self._dtype, self._device) if config.scales_output else None
        return alternating_layer(made, tensors, linear=self._plain, norm=self._rms_norm, output_scale=scale)

    def states(self) -> States | None:
        """Of the ends of a model whose tokens have several states."""
        tensors = self.tensors.states()
        return None if tensors is None else states_at_ends(tensors, self._plain)

    def _layer(self, place: int, index: int) -> DecoderLayer:
        config, has_feed_forward = self._config, self._config.layers[index].has_feed_forward
        eps = (None, config.norm.eps_behind) * 2
        norms = [
            None if norm is None else self.norm(norm, own)
            for norm, own in zip(self.tensors.norms_of_layer(index), eps, strict=True)
        ]
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm = norms
        factor = self.tensors.layer_factor(index)
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
            factor=None if factor is None else placed(factor, self._dtype, self._device),
        )

    def table(self) -> LayerTable | None:
        """Of the inputs of each layer's own, which every rank has whole."""
        inputs, tensors = self._config.layer_inputs, self.tensors.layer_inputs()
        if inputs is None or tensors is None:
            return None
        words = placed(tensors.table(), self._dtype, self._device)
        return LayerTable(words, self._linear(tensors.projection(), None), self._rms_norm(tensors.norm()), inputs.size)

    def _own_input(self, index: int) -> LayerInput | None:
        tensors = self.tensors.layer_inputs()
        if tensors is None:
            return None
        gate, back, norm = tensors.of_layer(index)
        activation = self._config.layers[index].feed_forward.activation
        ways = (self._linear(gate, None), activation, self._linear(back, None))
        return LayerInput(index, *ways, self._rms_norm(norm, self._config.norm.eps_behind))

    def embedding(self, num_positions: int) -> Embedding:
        """Of this part."""
        positions = self.tensors.positions(num_positions)
        return Embedding(
            placed(self.tensors.embedding(self._dtype), self._dtype, self._device),
            None if positions is None else placed(positions, self._dtype, self._device),
        )

    def biases(self, of_all: ScoreBiases) -> ScoreBiases:
        """Of this part's heads."""
        own = of_all.of_heads(self.part.heads)
        return own._replace(table=self._wide(own.table))

    def _mixer(self, place: int, index: int) -> Attention | Recurrent | Beside | None:
        layer = self._config.layers[index]
        attention = self._attention(place, index) if layer.attends else None
        if layer.recurrence is None:
            return attention
        recurrent = self._recurrent(place, index, layer.recurrence)
        return recurrent if attention is None else Beside(attention, recurrent)

    def _attention(self, place: int, index: int) -> Attention:
        config, tensors = self._config, self.tensors
        sinks, latent = tensors.sinks(index), tensors.latent(index)
        layer, attention = config.layers[index], config.attention_of(index)
        num_heads, num_kv_heads, is_reading, kv_place = (
            len(self.part.heads_of(attention.num_heads)),
            len(self.part.kv_heads_of(attention.num_kv_heads)),
            layer.keys_of is not None,
            self._places[place],
        )
        assert kv_place is not None
        num_rotated = num_heads + (0 if is_reading else num_kv_heads)
        has_values = attention.norms_values and not is_reading
        growth = layer.query_growth
        if latent is not None or attention.value_dim:  # Groups of inputs cannot be padded.
            padded = tensors.wide_output(index) if latent is None else (latent.output(), None)
            output = self._adapted(self._linear(*padded), place, AdapterSite.OUTPUT)
        else:
            output = self._product(lambda read: read.output(index), place, AdapterSite.OUTPUT)
        return Attention(
            shape=AttentionShape(
                num_heads,
                num_kv_heads,
                attention.head_dim,
                attention.scale,
                attention.softcap,
                sinks is not None,
            ),
            place=kv_place,
            is_reading=is_reading,
            qkv=self._product(lambda read: read.qkv(index), place, AdapterSite.QKV)
            if latent is None
            else self._latent_qkv(place, latent),
            num_normed=num_rotated + num_kv_heads * has_values,
            num_rotated=num_rotated,
            qk_norm=self._qk_norm(index),
            norms_rotated=attention.norms_rotated,
            rope=config.rotary(index),
            growth=None if growth is None else self._growth(growth),
            output=self._back(
                self._normed(index, config.names.output_norm, output),
                self.part.attended(attention.num_heads, attention.head_dim),
            ),
            window=layer.window,
            sinks=None if sinks is None else self._wide(sinks),
            clip=attention.clip,
            clips_normed=attention.clips_normed,
            num_gates=0 if attention.gates == "none" else num_heads * attention.head_dim,
            gate_kind=attention.gate_kind,
        )

    def _recurrent(self, place: int, index: int, recurrence: RecurrenceConfig) -> Recurrent:
        config, tensors = self._config, self.tensors.recurrence(index)
        taps, bias = tensors.convolution()
        numbers = tensors.head_numbers()
        further = {
            "selection": (tensors.selection(), AdapterSite.STATE_SELECTION),
            "steps": (tensors.steps(), AdapterSite.STATE_STEPS),
            "gates": (tensors.gates(), AdapterSite.STATE_GATES),
        }
        return Recurrent(
            inputs=self._adapted(self._linear(*tensors.inputs()), place, AdapterSite.STATE_INPUTS),
            recurrence=Recurrence(
                recurrence,
                len(config.recurrences(self.part.layers[:place])),
                Convolution(self._wide(taps), None if bias is None else self._wide(bias)),
                None if numbers is None else numbers.each(self._wide),
                config.norm.eps if recurrence.norm_eps is None else recurrence.norm_eps,
                **{
                    name: self._adapted(self._linear(weight, None), place, site)
                    for name, (weight, site) in further.items()
                    if weight is not None
                },
            ),
            output=self._adapted(self._linear(*tensors.output()), place, AdapterSite.STATE_OUTPUT),
        )

    def norm(self, tensors: NormTensors, eps: float | None = None) -> Product:
        """A norm of whole rows, by default with the epsilon of most."""
        config = self._config.norm
        eps = config.eps if eps is None else eps
        if config.kind == "rms":
            return self._rms_norm(tensors.weight, eps)
        bias = None if tensors.bias is None else self._wide(tensors.bias)
        return LayerNorm(self._wide(tensors.weight), bias, eps)

    def head(self) -> Product:
        """The product that gives the logits."""
        head = GatheredLinear(
            self._linear(self.tensors.head(), self.tensors.head_bias()), self._mates, outputs=self.part.vocab
        )
        before, config = self.tensors.before_head(), self._config.before_head
        if before is None or config is None:
            return head
        weight, bias, norm = before
        return InTurn((self._linear(weight, bias), ACTIVATIONS[config.activation], self.norm(norm), head))

    def _latent_qkv(self, place: int, latent: LatentTensors) -> LatentQkv:
        config, query, gates = self._config.attention.latent, latent.query(), latent.gates()
        assert config is not None
        expansion, query_in = latent.query_expansion(), latent.query_in()
        if expansion is None or query_in is None:
            assert query is not None
            queries: Product = self._adapted(self._linear(query, None), place, AdapterSite.LATENT_QUERY)
        else:
            compress = self._adapted(self._linear(query_in, None), place, AdapterSite.LATENT_QUERY_IN)
            queries = InTurn((compress, *self._expansion(expansion, place, AdapterSite.LATENT_QUERY)))
        return LatentQkv(
            query=queries,
            compress=self._adapted(self._linear(latent.key_value_in(), None), place, AdapterSite.LATENT_IN),
            expand=InTurn(self._expansion(latent.key_value_expansion(), place, AdapterSite.LATENT_EXPANSION)),
            rank=config.rank,
            num_heads=len(self.part.heads),
            places=latent.shared_places().to(self._device),
            gates=None if gates is None else self._adapted(self._linear(gates, None), place, AdapterSite.LATENT_GATES),
        )

    def _expansion(self, expansion: Expansion, place: int, site: AdapterSite) -> tuple[Product, Product]:
        norm = RmsNorm(placed(expansion.norm, self._dtype, self._device), LATENT_EPS)
        return norm, self._adapted(self._linear(expansion.weight, None), place, site)

    def _feed_forward(self, place: int, index: int) -> Product:
        feed = self._config.layers[index].feed_forward
        inner, curve = self.part.inner(feed.intermediate_size), self.tensors.curve(index)
        if feed.experts is not None:
            return self._experts(place, self.tensors.experts(index), feed, feed.experts)
        down = self._product(lambda read: read.down(index), place, AdapterSite.DOWN)
        return FeedForward(
            up=self._product(lambda read: read.gate_up(index), place, AdapterSite.GATE_UP),
            activation=feed.activation,
            is_gated=feed.is_gated,
            down=self._back(self._normed(index, self._config.names.down_norm, down), inner),
            curve=None if curve is None else placed(curve, self._dtype, self._device),
            limit=feed.limit,
            sparsity=feed.sparsity,
        )

    def _experts(self, place: int, tensors: ExpertTensors, feed: FeedForwardConfig, config: ExpertsConfig) -> Experts:
        correction, shared, shared_gate = tensors.correction(), tensors.shared(), tensors.shared_gate()
        latent = tensors.latent()
        sites = (AdapterSite.EXPERTS_IN, AdapterSite.EXPERTS_OUT)
        around: dict[str, Any] = {
            name: self._adapted(self._linear(weight, None), place, site)
            for name, weight, site in zip(("compress", "expand"), latent or (), sites, strict=False)
        }
        part, between = self.part, Alone() if self.part.is_fast else self._mates
        products = [
            self._of_expert(place, tensors.expert(number), number) for number in range(config.routing.num_experts)
        ]
        made = Experts(
            routing=config.routing,
            router=self._adapted(self._linear(*tensors.router()), place, AdapterSite.ROUTER),
            experts=tuple(
                FeedForward(up, feed.activation, feed.is_gated, down, limit=feed.limit) for up, down in products
            ),
            between=partial(between.gather, cut=part.inner(feed.intermediate_size)),
            behind=self._mates.add_up if part.is_fast else partial(self._mates.gather, cut=part.hidden),
            correction=None if correction is None else self._wide(correction),
            shared=None if shared is None else self._shared(place, shared, feed, config),
            shared_gate=None
            if shared_gate is None
            else self._adapted(self._linear(shared_gate, None), place, AdapterSite.SHARED_GATE),
            begin=None if self._adapters is None else self._adapters.begin_experts,
            **around,
        )
        norms = tensors.norms()
        return made if norms is None else self._with_norms(made, norms)

    def _with_norms(self, experts: Experts, norms: NormsOfExperts) -> Experts:
        """Where each part normalises the hidden state by itself."""
        assert experts.shared is not None
        return replace(
            experts,
            router=InTurn((self._rms_norm(norms.router), experts.router)),
            compress=self._rms_norm(norms.experts),
            expand=self._rms_norm(norms.experts_post),
            shared=InTurn((self._rms_norm(norms.shared), experts.shared, self._rms_norm(norms.shared_post))),
            factors=self._wide(norms.weights),
        )

    def _shared(self, place: int, expert: Expert, feed: FeedForwardConfig, config: ExpertsConfig) -> FeedForward:
        up, down = self._of_expert(place, expert, None)
        back = self._back(down, self.part.inner(config.shared_size))
        return FeedForward(up, feed.activation, feed.is_gated, back, limit=config.shared_limit)

    def _of_expert(self, place: int, expert: Expert, number: int | None) -> tuple[Product, Product]:
        """The products to and from an expert; ``number`` None: the shared one."""
        sites = (
            (AdapterSite.SHARED_GATE_UP, AdapterSite.SHARED_DOWN)
            if number is None
            else (AdapterSite.EXPERT_GATE_UP, AdapterSite.EXPERT_DOWN)
        )
        return (
            self._adapted(self._linear(expert.gate_up, expert.gate_up_bias), place, sites[0], number),
            self._adapted(self._linear(expert.down, expert.down_bias), place, sites[1], number),
        )

    def _qk_norm(self, index: int) -> Product | None:
        weight = self.tensors.head_norms.weight(index)
        if weight is not None and self._config.attention.qk_norm == "layer":
            bias = self.tensors.head_norms.bias(index)
            return HeadLayerNorms(self._wide(weight), None if bias is None else self._wide(bias), self._config.norm.eps)
        if weight is None or self._config.attention.qk_norm != "all":
            return None if weight is None else self._rms_norm(weight)
        num_heads = len(self.part.heads)
        queries, keys = (self._rms_norm(part.flatten()) for part in (weight[:num_heads], weight[num_heads:]))
        return SpanNorms(queries, keys, num_heads)

    def _rms_norm(self, weight: Tensor, eps: float | None = None) -> RmsNorm:
        norm = self._config.norm
        rounded = placed(weight, self._dtype, self._device) if norm.rounds_first else self._wide(weight)
        return RmsNorm(rounded, norm.eps if eps is None else eps)

    def _wide(self, tensor: Tensor) -> Tensor:
        return placed(tensor, torch.float32, self._device)

    def _plain(self, weight: Tensor) -> Linear:
        return self._linear(weight, None)

    def _linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(weight, bias, dtype=self._dtype, device=self._device)

    def _product(self, read: Projection, place: int, site: AdapterSite) -> Product:
        """A dense product of a layer."""
        # Some inputs do not tell how whole rows are rounded.
        coded = None if self.part.is_fast else self._coded.read(read)
        if coded is None:
            return self._adapted(self._linear(*read(self.tensors)), place, site)
        weight, bias = coded
        made = self._linear(weight.float(), bias)
        return self._adapted(RoundingLinear(made) if self.rounds_inputs and weight.is_for_int8 else made, place, site)

    def _normed(self, index: int, name: str | None, product: Product) -> Product:
        """A product behind the norm of that ``name`` in a layer, if there is one."""
        norm = self.tensors.norm(index, name)
        return product if norm is None else InTurn((self.norm(norm), product))

    def _adapted(self, product: Product, place: int, site: AdapterSite, number: int | None = None) -> Product:
        return product if self._adapters is None else AdaptedProduct(product, self._adapters, place, site, number)

    def _back(self, own: Product, inputs: Cut) -> Product:
        """A projection back to the hidden state."""
        if self.part.is_whole_stage:
            return own
        if self.part.is_fast:
            return SummedLinear(own, self._mates)
        return GatheredLinear(own, self._mates, inputs=inputs, outputs=self.part.hidden)
