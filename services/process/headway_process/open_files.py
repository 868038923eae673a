"""The limit of open files. Must not know: what is opened."""

import resource

from headway_proto.wording import shown

_LEAST = 64
_ENOUGH = 65536


def raise_limit_of_open_files() -> None:
    """Raise the limit to what the system allows: by default it is for programs that do not serve.

    Raises:
        ValueError: the system allows too few for any process of Headway.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if most < _LEAST:
        raise ValueError(f"limit of open files (ulimit -n): {shown(most)} is not allowed; allowed: {_LEAST} or more")
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
