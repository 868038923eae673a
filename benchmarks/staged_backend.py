"""A backend for ``pipeline_processes.py``: stages that take time and wait for each other, without a model.

Owns: the wait of a stage for the one before, the log of each stage's busy times, how an executor finds this backend. Must
not know: the load, what is drawn.

Tokens and times are the simulated backend's. But a stage begins a step only when the stage before has sent it on, by the
channel by which the ranks of a model send hidden states. It spends its time asleep, so many stages need few cores.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

from headway_executor.backend import BackendConfig, StepBatch, StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.ranks.channel import Channel
from headway_executor.ranks.group import RankGroup
from headway_executor.startup.registry import BACKENDS
from headway_kernels.cpu.library import load_library
from headway_proto.step import BackendInfo

NAME = "staged"
LOG_VARIABLE = "STAGED_BACKEND_LOG"
"""The directory of the logs, in the environment."""
_MESSAGE_BYTES = 8


class StagedBackend:
    """An ``ExecutorBackend``."""

    every_rank_draws = True

    def __init__(self) -> None:
        self._simulated = SimulatedBackend()
        self._group: RankGroup | None = None
        self._before: Channel | None = None
        self._behind: Channel | None = None
        self._log: TextIO | None = None
        self.move_blocks = self._simulated.move_blocks
        self.load_blocks = self._simulated.load_blocks

    def open(self, config: BackendConfig) -> BackendInfo:
        """See ``ExecutorBackend.open``."""
        self._group = RankGroup(config.place, load_library(), keys=config.rank_keys)
        self._before, self._behind = self._group.stage_channels(_MESSAGE_BYTES)
        self._log = (Path(os.environ[LOG_VARIABLE]) / str(config.place.stage)).open("w", buffering=1)
        return self._simulated.open(config)

    def execute(self, batch: StepBatch) -> StepResult:
        """See ``ExecutorBackend.execute``."""
        assert self._log is not None
        message = torch.tensor([batch.step], dtype=torch.int64)
        if self._before is not None:
            self._before.receive(message)
            if int(message) != batch.step:
                raise RuntimeError(f"the stage before sent step {int(message)}, not {batch.step}")
        start_s = time.perf_counter()
        result = self._simulated.execute(batch)
        end_s = time.perf_counter()
        if self._behind is not None:
            self._behind.send(message)
        self._log.write(f"{batch.step} {start_s} {end_s}\n")
        return result

    def close(self) -> None:
        """See ``ExecutorBackend.close``."""
        self._simulated.close()
        if self._group is not None:
            self._group.close()


class Busy(NamedTuple):
    """A stage's part of a step. Times in seconds, of a clock that all processes of a host share."""

    step: int
    start_s: float
    end_s: float


def register(directory: Path) -> dict[str, str]:
    """Make an entry point for this backend and a place for its logs; return what the server's environment needs."""
    package, logs = directory / "staged_backend-0.dist-info", directory / "logs"
    package.mkdir()
    logs.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: staged-backend\nVersion: 0\n")
    (package / "entry_points.txt").write_text(f"[{BACKENDS.group}]\n{NAME} = staged_backend:StagedBackend\n")
    known = os.environ.get("PYTHONPATH")
    paths = [str(directory), str(Path(__file__).parent), *([known] if known else [])]
    return {"PYTHONPATH": os.pathsep.join(paths), LOG_VARIABLE: str(logs)}


def read_logs(directory: Path, num_stages: int) -> list[list[Busy]]:
    """Return what each stage did, by stage."""
    stages = []
    for stage in range(num_stages):
        lines = (directory / "logs" / str(stage)).read_text().splitlines()
        stages.append([Busy(int(step), float(start), float(end)) for step, start, end in map(str.split, lines)])
    return stages


def bubble_share(stages: Sequence[Sequence[Busy]], since_s: float) -> float:
    """Return the share of the stages' time, from ``since_s`` on, in which one stood idle while a step was in the pipeline.

    A step is in the pipeline from its start on the first stage to its end on the last one.
    """
    begun = {busy.step: busy.start_s for busy in stages[0]}
    spans = sorted((begun[busy.step], busy.end_s) for busy in stages[-1] if busy.end_s > since_s)
    covered_s, reached_s = 0.0, since_s
    for start_s, end_s in spans:
        covered_s += max(end_s - max(start_s, reached_s), 0.0)
        reached_s = max(reached_s, end_s)
    ended = {busy.step for busy in stages[-1]}
    busy_s = sum(
        max(busy.end_s - max(busy.start_s, since_s), 0.0) for stage in stages for busy in stage if busy.step in ended
    )
    return 1.0 - busy_s / (len(stages) * covered_s) if covered_s else 0.0
