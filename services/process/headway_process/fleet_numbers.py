"""Which of several a process is: the number of its replica, and of its executor.

Owns: the variables by which a launcher says so. Must not know: what the numbers are used for.
"""

from collections.abc import Mapping

REPLICA_VARIABLE = "_HEADWAY_REPLICA"
"""The number of this process's replica, if there are several."""
EXECUTOR_VARIABLE = "_HEADWAY_EXECUTOR"
"""The number of this executor, if its scheduler has several."""
_FIELDS = (("replica", REPLICA_VARIABLE), ("executor", EXECUTOR_VARIABLE))


def fleet_fields(environment: Mapping[str, str]) -> dict[str, int]:
    """Return ``replica`` and ``executor``, each if there are several."""
    given = ((field, environment.get(variable, "")) for field, variable in _FIELDS)
    return {field: int(number) for field, number in given if number.isascii() and number.isdigit()}
