"""What the steps of an open model run on: rows, the columns of a step, the sampler, one or two decoders and their pools.

Owns: that these exist, in one memory, and the launch of one step. Must not know: who is in the rows, what becomes of
what is drawn, in which order the device's memory is given out.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from headway_executor.backend import BackendConfig, StepBatch
from headway_executor.gpu.attention import AttentionSpace, attention_spaces, tile_sizes_of
from headway_executor.gpu.block_mover import BlockMover
from headway_executor.gpu.chunk_library import OPTION, OWN_KERNEL, LibraryChoice
from headway_executor.gpu.decoder import Decoder, DecoderWeights
from headway_executor.gpu.device_adapters import DeviceAdapters
from headway_executor.gpu.device_model import DeviceModel
from headway_executor.gpu.device_rows import DeviceRows
from headway_executor.gpu.device_sampler import DeviceSampler
from headway_executor.gpu.device_weights import Activations, QuantizationKind
from headway_executor.gpu.graphs import most_recorded_tokens
from headway_executor.gpu.key_index import SpaceSizes
from headway_executor.gpu.loading import load_decoder
from headway_executor.gpu.prompt_reader import PromptReader
from headway_executor.gpu.runtime import Runtime
from headway_executor.gpu.speculation import most_rows_of
from headway_executor.gpu.stage_mates import DeviceMates, mates_of
from headway_executor.gpu.step_columns import StepShape
from headway_executor.gpu.step_upload import StepUpload
from headway_executor.gpu.tuning_file import AUTO, tunings_of
from headway_executor.memory.kv_pool import CODES
from headway_executor.models.adapters import ModelAdapters
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import FeedForwardConfig
from headway_executor.models.kv_layout import KvPlace, vectors_layout
from headway_executor.models.model_settings import ModelSettings
from headway_executor.models.part import ModelPart
from headway_executor.models.stage import stage_of
from headway_executor.models.state_memory import states_of
from headway_executor.models.stored_names import TensorSource
from headway_executor.ranks.group import RankGroup
from headway_executor.setting_checks import TRITON, option_of
from headway_kernels.gpu.attention.tuning import AttentionTuning

_QUANTIZATIONS: dict[str, QuantizationKind | None] = {"none": None, "int8": "int8", "int4": "int4", "fp8": "fp8"}
_ACTIVATIONS: dict[str, Activations] = {"auto": "auto", "exact": "exact", "fp8": "fp8"}


class ModelFiles(NamedTuple):
    """A model to load: what is known of it, its tensors, which are read at once, and which part of it is wanted."""

    settings: ModelSettings
    weights: TensorSource
    part: ModelPart


class DeviceParts:
    """``group``: the other ranks of this executor, or None. ``draft`` None: no model here proposes tokens. Pools come with
    ``open_pools``.
    """

    def __init__(
        self,
        config: BackendConfig,
        files: ModelFiles,
        runtime: Runtime,
        group: RankGroup | None,
        adapters: ModelAdapters,
        draft: ModelFiles | None,
    ) -> None:
        model_config, dtype, max_model_len = files.settings
        self.config = config
        self.runtime = runtime
        self.stage = stage_of(files.part, group, dtype=dtype, most_tokens=config.max_num_batched_tokens)
        self.max_model_len = max_model_len
        self.settings = files.settings
        self.vocab_size = vocab_size = model_config.vocab_size
        self._tunings = tunings_of(config.options.get("tuning", AUTO), runtime.device)
        max_num_rows = config.max_num_seqs
        num_proposals = 0 if config.speculation == "off" else config.num_speculative_tokens
        self.most_rows = most_rows_of(max_num_rows, config.max_num_batched_tokens, num_proposals)
        most_tokens = most_recorded_tokens(self.most_rows, config.max_num_batched_tokens)
        self.adapters = DeviceAdapters(
            adapters, model_config, runtime, max_num_rows=self.most_rows, most_tokens=most_tokens
        )
        self.upload = StepUpload(runtime, self.most_rows)
        self.rows = DeviceRows(
            runtime, max_num_rows=max_num_rows, max_model_len=max_model_len, block_size=config.block_size
        )
        self.sampler = DeviceSampler(
            runtime, vocab_size=vocab_size, max_num_rows=max_num_rows, max_num_draws=self.most_rows
        )
        self.prompt_reader = PromptReader(runtime, vocab_size=vocab_size, max_num_rows=max_num_rows)
        self.mates = self._mates(files)
        """Who has other parts of the same layers."""
        self.target = self._loaded(files, self.most_rows, self.mates, self.adapters, option_of(config, TRITON, OPTION))
        self.states = self.target.decoder.states
        """Of rows, in a model that has some."""
        self.max_num_rows = max_num_rows if self.states is None else self.states.num_rows
        """Of requests that run at once."""
        if self.states is not None:
            self.most_rows = self.max_num_rows  # None of them has proposals.
        self.draft_model_len = 0 if draft is None else draft.settings.max_model_len
        self.draft = None if draft is None else self._loaded(draft, max_num_rows, None, None, OWN_KERNEL)

    @property
    def models(self) -> tuple[DeviceModel, ...]:
        """The model, and the one that proposes tokens, if there is one."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def open_pools(self, num_blocks: int, *, num_host_blocks: int) -> BlockMover:
        """Take the memory of so many blocks in each model; return the moves of the model's own."""
        mover = self.target.open_pool(
            num_blocks,
            num_host_blocks=num_host_blocks,
            host_memory=self.config.host_memory,
            part_of=self.stage.part.in_words,
        )
        if self.draft is not None:
            # Its blocks are never moved: what it has lost it computes again.
            self.draft.open_pool(num_blocks, num_host_blocks=0, host_memory=lambda *_: None)
        return mover

    @property
    def tiling_bounds(self) -> set[int]:
        """Up to which numbers of tokens steps have products with tiles of their own."""
        model_config, dtype, _ = self.settings
        bounds = self._tunings.most_tokens(dtype)
        for feed in dict.fromkeys(layer.feed_forward for layer in model_config.layers):
            if feed.experts is not None:
                routing = feed.experts.routing
                bounds |= {
                    most * routing.num_experts // routing.num_chosen for most in self._tunings.most_rounded_pairs()
                }
        return bounds

    def launch(self, batch: StepBatch, shape: StepShape, *, draws: bool = False) -> None:
        """Send the step's columns and launch it; ``draws``: with the likeliest token of each row behind it."""
        size = self.target.size_of(shape, draws=draws)
        token_rows = np.repeat(batch.rows, batch.num_scheduled_tokens)
        self.adapters.begin(token_rows, size.num_tokens)
        size = size._replace(is_adapted=self.adapters.are_any)
        if self.adapters.are_any and self.target.lacks_adapted:
            self.record_adapted()
            self.adapters.begin(token_rows, size.num_tokens)
        if self.states is not None:
            self.states.advance(batch.rows, batch.num_computed_tokens, batch.num_scheduled_tokens)
        self.upload.send(batch, shape, size.num_rows)
        self.target.launch(size, batch)

    def record(self) -> None:
        """Record the graphs of all models, of steps without adapters."""
        self.upload.clear()  # The recording may run the step.
        for model in self.models:
            model.record(self._said_recording)

    def record_adapted(self) -> None:
        """Record those of steps with adapters, once, if any are recorded."""
        if self.target.lacks_adapted:
            self.upload.clear()
            self.adapters.clear()
            self.target.record(self._said_recording, is_adapted=True)

    def _said_recording(self, done: int, total: int) -> None:
        self.config.progress("recording graphs", done, total)

    def _loaded(
        self,
        files: ModelFiles,
        most_rows: int,
        mates: DeviceMates | None,
        adapters: DeviceAdapters | None,
        chunk_attention: str,
    ) -> DeviceModel:
        """A model over these rows and columns."""
        config, (model_config, dtype, _) = self.config, files.settings
        layout = vectors_layout(model_config, files.part, config.block_size, dtype, config.kv_cache_dtype)

        def tuning_of(attention: AttentionConfig) -> AttentionTuning:
            return self._tunings.of_attention(tile_sizes_of(attention, dtype, is_coded=config.kv_cache_dtype == CODES))

        attending = (index for index in files.part.layers if model_config.layers[index].attends)
        attention = attention_spaces(
            tuple(dict.fromkeys(files.part.attention(model_config.attention_of(index)) for index in attending)),
            tuning_of,
            block_size=config.block_size,
            sizes=SpaceSizes(config.max_num_batched_tokens, files.settings.max_model_len, model_config.hidden_size),
            max_num_rows=most_rows,
            dtype=dtype,
            device=self.runtime.device,
        )
        places = dict(zip(files.part.layers, layout.places, strict=True))
        weights = self._weights(files, mates, adapters, attention, places)
        # After the weights, of the memory that is free then.
        states = states_of(model_config, files.part.layers, config, self.runtime.device, self.stage.group)
        decoder = Decoder(
            model_config,
            weights,
            self.rows,
            self.upload.views,
            tuple(attention.values()),
            states,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_rows=most_rows,
            dtype=dtype,
            long_attention=self._library(files, tuning_of(model_config.attention)).of(
                chunk_attention, config.max_num_batched_tokens
            ),
        )
        return DeviceModel(
            self.runtime,
            decoder,
            layout,
            config.block_size,
            most_rows=most_rows if states is None else states.num_rows,
            most_tokens=config.max_num_batched_tokens,
            draw=self._draw(),
            adapters=adapters,
        )

    def _weights(
        self,
        files: ModelFiles,
        mates: DeviceMates | None,
        adapters: DeviceAdapters | None,
        attention: Mapping[AttentionConfig, AttentionSpace],
        places: Mapping[int, KvPlace | None],
    ) -> DecoderWeights:
        config, (model_config, dtype, max_model_len) = self.config, files.settings
        return load_decoder(
            model_config,
            files.weights,
            files.part,
            mates,
            max_model_len=max_model_len,
            dtype=dtype,
            tunings=self._tunings,
            quantization=_QUANTIZATIONS[config.quantization],
            activations=_ACTIVATIONS[option_of(config, TRITON, "activations")],
            adapters=adapters,
            attention=attention,
            places=places,
            max_num_tokens=config.max_num_batched_tokens,
            progress=lambda done, total: config.progress("loading layers", done, total),
            warn=config.warn,
        )

    def _mates(self, files: ModelFiles) -> DeviceMates | None:
        model_config, dtype, _ = files.settings
        degree = self.config.place.tensor_parallel
        widths = {each.num_heads * each.attended_dim for each in model_config.attentions} | {model_config.hidden_size}
        widest = max(-(-width // degree) for width in widths)
        widest = max(widest, *(_widest_inner(layer.feed_forward, degree) for layer in model_config.layers))
        return mates_of(
            self.stage.group,
            most_numbers=self.config.max_num_batched_tokens * widest,
            dtype=dtype,
            device=self.runtime.device,
        )

    def _library(self, files: ModelFiles, tuning: AttentionTuning) -> LibraryChoice:
        config, (model_config, dtype, _) = self.config, files.settings
        return LibraryChoice(
            model_config,
            dtype,
            tuning,
            self.runtime.device,
            block_size=config.block_size,
            is_coded=config.kv_cache_dtype == CODES,
            said=config.warn,
        )

    def _draw(self) -> Callable[[Tensor], None]:
        # Not of these parts: a closed model gives its memory back at once, without a search for cycles.
        sampler, views, store = self.sampler, self.upload.views, self.rows.token_store
        return lambda logits: sampler.draw_likeliest(logits, views, store)


def _widest_inner(feed: FeedForwardConfig, degree: int) -> int:
    """Numbers of a token, between the products of its feed-forward, that one of ``degree`` ranks has."""
    own, experts = -(-feed.intermediate_size // degree), feed.experts
    return own if experts is None else max(own * experts.routing.num_chosen, -(-experts.shared_size // degree))
