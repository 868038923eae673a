"""What a process of the executor opens before it has steps: the backend and the block store.

Owns: making and opening both from the configuration. Must not know: steps, signals, sockets.
"""

import time
from pathlib import Path

import msgspec
from structlog.typing import FilteringBoundLogger

from headway_executor.backend import NO_ADAPTERS, AdapterBackend, BackendConfigError, ExecutorBackend
from headway_executor.block_store.registry import enabled_transports, make_transport
from headway_executor.block_store.store import BlockStore
from headway_executor.checkpoint.reading_ahead import read_ahead
from headway_executor.config import ExecutorConfig
from headway_executor.link_keys import LinkKeys
from headway_executor.rank_place import RankPlace
from headway_executor.rank_processes.pools import variant_of
from headway_executor.startup.registry import create_backend
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.step import BackendInfo
from headway_proto.wording import shown

_PROGRESS_INTERVAL_S = 2.0
_PREDECESSOR_S = 5.0
"""For a rank that was killed because rank 0 ended: nobody waits for it, and to unmap a GiB takes some 40 ms."""


class Opening:
    """Backend and store of one process; ``number`` of the executor, or -1. ``rank_keys``: see ``BackendConfig``.

    Making it raises ``BackendConfigError``: an unknown name, or a missing package.
    """

    def __init__(
        self,
        config: ExecutorConfig,
        place: RankPlace,
        number: int,
        log: FilteringBoundLogger,
        rank_keys: LinkKeys | None = None,
    ) -> None:
        if config.model:
            read_ahead(Path(config.model))
        backend = create_backend(config.backend)
        self.every_rank_draws: bool = getattr(backend, "every_rank_draws", False)
        """Whether a rank answers the tokens that rank 0 answers."""
        self.backend: ExecutorBackend = (
            backend if getattr(backend, "executes_inline", False) else ThreadedBackend(backend)
        )
        log.info("opening the backend", backend=config.backend, model=config.model, device=config.device)
        transports = {
            name: make_transport(name, msgspec.structs.asdict(config))
            for name in enabled_transports(config.block_transports)
        }
        self.store = BlockStore(
            transports,
            place=config.step_address if place.is_alone else f"{config.step_address} rank {place.rank}",
            number=number,
            variant=variant_of(place, " ".join((config.quantization, *_forms_of_products(config, place)))),
            uses_shared_memory=config.host_pool == "shm",
            warn=log.warning,
            predecessor_s=_PREDECESSOR_S if place.rank else 0.0,
        )
        self._served_name = config.served_model_name
        self._config = msgspec.structs.replace(
            config.backend_config(),
            progress=_Progress(log).report,
            warn=log.warning,
            host_memory=self.store.host_memory,
            place=place,
            rank_keys=rank_keys,
        )
        if config.adapter and not isinstance(backend, AdapterBackend):
            raise BackendConfigError(
                f"adapter {shown(min(config.adapter))} is not allowed: {NO_ADAPTERS}; allowed: none"
            )

    def open(self) -> BackendInfo:
        """Open both.

        Raises:
            BackendConfigError, ModelFilesError: see ``ExecutorBackend.open``.
        """
        info = self.store.open(self.backend.open(self._config))
        return msgspec.structs.replace(info, model_name=self._served_name or info.model_name)

    def close(self) -> None:
        """Close both. May be called twice."""
        self.backend.close()
        self.store.close()


def _forms_of_products(config: ExecutorConfig, place: RankPlace) -> tuple[str, ...]:
    """They decide about the last bits of keys and values."""
    activations = config.backend_options.get("activations", "auto")
    of_ranks = () if place.is_alone else (config.backend_options.get("tensor_parallel_form", ""),)
    return of_ranks if activations == "auto" else (*of_ranks, activations)


class _Progress:
    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._what = ""
        self._said_at = float("-inf")

    def report(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what or now - self._said_at >= _PROGRESS_INTERVAL_S:
            self._what, self._said_at = what, now
            self._log.info(what, done=done, total=total)
