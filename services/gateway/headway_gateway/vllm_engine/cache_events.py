"""The prefix cache as VllmEngine's stream of KV events.

A subscription begins with a clearing and the whole cache; so does the stream after a restart or a long delay.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

from smg_grpc_proto.generated import common_pb2

from headway_gateway.link.scheduler_client import SchedulerClient, SchedulerUnavailableError
from headway_gateway.operators.operator_calls import ANSWER_TIMEOUT_S
from headway_gateway.wall_clock import now
from headway_proto.columns import decode_column
from headway_proto.operations import AdminCall, CacheChange, CacheChanges, CachePosition

MOST_START = (1 << 63) - 1
"""Leaves half of the field's range."""

_READ_INTERVAL_S = 0.1


async def kv_event_batches(client: SchedulerClient, start: int) -> AsyncIterator[common_pb2.KvEventBatch]:
    """Yield batches, numbered from ``start`` + 1."""
    position: CachePosition | None = None
    number = start
    while True:
        found = await _read(client, position)
        if found is not None:
            position = found.position
            events = [event for change in found.changes for event in _events(change, found.block_size)]
            if events:
                number += 1
                yield common_pb2.KvEventBatch(
                    sequence_number=number, timestamp=now().timestamp(), events=events, dp_rank=0
                )
        if found is None or not found.more:
            await asyncio.sleep(_READ_INTERVAL_S)


async def _read(client: SchedulerClient, position: CachePosition | None) -> CacheChanges | None:
    try:
        call = AdminCall(method="cache", position=position)
        return (await client.call_admin(call, timeout_s=ANSWER_TIMEOUT_S)).cache
    except SchedulerUnavailableError:
        return None


def _events(change: CacheChange, block_size: int) -> Iterator[common_pb2.KvCacheEvent]:
    numbers = range(change.first, change.first + change.num_blocks)
    if not change.num_blocks:
        yield common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
    elif not change.token_ids:
        yield common_pb2.KvCacheEvent(removed=common_pb2.KvBlocksRemoved(block_hashes=numbers))
    else:
        yield common_pb2.KvCacheEvent(stored=_stored(change, numbers, block_size))


def _stored(change: CacheChange, numbers: range, block_size: int) -> common_pb2.KvBlocksStored:
    token_ids = decode_column(change.token_ids).tolist()
    blocks = [
        common_pb2.KvBlock(
            block_hash=number,
            token_ids=token_ids[place * block_size : (place + 1) * block_size],
            block_size=block_size,
        )
        for place, number in enumerate(numbers)
    ]
    stored = common_pb2.KvBlocksStored(blocks=blocks)
    if change.parent:
        stored.parent_block_hash = change.parent
    if change.scope:
        stored.cache_salt = change.scope
    return stored
