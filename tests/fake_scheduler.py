"""A scheduler that speaks ingress and nothing else, for tests of the gateway: every live sequence gets one token per
step, whatever its prompt. Shows what it was sent, and misbehaves on demand.
"""

import asyncio
import contextlib
import itertools
import zlib
from collections.abc import Callable
from typing import Self

import msgspec
import zmq
import zmq.asyncio

from headway_proto.columns import decode_column, encode_columns
from headway_proto.framing import FramingError
from headway_proto.ingress import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_STOP,
    STATE_SERVING,
    Abort,
    Admitted,
    Finished,
    GatewayHeartbeat,
    GatewayHello,
    ModelInfo,
    Rejected,
    SchedulerHello,
    SchedulerStatus,
    Submit,
    TokenLogprobs,
    Tokens,
    scheduler_frame_reader,
    scheduler_frame_writer,
)
from headway_proto.operations import (
    AdminCall,
    AdminReply,
    ExecutorStatus,
    FlightLogFile,
    FlightLogPart,
    FlightLogPlace,
    SequenceState,
    Status,
)

MODEL = ModelInfo(
    name="fake",
    fingerprint="f00d",
    backend="fake",
    device="cpu",
    dtype="float32",
    max_model_len=1024,
    vocab_size=4096,
    eos_token_ids=(0,),
    max_request_tokens=1024,
)


def hash_token(submit: Submit, index: int) -> int:
    """A token that depends on nothing but seed and position; never one of the first 16 ids."""
    return 16 + zlib.crc32(b"%d.%d" % (submit.sampling.seed, index)) % (MODEL.vocab_size - 16)


class RunningSequence:
    """One submitted sequence of the fake."""

    def __init__(self, submit: Submit) -> None:
        tokens = decode_column(submit.token_ids).tolist()
        self.submit = submit
        self.prompt = tokens[: submit.num_prompt_tokens]
        self.num_output = len(tokens) - submit.num_prompt_tokens
        self.admitted = False


class FakeLink:
    """What the fake keeps per gateway."""

    def __init__(self, peer: bytes, incarnation: int, epoch: int) -> None:
        self.peer = peer
        self.incarnation = incarnation
        self.writer = scheduler_frame_writer()
        self.writer.begin_epoch(epoch)
        self.received = 0
        self.acknowledged = 0
        self.running: dict[int, RunningSequence] = {}


