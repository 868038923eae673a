"""The cases, and running one.

Owns: what a transport must do. Must not know: any transport.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headway_conformance.block_transports.contents import num_whole, require_equal, require_shapes
from headway_conformance.block_transports.stage import SHORT_TIMEOUT_S, TransportStage
from headway_conformance.block_transports.under_test import TransportUnderTest
from headway_conformance.failures import ConformanceFailure, require
from headway_executor.block_store.transport import PullError

_NOTICED_S = 3.0
"""Within so long everybody knows that an owner has closed."""
_LONG_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class TransportCase:
    """``run`` raises ``ConformanceFailure``."""

    name: str
    proves: str
    run: Callable[[TransportStage], None]

    def __str__(self) -> str:
        return self.name


def check_transport(case: TransportCase, under_test: TransportUnderTest) -> None:
    """Run one case.

    Raises:
        ConformanceFailure: the transport does not conform; the message says how.
    """
    try:
        with TransportStage(under_test) as stage:
            case.run(stage)
    except ConformanceFailure as failure:
        raise ConformanceFailure(f"{case}: {failure}") from failure
    except Exception as error:
        raise ConformanceFailure(f"{case}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _bytes_and_records_are_those_of_the_owner(stage: TransportStage) -> None:
    """Blocks come in the order asked for, also single, repeated or all of them, with their records."""
    owner, puller = stage.owner(), stage.puller()
    for blocks in ([3], [15, 0, 7], [2, 2, 5, 2], list(range(16)), list(range(15, -1, -1))):
        require_equal(puller.pull(owner, blocks), blocks, 1, owner.block_bytes)


def _nothing_is_asked_for(stage: TransportStage) -> None:
    """A pull of no blocks gives arrays without blocks."""
    owner, puller = stage.owner(), stage.puller()
    require_shapes(puller.pull(owner, []), 0, owner.block_bytes)


def _odd_sizes(stage: TransportStage) -> None:
    """A block may have a single byte, or a number of bytes that no machine likes."""
    puller = stage.puller()
    for block_bytes in (1, 4099, 1 << 20):
        owner = stage.owner(5, block_bytes)
        require_equal(puller.pull(owner, [4, 1]), [4, 1], 1, block_bytes)


def _what_was_pulled_is_private(stage: TransportStage) -> None:
    """Later writes of the owner change nothing that was pulled, later pulls see them, and the puller may write too."""
    owner, puller = stage.owner(), stage.puller()
    before = puller.pull(owner, [1, 2, 3])
    owner.write([1, 2, 3], 2)
    after = puller.pull(owner, [1, 2, 3])
    require_equal(before, [1, 2, 3], 1, owner.block_bytes)
    require_equal(after, [1, 2, 3], 2, owner.block_bytes)
    after.blocks[:], after.records[:] = 0, 0
    require_equal(puller.pull(owner, [1, 2, 3]), [1, 2, 3], 2, owner.block_bytes)


def _what_is_wrong_is_passed_on(stage: TransportStage) -> None:
    """Torn and never written blocks come as they are: only the caller decides what is right."""
    owner, puller = stage.owner(version=0), stage.puller()
    owner.write([1, 3], 1)
    owner.tear([3], 2)
    pulled = puller.pull(owner, [1, 2, 3])
    require_shapes(pulled, 3, owner.block_bytes)
    require(not pulled.records[1].item()[0] and not pulled.blocks[1].any(), "a block that nobody wrote is not zeros")
    require(
        num_whole(pulled, [1, 2, 3], owner.block_bytes) == 1,
        "of a written, an unwritten and a torn block not one is whole",
    )
    require(pulled.records[2].item()[:2] == (1, 3), "the record of a torn block is not the one before")


def _blocks_change_while_they_are_pulled(stage: TransportStage) -> None:
    """A block that fits its record is what the owner wrote, however often it writes meanwhile."""
    owner, puller = stage.owner(8, 64 << 10), stage.puller()
    blocks = list(range(8))
    owner.churn(blocks, 2)
    whole = sum(num_whole(puller.pull(owner, blocks), blocks, owner.block_bytes) for _ in range(30))
    owner.rest()
    require(whole > 0, "of 240 blocks not one fits its record")
    require(num_whole(puller.pull(owner, blocks), blocks, owner.block_bytes) == 8, "blocks at rest do not fit")


def _a_pool_of_another_name(stage: TransportStage) -> None:
    """An address may have gone to another pool: its blocks are not the ones that were meant."""
    owner, puller = stage.owner(), stage.puller()
    for pool in ("another-pool", "", "ü" * 60):
        puller.refuses(owner, [1], f"pool {pool!r}", pool=pool)
    require_equal(puller.pull(owner, [1]), [1], 1, owner.block_bytes)


def _a_block_that_is_not_there(stage: TransportStage) -> None:
    """A number outside the pool is refused, also among good ones; the next pull works."""
    owner, puller = stage.owner(), stage.puller()
    for blocks in ([16], [-1], [3, 1 << 30], [-(1 << 31), 2]):
        puller.refuses(owner, blocks, f"blocks {blocks} of 16")
    require_equal(puller.pull(owner, [15]), [15], 1, owner.block_bytes)


def _blocks_of_another_size(stage: TransportStage) -> None:
    """Who expects another size has another model; the next pull works."""
    owner, puller = stage.owner(), stage.puller()
    for block_bytes in (owner.block_bytes // 2, owner.block_bytes + 1, owner.block_bytes * 16, 1):
        puller.refuses(owner, [0], f"block_bytes {block_bytes}", block_bytes=block_bytes)
    require_equal(puller.pull(owner, [0]), [0], 1, owner.block_bytes)


def _an_address_of_nobody(stage: TransportStage) -> None:
    """What is no address, or nobody's, is a PullError like any other."""
    owner, puller = stage.owner(), stage.puller()
    for address in ("", "nobody", "no:such:thing", ":", "::1", "127.0.0.1:1", "/no/such/file", "\0", "x" * 4000, "ü"):
        puller.refuses(owner, [1], f"address {address!r:.40}", address=address)
    require_equal(puller.pull(owner, [1]), [1], 1, owner.block_bytes)


