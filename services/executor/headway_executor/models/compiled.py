"""A model on the CPU kernels, which compute in float32, or multiply in bfloat16.

Owns: their arguments, and what they lack. Must not know: how they compute.

A row's logits have the same bits in any step and with any chunks, but not with any variant of the kernels.
"""

import itertools

import torch
from torch import Tensor

from headway_executor.backend import BackendConfigError
from headway_executor.memory.kv_pool import KvPool
from headway_executor.models.adapters import ModelAdapters
from headway_executor.models.attention_config import AttentionConfig
from headway_executor.models.config import ModelConfig
from headway_executor.models.features import Feature, lacking
from headway_executor.models.forward import StepRows
from headway_executor.models.part import ModelPart, part_of
from headway_executor.models.recurrence import RowStates
from headway_executor.models.stage import Stage
from headway_executor.rank_place import RankPlace
from headway_kernels.cpu.decoder import Decoder
from headway_kernels.cpu.latent import latent_row
from headway_kernels.cpu.library import CpuLibrary, StaleKernelsError, load_library
from headway_kernels.cpu.recurrence import MOST_TAPS

_DTYPES = (torch.float32, torch.bfloat16)


def library_for(device: torch.device, dtype: torch.dtype) -> CpuLibrary | None:
    """Return the kernels if this processor and the settings allow them.

    Raises:
        BackendConfigError: they were compiled of other sources.
    """
    return checked_library() if device.type == "cpu" and dtype in _DTYPES else None


def checked_library() -> CpuLibrary | None:
    """Return the kernels that this processor runs. Raises ``BackendConfigError``: they were compiled of other sources."""
    try:
        return load_library()
    except StaleKernelsError as error:
        raise BackendConfigError(str(error)) from None


def kernels_lack(library: CpuLibrary, config: ModelConfig, place: RankPlace) -> str:
    """What of this model the kernels do not have, in words; empty if nothing."""
    # Heads of latent attention are narrower than its rows, as they are published.
    widths = ((attention.head_dim, stored_heads(library, attention)[1]) for attention in config.attentions)
    widest = max(itertools.chain.from_iterable(widths))
    if widest > library.max_head_dim:
        return f"heads of {widest} channels"
    padded = [attention.head_dim for attention in config.attentions if attention.head_dim % library.lanes]
    if padded and config.names.output_norm is not None:
        return f"a norm over heads of {padded[0]} channels"
    if any(recurrence.taps > MOST_TAPS for recurrence in config.recurrences(range(config.num_layers))):
        return f"convolutions of more than {MOST_TAPS} tokens"
    every = frozenset(Feature) - {Feature.LATENT_EXPERTS, Feature.STATES, Feature.SPARSITY, Feature.INDEX}
    return lacking(
        config,
        every
        if place.tensor_parallel == 1
        else every - {Feature.POST_NORM, Feature.UNEVEN_LAYERS, Feature.LAYER_INPUTS, Feature.EXPERT_NORMS},
    )


def stored_heads(library: CpuLibrary, attention: AttentionConfig, num_kv_heads: int = 1) -> tuple[int, int]:
    """How many keys the kernels store of a token, and as many values, and how wide; of so many key-value heads. With latent
    attention that is one row of all heads.
    """
    if attention.latent is None:
        return num_kv_heads, attention.head_dim
    return 1, latent_row(library, attention.latent.rank, attention.latent.rotary_dim)


def part_for(library: CpuLibrary, config: ModelConfig, place: RankPlace) -> ModelPart:
    """The part of one rank, cut where the kernels can cut. Raises ``BackendConfigError``: see ``part_of``."""
    return part_of(config, place, unit=library.panel, head_unit=library.lanes)


class CompiledModel:
    """A ``ForwardPass``. ``decoder`` and ``pool`` must fit each other."""

    has_slow_start = False

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        stage: Stage | None = None,
        adapters: ModelAdapters | None = None,
        states: RowStates | None = None,
    ) -> None:
        self._decoder = decoder
        if states is not None:
            decoder.keep_states(states.past, states.heads)
        self.states = states
        self.pool = pool
        self.adapters = adapters
        self._stage = stage
        self._hidden_states: Decoder | None = None

    def run(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.run``."""
        return self._run(self._decoder, rows, token_ids)

    def hidden(self, rows: StepRows, token_ids: Tensor) -> Tensor:
        """See ``ForwardPass.hidden``."""
        if self._stage is not None and self._stage.behind is not None:
            return self._run(self._decoder, rows, token_ids)
        if self._hidden_states is None:
            self._hidden_states = self._decoder.giving_hidden_states()
        return self._run(self._hidden_states, rows, token_ids)

    def _run(self, decoder: Decoder, rows: StepRows, token_ids: Tensor) -> Tensor:
        places, positions = rows.token_places()
        if self.states is not None:
            self.states.advance(rows.numbers, rows.num_computed, rows.num_new)
        hidden_in = None if self._stage is None else self._stage.receive(len(places), torch.float32)
        result = decoder.forward(
            token_ids=token_ids.numpy()[rows.numbers[places], positions],
            num_tokens=rows.num_new,
            first_positions=rows.num_computed,
            tables=rows.tables,
            sampled=rows.wanted,
            pool=self.pool.layers,
            row_numbers=rows.numbers,
            hidden_in=hidden_in,
            adapters=None if self.adapters is None else self.adapters.of_rows(rows.numbers),
        )
        if self._stage is None or self._stage.behind is None:
            return result
        self._stage.pass_on(result)
        return result[:0]
