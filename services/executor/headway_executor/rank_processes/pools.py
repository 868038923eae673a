"""The host pools of a group, announced as one.

Owns: how names and addresses of all ranks are joined, and which part is one rank's. Must not know: transports, blocks.

A block of the group is its parts in the pools of all ranks. Rank r of a group reads from rank r of another one, so only
groups of the same degrees can read from each other; a rank's identity names them (``store``).
"""

from collections.abc import Mapping

import msgspec

from headway_executor.batch.diff_checks import Pull
from headway_executor.rank_place import RankPlace
from headway_proto.step import BackendInfo, info_problem

_BETWEEN = "|"


def variant_of(place: RankPlace, variant: str) -> str:
    """What changes the contents of a rank's blocks, beside ``variant``, which changes those of one rank alone."""
    if place.is_alone:
        return variant
    return f"{variant} rank {place.rank} of {place.tensor_parallel}x{place.pipeline_parallel}"


def joined(infos: Mapping[int, BackendInfo]) -> BackendInfo:
    """Return rank 0's information with the pools of all ranks, as far as all have one."""
    ranks = [infos[rank] for rank in sorted(infos)]
    first = msgspec.structs.replace(ranks[0], host_pool="", block_addresses=())
    if not all(info.host_pool for info in ranks):
        return first
    ways = [dict(address.split(":", 1) for address in info.block_addresses) for info in ranks]
    addresses = tuple(
        f"{name}:{_BETWEEN.join(way[name] for way in ways)}" for name in ways[0] if all(name in way for way in ways)
    )
    whole = msgspec.structs.replace(
        first, host_pool=_BETWEEN.join(info.host_pool for info in ranks), block_addresses=addresses
    )
    return first if info_problem(whole) else whole


def part_of(pull: Pull, place: RankPlace) -> Pull:
    """Return the part of a rank; a pull from a group of another size stays whole, and nobody has a pool of its name."""
    if place.is_alone or len(pull.pool.split(_BETWEEN)) != place.size:
        return pull
    addresses = []
    for address in pull.addresses:
        name, _, rest = address.partition(":")
        parts = rest.split(_BETWEEN)
        if len(parts) == place.size:
            addresses.append(f"{name}:{parts[place.rank]}")
    return pull._replace(pool=pull.pool.split(_BETWEEN)[place.rank], addresses=tuple(addresses))
