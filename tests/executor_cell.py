"""An executor's step cycle with its block store, driven by hand: a scheduler of one cell reduced to its messages."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import structlog

from headway_executor.backend import BackendConfig, ExecutorBackend
from headway_executor.batch.batch_state import BatchState
from headway_executor.block_store.shm_transport import ShmTransport
from headway_executor.block_store.store import BlockStore
from headway_executor.links.step_link import LinkTiming, StepLink
from headway_executor.step.loop import StepCycle
from headway_proto.columns import decode_column, encode_column, encode_columns
from headway_proto.sampling import SamplingParams
from headway_proto.step import (
    BlockPull,
    ExecutorOutput,
    NewEpoch,
    NewRequest,
    ResyncRequest,
    TransferringOutput,
    scheduler_frame_reader,
    scheduler_frame_writer,
)

INCARNATION = 5
GREEDY = SamplingParams(temperature=0.0)
ANSWER_S = 30.0


class Stored(NamedTuple):
    """Where blocks are kept, as a scheduler notes it."""

    pool: str
    addresses: tuple[str, ...]
    epoch: int
    step: int
    host_blocks: tuple[int, ...]


class ExecutorCell:
    """One executor, opened and in its first epoch."""

    def __init__(
        self, backend: ExecutorBackend, config: BackendConfig, *, place: str, epoch: int = 1, **store: object
    ) -> None:
        transports = store.pop("transports", None)
        self.warnings: list[str] = []
        self.store = BlockStore(
            {"shm": ShmTransport()} if transports is None else transports,
            place=place,
            warn=self.warnings.append,
            **store,
        )
        self.backend = backend
        self.info = self.store.open(backend.open(msgspec.structs.replace(config, host_memory=self.store.host_memory)))
        self._rung = threading.Event()
        self.cycle = StepCycle(
            link=StepLink(incarnation=INCARNATION, info=self.info, timing=LinkTiming(silence_timeout=60.0)),
            state=BatchState(self.info),
            backend=backend,
            log=structlog.get_logger(),
            wake=self._rung.set,
            store=self.store,
        )
        self._reader, self._writer = scheduler_frame_reader(), scheduler_frame_writer()
        self.bodies: list[msgspec.Struct] = []
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        self.epoch, self.next_step = epoch, 0
        self._writer.begin_epoch(epoch)
        self._receive(self._writer.encode(NewEpoch(epoch, INCARNATION, 7)))

    def send(self, **fields: object) -> int:
        """Send the next step; return its number."""
        fields.setdefault("total_num_scheduled_tokens", 1)
        output = TransferringOutput(epoch=self.epoch, step=self.next_step, **fields)
        self.next_step += 1
        self._receive(self._writer.encode(output))
        return output.step

    def admit(
        self,
        row: int,
        token_ids: Sequence[int],
        blocks: Sequence[int],
        *,
        computed: int = 0,
        num_prompt: int = 0,
        others: int = 0,
        **fields: object,
    ) -> int:
        """Send a step with a new row that runs the rest of its tokens, beside ``others`` that decode."""
        request = NewRequest(
            row=row,
            token_ids=encode_column(token_ids),
            num_prompt_tokens=num_prompt or len(token_ids),
            block_ids=encode_column(blocks),
            num_computed_tokens=computed,
            sampling=GREEDY,
        )
        count = len(token_ids) - computed
        return self.send(
            scheduled_new_reqs=(request,),
            num_scheduled_tokens=pairs([(row, count)]),
            total_num_scheduled_tokens=count + others,
            **fields,
        )

    def answer(self, step: int) -> ExecutorOutput:
        """Run the cycle until it has answered a step, and one turn more: exports begin behind the answer."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            for body in self.bodies:
                if isinstance(body, ExecutorOutput) and (body.epoch, body.step) == (self.epoch, step):
                    self.turn()
                    return body
                assert not isinstance(body, ResyncRequest), body.reason
            assert time.monotonic() < deadline, f"no answer to step {step}"
            self.turn()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def turn(self) -> None:
        """One turn of the loop that drives a cycle."""
        self._rung.wait(0.005)
        self._rung.clear()
        self._read(self.cycle.tick(time.monotonic()))

    def tokens(self, step: int) -> list[int]:
        return decode_column(self.answer(step).sampled_token_ids).tolist()

    def records(self, host_blocks: Sequence[int]) -> list[tuple[int, int]]:
        found = self.store._memory.records[list(host_blocks)]
        return list(zip(found["epoch"].tolist(), found["step"].tolist(), strict=True))

    def stored(self, step: int, host_blocks: Sequence[int]) -> Stored:
        return Stored(self.info.host_pool, self.info.block_addresses, self.epoch, step, tuple(host_blocks))

    def close(self) -> None:
        self.backend.close()
        self.store.close()

    def _receive(self, frame: bytes) -> None:
        self._read(self.cycle.receive(frame, time.monotonic()))

    def _read(self, frames: list[bytes]) -> None:
        self.bodies += [self._reader.decode(frame).body for frame in frames]


def pull_of(stored: Stored, blocks: Sequence[int]) -> BlockPull:
    """Bring stored blocks into these device blocks."""
    columns = (stored.host_blocks, [stored.step] * len(blocks), blocks)
    return BlockPull(
        stored.pool, stored.addresses, stored.epoch, encode_columns([np.array(column) for column in columns])
    )


def pairs(entries: Sequence[tuple[int, int]]) -> bytes:
    """A column group."""
    return encode_columns(list(np.array(entries, dtype=np.int32).reshape(-1, 2).T))
