"""The control groups around this process: a container's, a systemd unit's, and those in which these are.

Owns: where they are. Must not know: what is limited, or what for.
"""

from collections.abc import Iterator
from pathlib import Path

_OWN = Path("/proc/self/cgroup")
_ALL = Path("/sys/fs/cgroup")


def groups_around(kind: str) -> Iterator[tuple[int, Path]]:
    """Yield the version, 1 or 2, and the directory of each group that may limit this ``kind``, such as "memory" or "cpu".

    In a container the path may be the host's: its own group is the root of what it sees.
    """
    lines = _OWN.read_text().splitlines() if _OWN.exists() else ()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        place = Path(path.lstrip("/"))
        if not kinds:
            version, root = 2, _ALL
        elif kind in kinds.split(","):
            version, root = 1, _ALL / kind
        else:
            continue
        for group in (place, *place.parents):
            yield version, root / group
