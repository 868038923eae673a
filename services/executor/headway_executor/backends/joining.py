"""How a rank of an executor meets the others, and leaves them.

Owns: what ``rank_transport`` means. Must not know: what ranks tell each other.
"""

import contextlib
from collections.abc import Iterator

from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.models.compiled import checked_library
from headway_executor.ranks.group import RankGroup
from headway_executor.setting_checks import RANK_TRANSPORT, Takes, option_of
from headway_process.addresses import is_loopback


def joined(config: BackendConfig, takes: Takes) -> RankGroup | None:
    """Meet the other ranks, if there are any; ``takes``: the settings of the backend.

    Raises:
        BackendConfigError: they did not come, or they share no memory and the settings ask for that.
    """
    if config.place.is_alone:
        return None
    asked = option_of(config, takes, RANK_TRANSPORT)
    is_on_host = is_loopback(config.place.rendezvous.rpartition(":")[0])
    is_switched = asked == "zmq" or (asked == "auto" and not is_on_host)
    library = None if is_switched or asked == "gloo" else checked_library()
    group = RankGroup(config.place, library, is_switched=is_switched, keys=config.rank_keys)
    if asked == "shared" and not group.is_shared:
        raise BackendConfigError(
            "backend_options rank_transport 'shared' needs Linux and the CPU kernels; allowed here: auto, gloo, zmq"
        )
    return group


@contextlib.contextmanager
def parting_on_error(group: RankGroup | None) -> Iterator[None]:
    """Leave the other ranks if this one cannot open."""
    try:
        yield
    except BaseException:
        if group is not None:
            group.close()
        raise


def slowest(microseconds: float, group: RankGroup | None) -> float:
    """What all ranks wait for."""
    return microseconds if group is None else group.most([round(1e3 * microseconds)])[0] / 1e3


def num_lanes_of(config: BackendConfig) -> int:
    """How many steps are in the stages at once.

    A step that speculates is answered before the next: then there is one, and stages wait for each other.
    """
    return config.place.pipeline_parallel if config.speculation == "off" else 1
