"""Crowds: many calls at once, and one caller who asks for much beside others who ask for little."""

import asyncio
import time
from collections import Counter
from typing import Self

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from chaos.harness import deployed, until
from headway.client import AsyncClient, OverloadedError
from headway_proto import generation_pb2

TORCH = ("--backend", "torch")
COSTLY = "".join(f"({chr(0x100 + number % 500)})?" for number in range(2000))
"""As an expression it takes some 40 ms to compile, for the gateway and again for the executor."""


class Pulse:
    """An unconstrained stream that never ends, for ``async with``; the gaps between its tokens."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._task: asyncio.Task[None] | None = None
        self.longest_s = 0.0
        self.num_tokens = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._follow())
        await until(lambda: self.num_tokens >= 10, 10, "tokens")
        self.longest_s = 0.0
        return self

    async def __aexit__(self, kind, error, trace) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            last = None
            async with self._client.generate("def ", max_tokens=900, ignore_eos=True, tenant="quiet") as stream:
                async for delta in stream:
                    now = time.monotonic()
                    self.longest_s = max(self.longest_s, now - (last or now))
                    last = now
                    self.num_tokens += len(delta.token_ids)


@pytest.mark.chaos_full
async def test_one_tenants_costly_constraints(row):
    count = 240
    row.about(
        f"{count} costly regexes of one tenant",
        "another tenant's schema within 1 s, an unconstrained stream's longest gap 0.5 s",
    )
    outcomes: Counter[str] = Counter()
    waits = []

    async def ask(client: AsyncClient, number: int) -> None:
        try:
            result = await client.generate("x", max_tokens=4, regex=f"{COSTLY}{number}", tenant="greedy").result()
            outcomes[result.completions[0].finish_reason or ""] += 1
        except OverloadedError as refusal:
            outcomes["refused" if refusal.retry_after_s else "refused without a time to come again"] += 1

    async with deployed(executor=TORCH) as (processes, client), processes.client() as greedy:
        await client.generate("x", max_tokens=4, json_object=True).result()
        async with Pulse(client) as pulse:
            began = time.monotonic()
            asking = [asyncio.create_task(ask(greedy, number)) for number in range(count)]
            while not all(task.done() for task in asking):
                schema = {"type": "object", "properties": {f"p{len(waits)}": {"type": "boolean"}}}
                asked_at = time.monotonic()
                await client.generate("y", max_tokens=8, json_schema=schema, tenant="another").result()
                waits.append(time.monotonic() - asked_at)
                await asyncio.sleep(0.1)
            await asyncio.gather(*asking)
            took_s = time.monotonic() - began
        row.note(f"{outcomes.total()} answered in {took_s:.1f} s: {dict(outcomes)}")
        row.note(f"another's schema within {max(waits):.2f} s, {len(waits)} times; longest gap {pulse.longest_s:.2f} s")
    assert outcomes.keys() <= {"stop", "length", "refused"}
    assert outcomes["refused"] <= max(0, count - 128)
    assert max(waits) <= 1.0
    assert pulse.longest_s <= 0.5


GENERATE = "/headway.v1.Generation/Generate"
SLOW_STEPS = ("--backend", "simulated", "--backend-option", "step_base_us=50000")
REQUEST = generation_pb2.GenerateRequest(text="x", sampling={"max_tokens": 4}).SerializeToString()


def is_documented(error: grpc.aio.AioRpcError) -> bool:
    """Whether a refusal says how many are allowed, and when to come again."""
    details = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    retry = error_details_pb2.RetryInfo()
    told = [detail.Unpack(retry) for value in details for detail in status_pb2.Status.FromString(value).details]
    is_full = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return is_full and "allowed: " in (error.details() or "") and any(told) and bool(retry.retry_delay.ToNanoseconds())


@pytest.mark.parametrize(
    ("count", "num_channels"),
    [
        pytest.param(1_500, 2, marks=pytest.mark.chaos_quick),
        pytest.param(2_500, 1, marks=pytest.mark.chaos_full),
        pytest.param(6_000, 10, marks=pytest.mark.chaos_full),
    ],
)
async def test_calls_opened_at_once(count, num_channels, row):
    row.about(
        f"{count:,} calls opened at once, over {num_channels} connection{'s' * (num_channels > 1)}, 64 streams allowed",
        "each is served or refused with a documented status and a time to come again; no bare CANCELLED",
    )
    outcomes: Counter[str] = Counter()

    async def call(channel: grpc.aio.Channel) -> None:
        try:
            async for _ in channel.unary_stream(GENERATE)(REQUEST):
                pass
            outcomes["served"] += 1
        except grpc.aio.AioRpcError as error:
            outcomes["refused" if is_documented(error) else f"{error.code().name}: {error.details()}"] += 1

    async with deployed(executor=SLOW_STEPS, gateway=("--max-concurrent-streams", "64")) as (processes, client):
        before_mib = processes.processes["gateway"].rss_mib()
        options = (("grpc.use_local_subchannel_pool", 1),)
        address = processes.grpc_addresses["gateway"]
        channels = [grpc.aio.insecure_channel(address, options) for _ in range(num_channels)]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        began = time.monotonic()
        await asyncio.gather(*(call(channels[number % num_channels]) for number in range(count)))
        took_s = time.monotonic() - began
        assert (await client.generate("y", max_tokens=2).result()).completions[0].token_ids
        for channel in channels:
            await channel.close()
        row.note(f"{dict(outcomes)} in {took_s:.1f} s")
        row.note(f"{processes.processes['gateway'].rss_mib() - before_mib:+.1f} MiB")
    assert outcomes.keys() <= {"served", "refused"}
    assert outcomes["served"] >= 64
