"""Scheduler, mirror and a backend in one process, with and without speculation over the same loaded model.

Owns: the loop, and draft models that are a model's first layers. Must not know: who proposes, or what is measured.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from headway_executor.backend import BackendConfig, ExecutorBackend, StepResult
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.batch.batch_state import BatchState
from headway_proto.columns import encode_column, encode_columns
from headway_proto.sampling import SamplingParams
from headway_proto.step import DIGEST_INTERVAL_STEPS, ExecutorOutput, RowLogprobs
from headway_scheduler.core.policies.step_time import StepTimeModel
from headway_scheduler.core.scheduler import Scheduler
from headway_scheduler.core.state.arrival import NewRequestEvent, Origin
from headway_scheduler.core.state.counters import SchedulerCounters
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.core.state.step_shape import StepShape
from headway_scheduler.core.step.speculation import SpeculationPolicy, SpeculationRecord

GREEDY = SamplingParams(temperature=0.0)


class AlwaysSpeculate(SpeculationPolicy):
    """Speculates as far as possible, even if it does not pay."""

    def is_time_to_try(self, step: int, num_rows: int) -> bool:
        """Return True."""
        del step, num_rows
        return True

    def choose(
        self,
        candidates: Sequence[tuple[SpeculationRecord, int]],
        decoding: StepShape,
        step: int,
        objective_s: float | None,
    ) -> list[int]:
        """Return the most."""
        del decoding, step, objective_s
        return [self.max_tokens] * len(candidates)

    def learn(self, record: SpeculationRecord, num_computed_tokens: int, **counts: int) -> None:
        """Learn nothing."""


class SpeculativeEngine:
    """One loaded model under two schedulers that take turns; one speculates. With ``always`` it does so even if it does
    not pay.
    """

    def __init__(
        self,
        config: BackendConfig,
        *,
        backend: ExecutorBackend | None = None,
        clock: Callable[[], float] = time.perf_counter,
        always: bool = False,
    ) -> None:
        self._always = always
        self._backend = TorchBackend() if backend is None else backend
        info = self._backend.open(config)
        self._clock = clock
        self._state = BatchState(info)
        self._epoch = 0
        self._num_requests = 0
        self._capacities = {
            speculates: msgspec.structs.replace(
                ExecutorCapacity.of(info), max_speculative_tokens=info.max_speculative_tokens if speculates else 0
            )
            for speculates in (False, True)
        }
        limits = SchedulerLimits(max_num_seqs=config.max_num_seqs, max_steps_in_flight=1, enable_prefix_caching=False)
        self._cores = {speculates: Scheduler(limits, capacity) for speculates, capacity in self._capacities.items()}
        self.logprobs: dict[int, list[RowLogprobs]] = {}

    def counters(self) -> SchedulerCounters:
        """Of the scheduler that speculates."""
        return self._cores[True].counters

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_output: int,
        *,
        speculates: bool,
        sampling: Callable[[int], SamplingParams] = lambda _: GREEDY,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> list[list[int]]:
        """Return the outputs of all ``prompts``, admitted together, of at most ``num_output`` tokens each."""
        core = self._cores[speculates]
        self._epoch += 1
        self._state.begin_epoch()
        core.begin_epoch(self._capacities[speculates], self._epoch)
        if speculates and self._always:
            policy = AlwaysSpeculate(core.capacity.max_speculative_tokens, StepTimeModel())
            core._speculation.policy = core._answers._speculation = policy  # noqa: SLF001 - it plays the policy
        first = self._num_requests
        outputs: dict[int, list[int]] = {}
        self.logprobs = {}
        for place, prompt in enumerate(prompts):
            handle = first + place
            outputs[handle] = []
            core.add_request(
                NewRequestEvent(
                    origin=Origin(0, handle),
                    request_id=str(handle),
                    token_ids=np.array(prompt, dtype=np.int32),
                    num_prompt_tokens=len(prompt),
                    max_tokens=num_output,
                    sampling=sampling(place),
                    stop_token_ids=stop_token_ids,
                ),
                now=self._clock(),
            )
        self._num_requests += len(prompts)
        while core.num_unfinished:
            self._step(core, outputs, first)
        return list(outputs.values())

    def _step(self, core: Scheduler, outputs: dict[int, list[int]], first: int) -> None:
        diff = core.schedule(self._clock())
        assert diff is not None
        result = self._backend.execute(self._state.apply(diff).batch)
        assert isinstance(result, StepResult)
        digest = self._state.digest() if diff.step % DIGEST_INTERVAL_STEPS == 0 else None
        if result.accepted_tokens is not None:
            self._state.accept(result.accepted_tokens)
        events = core.update(
            ExecutorOutput(
                epoch=diff.epoch,
                step=diff.step,
                sampled_token_ids=encode_column(result.sampled_token_ids),
                logprobs=result.logprobs,
                errors=result.errors,
                state_digest=digest,
                accepted_tokens=b"" if result.accepted_tokens is None else encode_columns(result.accepted_tokens),
            ),
            self._clock(),
        )
        columns = (events.handles.tolist(), events.indices.tolist(), events.token_ids.tolist())
        for handle, index, token_id in zip(*columns, strict=True):
            assert index == len(outputs[handle])
            outputs[handle].append(token_id)
        for entry in events.logprobs:
            entries = self.logprobs.setdefault(entry.origin.handle - first, [])
            assert entry.index == len(entries)
            entries.append(entry.values)


def write_first_layers(model: Path, directory: Path, num_layers: int) -> Path:
    """Write a checkpoint of the first layers of ``model`` to ``directory``; return that."""
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    if (model / "tokenizer.json").is_file():
        shutil.copy(model / "tokenizer.json", directory)
    with safe_open(model / "model.safetensors", framework="pt") as checkpoint:
        names = [name for name in checkpoint.keys() if _layer_of(name) < num_layers]  # noqa: SIM118 - it is no mapping
        tensors = {name: checkpoint.get_tensor(name) for name in names}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _layer_of(name: str) -> int:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1