def _an_owner_that_was_killed(stage: TransportStage) -> None:
    """Whoever pulled from it before and whoever comes anew are told in time, or get what it had."""
    owner, knows, comes_anew = stage.owner(), stage.puller(), stage.puller()
    require_equal(knows.pull(owner, [1]), [1], 1, owner.block_bytes)
    owner.kill()
    for puller in (knows, comes_anew, knows):
        if stage.under_test.outlives_owner:
            require_equal(puller.pull(owner, [1, 9]), [1, 9], 1, owner.block_bytes)
        else:
            puller.refuses(owner, [1], "an owner that was killed")


def _an_owner_that_closed(stage: TransportStage) -> None:
    """After close() nobody gets anything, though the process lives."""
    owner, knows, comes_anew = stage.owner(), stage.puller(), stage.puller()
    require_equal(knows.pull(owner, [1]), [1], 1, owner.block_bytes)
    owner.close_transport()
    comes_anew.refuses(owner, [1], "an owner that closed")
    deadline = time.monotonic() + _NOTICED_S
    while True:
        try:
            knows.refuses(owner, [1], "an owner that closed, asked by one that knew it")
            return
        except ConformanceFailure:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _an_owner_that_is_paused(stage: TransportStage) -> None:
    """A pull from it ends in time, with its blocks or without; once it goes on, everything works."""
    owner, puller = stage.owner(), stage.puller()
    require_equal(puller.pull(owner, [1]), [1], 1, owner.block_bytes)
    owner.pause()
    for _ in range(3):
        with contextlib.suppress(PullError):
            require_equal(puller.pull(owner, [2, 3], timeout_s=SHORT_TIMEOUT_S), [2, 3], 1, owner.block_bytes)
    owner.go_on()
    require_equal(puller.pull(owner, [4, 5]), [4, 5], 1, owner.block_bytes)


def _an_owner_that_starts_again(stage: TransportStage) -> None:
    """A puller that knew the former process gets the blocks of the new one, whatever happened between."""
    owner, puller = stage.owner(again=True), stage.puller()
    for version in (2, 3):
        require_equal(puller.pull(owner, [1]), [1], version - 1, owner.block_bytes)
        owner.kill()
        if version == 3 and not stage.under_test.outlives_owner:
            puller.refuses(owner, [1], "an owner that was killed")
        owner = stage.owner(version=version, again=True)
        require_equal(puller.pull(owner, [1, 2]), [1, 2], version, owner.block_bytes)


def _many_blocks(stage: TransportStage) -> None:
    """A pull may be larger than any buffer on its way: many small blocks, and tens of megabytes."""
    puller = stage.puller()
    for num_blocks, block_bytes in ((5000, 64), (48, 737_280)):
        owner = stage.owner(num_blocks, block_bytes)
        blocks = np.random.default_rng(num_blocks).permutation(num_blocks).tolist()
        require_equal(puller.pull(owner, blocks, timeout_s=_LONG_TIMEOUT_S), blocks, 1, block_bytes)


def _two_pullers_at_once(stage: TransportStage) -> None:
    """Each gets its own blocks, from one owner and from two."""
    owners = [stage.owner(32, 256 << 10, version=version) for version in (1, 2)]
    pullers = [stage.puller(), stage.puller()]
    halves = [list(range(0, 32, 2)), list(range(1, 32, 2))]
    for asked in ((0, 0), (0, 1), (1, 0)):
        begun = [pullers[place].begin(owners[of], halves[place]) for place, of in enumerate(asked)]
        pulled = [one.result(_LONG_TIMEOUT_S) for one in begun]
        for place, of in enumerate(asked):
            require_equal(pulled[place], halves[place], of + 1, owners[of].block_bytes)


def _released_and_closed_twice(stage: TransportStage) -> None:
    """release() takes any address at any time, close() may come twice, and neither makes a pull fail in another way."""
    owner, puller = stage.owner(), stage.puller()
    puller.release(owner.address)
    require_equal(puller.pull(owner, [1]), [1], 1, owner.block_bytes)
    for address in (owner.address, owner.address, "nobody", ""):
        puller.release(address)
    require_equal(puller.pull(owner, [2]), [2], 1, owner.block_bytes)
    puller.close()
    puller.close()
    with contextlib.suppress(PullError):
        require_equal(puller.pull(owner, [1]), [1], 1, owner.block_bytes)
    puller.release(owner.address)


CASES: tuple[TransportCase, ...] = tuple(
    TransportCase(run.__name__.removeprefix("_"), " ".join((run.__doc__ or "").split()), run)
    for run in (
        _bytes_and_records_are_those_of_the_owner,
        _nothing_is_asked_for,
        _odd_sizes,
        _what_was_pulled_is_private,
        _what_is_wrong_is_passed_on,
        _blocks_change_while_they_are_pulled,
        _a_pool_of_another_name,
        _a_block_that_is_not_there,
        _blocks_of_another_size,
        _an_address_of_nobody,
        _an_owner_that_was_killed,
        _an_owner_that_closed,
        _an_owner_that_is_paused,
        _an_owner_that_starts_again,
        _many_blocks,
        _two_pullers_at_once,
        _released_and_closed_twice,
    )
)
"""Every case, simple ones first."""


def case_named(name: str) -> TransportCase:
    """Return one of ``CASES``."""
    return {case.name: case for case in CASES}[name]
