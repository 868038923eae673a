"""An executor of several ranks for tests, each rank on a thread of its own.

Owns: passing each call on to all ranks. Must not know: what a backend computes.

Ranks share nothing but what they share as processes: memory that they find by its file, and sockets. Threads start at
once, where a process first imports torch. Real processes are in tests/e2e and tests/chaos.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from backend_driver import BackendDriver, Request
from e2e.running_server import free_port
from headway_executor.backend import BackendConfig, ExecutorBackend, ReadAdapter, StepBatch, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.link_keys import LinkKeys
from headway_executor.rank_place import RankPlace
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.adapters import LoadedAdapter
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo

_ANSWER_SECONDS = 60.0
NUM_OUTPUT = 8


class GroupBackend:
    """All ranks of one executor, as one ``ExecutorBackend``: several steps may be in flight."""

    def __init__(
        self,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        kind: Callable[[], ExecutorBackend] = TorchBackend,
    ) -> None:
        self._degrees = (tensor_parallel, pipeline_parallel)
        self._kind = kind
        self._ranks: list[ThreadedBackend] = []
        self._followed: list[tuple[int, Future[StepResult]]] = []
        """What the other ranks answer, and how many tokens are right."""

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``; all ranks must announce the same."""
        tensor_parallel, pipeline_parallel = self._degrees
        size, rendezvous = tensor_parallel * pipeline_parallel, f"127.0.0.1:{free_port()}"
        ranks = [ThreadedBackend(self._kind()) for _ in range(size)]
        places = [
            RankPlace(
                rank=rank, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel, rendezvous=rendezvous
            )
            for rank in range(size)
        ]
        own, theirs = zmq.curve_keypair(), zmq.curve_keypair()
        others = msgspec.structs.replace(_without_callables(config), rank_keys=LinkKeys(own[0], *theirs))
        configs = [msgspec.structs.replace(config, rank_keys=LinkKeys(theirs[0], *own)), *[others] * (size - 1)]
        with ThreadPoolExecutor(size) as opening:
            infos = list(
                opening.map(
                    lambda rank, own, place: rank.open(msgspec.structs.replace(own, place=place)),
                    ranks,
                    configs,
                    places,
                )
            )
        self._ranks = ranks
        first = infos[0]
        for other in infos[1:]:
            assert (other.num_blocks, other.num_host_blocks) == (first.num_blocks, first.num_host_blocks)
            assert other.max_model_len == first.max_model_len
            assert (other.adapters, other.embedding_size) == (first.adapters, first.embedding_size)
        return first

    def execute(self, batch: StepBatch) -> Future[StepResult]:
        """See ``ExecutorBackend.execute``."""
        futures = [rank.execute(batch) for rank in self._ranks]
        num_samples = int(np.count_nonzero(batch.samples))
        self._followed += [(num_samples, future) for future in futures[1:]]
        return futures[0]

    def move_blocks(self, **columns: Any) -> Future[None]:
        """See ``ExecutorBackend.move_blocks``."""
        first, *_ = [rank.move_blocks(**columns) for rank in self._ranks]
        return first

    def load_blocks(self, contents: Any, blocks: Any) -> None:
        """See ``ExecutorBackend.load_blocks``."""
        raise NotImplementedError("each rank has host blocks of its own")

    def read_adapter(self, name: str, directory: str) -> ReadAdapter:
        """See ``AdapterBackend.read_adapter``: what each rank has read."""
        read = [rank.read_adapter(name, directory) for rank in self._ranks]
        return ReadAdapter(read[0].adapter, read)

    def load_adapter(self, read: ReadAdapter) -> LoadedAdapter:
        """See ``AdapterBackend.load_adapter``; all ranks must answer the same."""
        futures = [rank.load_adapter(own) for rank, own in zip(self._ranks, read.weights, strict=True)]
        first, *others = [future.result(_ANSWER_SECONDS) for future in futures]
        assert all(other == first for other in others)
        return first

    def unload_adapter(self, name: str) -> None:
        """See ``AdapterBackend.unload_adapter``."""
        for rank in self._ranks:
            rank.unload_adapter(name)

    def close(self) -> None:
        """See ``ExecutorBackend.close``. Raises what went wrong in another rank."""
        ranks, self._ranks = self._ranks, []
        followed, self._followed = self._followed, []
        if not ranks:
            return
        try:
            for num_samples, future in followed:
                assert len(future.result(_ANSWER_SECONDS).sampled_token_ids) == num_samples
        finally:
            with ThreadPoolExecutor(len(ranks)) as closing:
                list(closing.map(ThreadedBackend.close, ranks))


class InlineGroup(GroupBackend):
    """The same, for drivers that want each result at once."""

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``ExecutorBackend.execute``."""
        return super().execute(batch).result(_ANSWER_SECONDS)


def told(backend: ExecutorBackend, directory: Path, **settings: Any) -> list[Any]:
    """Tokens and log probabilities of requests that share a prefix, in chunks, one swapped out and in again."""
    defaults = {"block_size": 8, "num_kv_blocks": 64, "swap_space_mib": 4, "max_num_seqs": 6, "num_threads": 1}
    info = backend.open(BackendConfig(model=str(directory), **defaults | settings))
    driver = BackendDriver(backend, info)
    rng = np.random.default_rng(1)
    samplings = [SamplingParams(temperature=t, seed=s, logprobs=2) for t, s in ((0.0, 0), (0.9, 5), (0.0, 0), (1.2, 7))]
    first, *others = [
        Request(rng.integers(1, 90, size=size).tolist(), NUM_OUTPUT, sampling)
        for size, sampling in zip((40, 3, 19, 26), samplings, strict=True)
    ]
    driver.run([first], budget=16)
    prefix = () if info.keeps_states else first.blocks[:4]
    shared = Request([*first.prompt[:32], 7, 8], NUM_OUTPUT, samplings[1], shared_blocks=prefix)
    arrivals = [driver._admit(request) for request in (*others, shared)]
    running = driver.step(arrivals, arrivals, budget=24)
    running = driver.step(running, [], budget=24)
    leaving = others[1]
    if info.num_host_blocks:
        driver.swap_out(leaving)
        running = driver.step([request for request in running if request is not leaving], [], budget=24)
        back = driver.swap_in(leaving)
        running = driver.step([*running, back], [back], budget=24)
    while running:
        running = driver.step(running, [], budget=24)
    backend.close()
    requests = (first, *others, shared)
    assert all(len(request.output) == NUM_OUTPUT for request in requests)
    return [(request.output, [(line.logprob, line.top_logprobs) for line in request.logprobs]) for request in requests]


def _without_callables(config: BackendConfig) -> BackendConfig:
    """Only rank 0 asks for memory and reports to the test."""
    plain = BackendConfig(model=config.model)
    return msgspec.structs.replace(config, progress=plain.progress, warn=plain.warn, host_memory=plain.host_memory)