class FakeScheduler:
    """Binds ``address``. ``step_interval_s`` None makes no steps by itself; call ``step``."""

    _epochs = itertools.count(100)

    def __init__(
        self,
        address: str,
        *,
        model: ModelInfo | None = MODEL,
        next_token: Callable[[Submit, int], int] = hash_token,
        step_interval_s: float | None = 0.0,
    ) -> None:
        self.address = address
        self.model = model
        self.state = STATE_SERVING
        self.next_token = next_token
        self.step_interval_s = step_interval_s
        self.admit = True
        self.heartbeats = True
        self.reject: Callable[[Submit], Rejected | None] = lambda submit: None
        self.filter_frame: Callable[[bytes], list[bytes]] = lambda frame: [frame]
        self.hellos: list[GatewayHello] = []
        self.submits: list[Submit] = []
        self.aborts: list[int] = []
        self.admin_calls: list[AdminCall] = []
        self.flight_log: bytes | None = None
        """One segment, told in pieces of 1000 bytes; None: nothing is recorded."""
        self.executors: tuple[ExecutorStatus, ...] = ()
        self.seen_request_ids: set[str] = set()
        self.num_steps = 0
        self._reader = scheduler_frame_reader()
        self._links: dict[bytes, FakeLink] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> list[RunningSequence]:
        """All live sequences of all gateways."""
        return [sequence for link in self._links.values() for sequence in link.running.values()]

    async def start(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(self.address)
        self._tasks = [asyncio.create_task(work()) for work in (self._receive, self._beat, self._make_steps)]
        return self

    async def stop(self) -> None:
        """Vanish without a word, like a killed process."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close(0)
        self._context.term()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def step(self) -> None:
        """One token for every live sequence."""
        self.num_steps += 1
        for link in list(self._links.values()):
            message = self._advance(link)
            if message is not None:
                await self._send(link, message)

    async def tell_status(self) -> None:
        for link in list(self._links.values()):
            await self._send(link, SchedulerStatus(self.model, self.state, self.num_steps, len(self.running)))

    async def send_raw(self, frame: bytes) -> None:
        for link in list(self._links.values()):
            await self._socket.send_multipart([link.peer, frame])

    def _advance(self, link: FakeLink) -> Tokens | None:
        if not self.admit:
            return None
        admitted, columns, logprobs, finished = [], [], [], []
        for handle, sequence in list(link.running.items()):
            submit = sequence.submit
            if not sequence.admitted:
                sequence.admitted = True
                admitted.append(Admitted(handle=handle, num_cached_tokens=0))
            index = sequence.num_output
            token = self.next_token(submit, index)
            sequence.num_output += 1
            columns.append((handle, index, token))
            if submit.sampling.logprobs >= 0:
                top = tuple(range(submit.sampling.logprobs))
                logprobs.append(TokenLogprobs(handle, index, -0.5 * index, top, tuple(-1.0 for _ in top)))
            end_ids = set(submit.sampling.stop_token_ids) | (
                set() if submit.ignore_eos or self.model is None else set(self.model.eos_token_ids)
            )
            reason = FINISH_STOP if token in end_ids else ""
            if not reason and sequence.num_output >= submit.max_tokens:
                reason = FINISH_LENGTH
            if reason:
                del link.running[handle]
                finished.append(self._finished(sequence, reason, token if reason == FINISH_STOP else -1))
        if not columns:
            return None
        import numpy as np

        return Tokens(
            admitted=tuple(admitted),
            columns=encode_columns(np.array(columns, dtype=np.int32).T),
            logprobs=tuple(logprobs),
            finished=tuple(finished),
        )

    @staticmethod
    def _finished(sequence: RunningSequence, reason: str, stop_token_id: int = -1, error: str = "") -> Finished:
        return Finished(
            handle=sequence.submit.handle,
            reason=reason,
            num_output_tokens=sequence.num_output,
            stop_token_id=stop_token_id,
            queue_ms=1.0,
            ttft_ms=2.0,
            error=error,
        )

    async def end(self, request_id: str, reason: str, error: str = "") -> int:
        """End the sequences of a request; return how many there were."""
        count = 0
        for link in self._links.values():
            for handle, sequence in list(link.running.items()):
                if sequence.submit.request_id == request_id:
                    del link.running[handle]
                    await self._send(link, Tokens(finished=(self._finished(sequence, reason, error=error),)))
                    count += 1
        return count

    async def _send(self, link: FakeLink, body: msgspec.Struct) -> None:
        for frame in self.filter_frame(link.writer.encode(body)):
            await self._socket.send_multipart([link.peer, frame])

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if self.heartbeats:
                await self.tell_status()

    async def _make_steps(self) -> None:
        while self.step_interval_s is not None:
            await asyncio.sleep(self.step_interval_s)
            await self.step()

    async def _receive(self) -> None:
        while True:
            peer, data = await self._socket.recv_multipart()
            with contextlib.suppress(FramingError):
                await self._take_in(peer, data)

    async def _take_in(self, peer: bytes, data: bytes) -> None:
        frame = self._reader.decode(data)
        body = frame.body
        if isinstance(body, GatewayHello):
            self.hellos.append(body)
            for old in [p for p, link in self._links.items() if link.incarnation == body.incarnation]:
                del self._links[old]
            link = self._links[peer] = FakeLink(peer, body.incarnation, next(self._epochs))
            await self._send(
                link,
                SchedulerHello(
                    incarnation=7,
                    gateway_incarnation=body.incarnation,
                    link=body.link,
                    submit_credits=1000,
                    model=self.model,
                    state=self.state,
                ),
            )
            return
        found = self._links.get(peer)
        if found is None or frame.epoch != found.writer.epoch:
            return
        assert frame.sequence == found.received, "the gateway's frames come without gaps"
        found.received += 1
        await self._serve(found, body)

    async def _serve(self, link: FakeLink, body: msgspec.Struct) -> None:
        if isinstance(body, Submit):
            self.submits.append(body)
            rejected = self.reject(body)
            if rejected is not None:
                await self._send(link, msgspec.structs.replace(rejected, handle=body.handle))
            else:
                self.seen_request_ids.add(body.request_id)
                link.running[body.handle] = RunningSequence(body)
        elif isinstance(body, Abort):
            for handle in decode_column(body.handles).tolist():
                self.aborts.append(handle)
                link.running.pop(handle, None)
        elif isinstance(body, GatewayHeartbeat):
            link.acknowledged = body.received
        elif isinstance(body, AdminCall):
            self.admin_calls.append(body)
            await self._send(link, await self._admin(body))

    def _flight_log(self, place: FlightLogPlace) -> dict[str, object]:
        if self.flight_log is None:
            return {"error": "flight_log: the scheduler records nothing"}
        if not place.life:
            file = FlightLogFile(segment=0, is_checkpoint=False, num_bytes=len(self.flight_log))
            return {"flight_log": FlightLogPart(life=1, mark=1, files=(file,))}
        return {"flight_log": FlightLogPart(life=1, data=self.flight_log[place.offset :][:1000])}

    async def _admin(self, call: AdminCall) -> AdminReply:
        states = tuple(
            SequenceState(
                request_id=sequence.submit.request_id,
                index=sequence.submit.index,
                state="running",
                priority=sequence.submit.priority,
                tenant=sequence.submit.tenant,
                num_prompt_tokens=len(sequence.prompt),
                num_output_tokens=sequence.num_output,
                num_computed_tokens=0,
                num_blocks=1,
                num_preemptions=0,
                age_ms=1.0,
                executor=sequence.submit.index - 1,
            )
            for sequence in self.running
        )
        reply = AdminReply(call_id=call.call_id)
        if call.executor > 1:
            error = f"executor: {call.executor} is not known; allowed: 0, 1"
            return msgspec.structs.replace(reply, error=error)
        if call.method in {"cancel", "explain"} and call.request_id not in self.seen_request_ids:
            return msgspec.structs.replace(reply, error="not found")
        if call.method == "cancel":
            await self.end(call.request_id, FINISH_ABORT)
        elif call.method == "list":
            return msgspec.structs.replace(reply, sequences=states)
        elif call.method == "explain":
            mine = tuple(state for state in states if state.request_id == call.request_id)
            return msgspec.structs.replace(reply, sequences=mine, explanation="it runs")
        elif call.method == "flight_log":
            return msgspec.structs.replace(reply, **self._flight_log(call.place or FlightLogPlace()))
        elif call.method in {"status", "flush"}:
            required = Status.__struct_fields__[: -len(Status.__struct_defaults__)]
            figures = dict.fromkeys(required, 0)
            figures |= {"scheduler_state": self.state, "executor_state": "ready", "num_running": len(states)}
            return msgspec.structs.replace(reply, status=Status(**figures, executors=self.executors))
        return reply
