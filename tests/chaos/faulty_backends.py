"""Backends that fail on purpose, for ``executor_with.py``; but for that they are the simulated one.

Owns: the faults that no flag of the simulated backend injects.
Must not know: which promise a fault puts to the test.
"""

import os
import signal
from pathlib import Path

import msgspec

from headway_executor.backend import StepBatch, StepOutOfMemoryError, StepResult
from headway_executor.backends.simulated import SimulatedBackend

MOST_TOKENS_OF_A_STEP = 40
DEADLY_TOKEN = 401
DEATHS_FILE_VARIABLE = "CHAOS_DEATHS_FILE"
STEP_APART = 20
APART_FILE_VARIABLE = "CHAOS_APART_FILE"


class SmallDevice(SimulatedBackend):
    """Its memory holds steps of ``MOST_TOKENS_OF_A_STEP`` tokens."""

    def execute(self, batch: StepBatch) -> StepResult:
        num_tokens = int(batch.num_scheduled_tokens.sum())
        if num_tokens > MOST_TOKENS_OF_A_STEP:
            raise StepOutOfMemoryError(num_tokens, "the device holds no more")
        return super().execute(batch)


class Mortal(SimulatedBackend):
    """Dies, as of a fault in a kernel, of a prompt with ``DEADLY_TOKEN``; writes a byte to a file each time."""

    def execute(self, batch: StepBatch) -> StepResult:
        if any(DEADLY_TOKEN in row.token_ids for row in batch.new_rows):
            with Path(os.environ[DEATHS_FILE_VARIABLE]).open("ab") as deaths:
                deaths.write(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(batch)


class Apart(SimulatedBackend):
    """On rank 1, draws one wrong token, once for all processes; writes the step's number to a file."""

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        file = Path(os.environ[APART_FILE_VARIABLE])
        if os.environ.get("RANK") != "1" or batch.step < STEP_APART or file.exists() or not len(batch.rows):
            return result
        file.write_text(str(batch.step))
        return msgspec.structs.replace(result, sampled_token_ids=result.sampled_token_ids ^ 1)
