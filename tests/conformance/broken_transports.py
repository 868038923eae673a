"""Block transports that are wrong on purpose: each is ``tcp`` with one plausible mistake.

``found_by`` names the cases that must fail.
"""

import time
import zlib
from typing import ClassVar

import numpy as np

from headway_executor.block_store.tcp_transport import TcpTransport
from headway_executor.block_store.transport import PulledBlocks, PullError


class WrappedTransport:
    found_by: ClassVar[tuple[str, ...]] = ()

    def __init__(self, **settings):
        self.inner = TcpTransport(**settings)

    def register(self, memory):
        return self.inner.register(memory)

    def pull(self, pool, address, host_blocks, *, block_bytes, timeout_s):
        return self.inner.pull(pool, address, host_blocks, block_bytes=block_bytes, timeout_s=timeout_s)

    def release(self, address):
        self.inner.release(address)

    def close(self):
        self.inner.close()


class SortsBlocks(WrappedTransport):
    found_by = ("bytes_and_records_are_those_of_the_owner", "many_blocks")

    def pull(self, pool, address, host_blocks, **asked):
        return super().pull(pool, address, np.sort(host_blocks), **asked)


class AsksForRepeatedBlocksOnce(WrappedTransport):
    found_by = ("bytes_and_records_are_those_of_the_owner",)

    def pull(self, pool, address, host_blocks, **asked):
        return super().pull(pool, address, np.array(list(dict.fromkeys(host_blocks.tolist())), np.int32), **asked)


class MixesRecords(WrappedTransport):
    """Their order is that of the pool, that of the blocks is not."""

    found_by = ("bytes_and_records_are_those_of_the_owner",)

    def pull(self, pool, address, host_blocks, **asked):
        pulled = super().pull(pool, address, host_blocks, **asked)
        return pulled._replace(records=pulled.records[np.argsort(host_blocks, kind="stable")])


class CannotAskForNothing(WrappedTransport):
    found_by = ("nothing_is_asked_for",)

    def pull(self, pool, address, host_blocks, **asked):
        host_blocks[0].item()
        return super().pull(pool, address, host_blocks, **asked)


class PadsToWords(WrappedTransport):
    found_by = ("odd_sizes",)

    def pull(self, pool, address, host_blocks, **asked):
        pulled = super().pull(pool, address, host_blocks, **asked)
        width = -(-pulled.blocks.shape[1] // 8) * 8
        return pulled._replace(blocks=np.pad(pulled.blocks, ((0, 0), (0, width - pulled.blocks.shape[1]))))


class LendsItsOwnBuffer(WrappedTransport):
    """The next pull writes over what the last one gave."""

    found_by = ("what_was_pulled_is_private",)
    buffers: ClassVar[dict] = {}

    def pull(self, pool, address, host_blocks, **asked):
        pulled = super().pull(pool, address, host_blocks, **asked)
        buffer = self.buffers.setdefault((id(self), pulled.blocks.shape), pulled)
        buffer.records[:], buffer.blocks[:] = pulled
        return buffer


class SharesABufferBetweenPullers(LendsItsOwnBuffer):
    found_by = ("two_pullers_at_once",)
    lent: ClassVar[dict] = {}

    def pull(self, pool, address, host_blocks, **asked):
        pulled = WrappedTransport.pull(self, pool, address, host_blocks, **asked)
        buffer = self.lent.setdefault(pulled.blocks.shape, pulled)
        buffer.records[:], buffer.blocks[:] = pulled
        return buffer


class GivesWhatCannotBeWritten(WrappedTransport):
    found_by = ("what_was_pulled_is_private",)

    def pull(self, pool, address, host_blocks, **asked):
        pulled = super().pull(pool, address, host_blocks, **asked)
        pulled.blocks.flags.writeable = False
        return pulled


class RemembersBlocks(WrappedTransport):
    found_by = ("what_was_pulled_is_private", "an_owner_that_was_killed")

    def __init__(self, **settings):
        super().__init__(**settings)
        self.known = {}

    def pull(self, pool, address, host_blocks, **asked):
        key = (pool, address, tuple(host_blocks.tolist()), asked["block_bytes"])
        if key not in self.known:
            self.known[key] = super().pull(pool, address, host_blocks, **asked)
        return PulledBlocks(*(array.copy() for array in self.known[key]))


class ServesACopyOfItsStart(WrappedTransport):
    found_by = ("what_was_pulled_is_private", "what_is_wrong_is_passed_on")

    def register(self, memory):
        return super().register(memory._replace(records=memory.records.copy(), blocks=memory.blocks.copy()))


class RefusesTornBlocks(WrappedTransport):
    found_by = ("what_is_wrong_is_passed_on",)

    def pull(self, pool, address, host_blocks, **asked):
        pulled = super().pull(pool, address, host_blocks, **asked)
        if not pulled.records["epoch"].all():
            raise PullError("a block was never written")
        return pulled


class SignsWhatItSends(WrappedTransport):
    """A torn block then looks right."""

    found_by = ("what_is_wrong_is_passed_on", "blocks_change_while_they_are_pulled")

    def pull(self, pool, address, host_blocks, **asked):
        pulled = super().pull(pool, address, host_blocks, **asked)
        pulled.records["checksum"] = [zlib.crc32(block.data) for block in pulled.blocks]
        return pulled


class AsksForTheNearestBlock(WrappedTransport):
    found_by = ("a_block_that_is_not_there",)

    def pull(self, pool, address, host_blocks, **asked):
        return super().pull(pool, address, np.clip(host_blocks, 0, 15).astype(np.int32), **asked)


class IgnoresThePoolsName(WrappedTransport):
    found_by = ("a_pool_of_another_name",)

    def pull(self, pool, address, host_blocks, **asked):
        return super().pull("conformance-pool", address, host_blocks, **asked)


class CutsBlocksToSize(WrappedTransport):
    found_by = ("blocks_of_another_size",)

    def pull(self, pool, address, host_blocks, *, block_bytes, timeout_s):
        pulled = super().pull(pool, address, host_blocks, block_bytes=4096, timeout_s=timeout_s)
        return pulled._replace(blocks=np.resize(pulled.blocks, (len(host_blocks), block_bytes)))


class RaisesWhateverComes(WrappedTransport):
    found_by = ("an_address_of_nobody", "an_owner_that_was_killed", "released_and_closed_twice")

    def pull(self, pool, address, host_blocks, **asked):
        try:
            return super().pull(pool, address, host_blocks, **asked)
        except PullError as error:
            raise OSError(str(error)) from None


class WritesAPage(WrappedTransport):
    found_by = ("an_address_of_nobody", "a_block_that_is_not_there")

    def pull(self, pool, address, host_blocks, **asked):
        try:
            return super().pull(pool, address, host_blocks, **asked)
        except PullError as error:
            raise PullError(f"The pull failed:\n{error}") from None


class WaitsForTheDead(WrappedTransport):
    found_by = ("an_owner_that_was_killed", "an_owner_that_closed")

    def pull(self, pool, address, host_blocks, **asked):
        try:
            return super().pull(pool, address, host_blocks, **asked)
        except PullError:
            time.sleep(2.5)
            raise


class IgnoresTheTimeOut(WrappedTransport):
    found_by = ("an_owner_that_is_paused",)

    def pull(self, pool, address, host_blocks, *, block_bytes, timeout_s):
        return super().pull(pool, address, host_blocks, block_bytes=block_bytes, timeout_s=timeout_s + 4)


class NeverForgives(WrappedTransport):
    found_by = ("an_owner_that_starts_again", "a_pool_of_another_name", "a_block_that_is_not_there")

    def __init__(self, **settings):
        super().__init__(**settings)
        self.failed = False

    def pull(self, pool, address, host_blocks, **asked):
        if self.failed:
            raise PullError("it failed before")
        try:
            return super().pull(pool, address, host_blocks, **asked)
        except PullError:
            self.failed = True
            raise


class ServesAfterItsEnd(WrappedTransport):
    found_by = ("an_owner_that_closed",)

    def __init__(self, **settings):
        super().__init__(**settings)
        self.serves = False

    def register(self, memory):
        self.serves = True
        return super().register(memory)

    def close(self):
        if not self.serves:
            super().close()


class StopsAtAThousand(WrappedTransport):
    found_by = ("many_blocks",)

    def pull(self, pool, address, host_blocks, **asked):
        pulled = super().pull(pool, address, host_blocks[:1000], **asked)
        return PulledBlocks(
            np.resize(pulled.records, len(host_blocks)),
            np.resize(pulled.blocks, (len(host_blocks), asked["block_bytes"])),
        )


class KnowsOnlyWhatIsOpen(WrappedTransport):
    found_by = ("released_and_closed_twice",)

    def __init__(self, **settings):
        super().__init__(**settings)
        self.opened = set()

    def pull(self, pool, address, host_blocks, **asked):
        self.opened.add(address)
        return super().pull(pool, address, host_blocks, **asked)

    def release(self, address):
        self.opened.remove(address)
        super().release(address)


class ClosesOnce(WrappedTransport):
    found_by = ("released_and_closed_twice",)

    def __init__(self, **settings):
        super().__init__(**settings)
        self.is_closed = False

    def close(self):
        assert not self.is_closed
        self.is_closed = True
        super().close()


BROKEN = tuple(
    one
    for one in list(globals().values())
    if isinstance(one, type) and issubclass(one, WrappedTransport) and one.found_by
)
