"""What an executor is for: prompts, decoding, or both.

Owns: the roles, and how they are written. Must not know: what a policy makes of them.
"""

from collections.abc import Iterable
from enum import StrEnum

from headway_proto.wording import shown


class Role(StrEnum):
    """Data, not a kind of executor: every executor can do everything, and its role may change while it runs."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """Whether it takes prompts."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """Whether requests decode there."""
        return self is not Role.PREFILL


def roles_of(text: str, num_executors: int) -> tuple[Role, ...]:
    """The roles of the first executors, from a list with commas; those beyond it are ``both``.

    Raises:
        ValueError: one line with what is allowed.
    """
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    for word in words:
        if word not in set(Role):
            raise ValueError(f"roles: {shown(word)} is not allowed; allowed: {', '.join(Role)}")
    roles = tuple([Role(word) for word in words])
    if len(roles) > num_executors:
        raise ValueError(
            f"roles: {shown(text)} is not allowed; allowed: at most {num_executors}, one for each executor"
        )
    missing = what_nobody_does(roles) if len(roles) == num_executors else ""
    if missing:
        raise ValueError(f"roles: {shown(text)} is not allowed; allowed: at least one executor for {missing}")
    return roles


def what_nobody_does(roles: Iterable[Role]) -> str:
    """The work for which executors with these roles leave nobody: "prompts", "decoding", or ""."""
    there = set(roles)
    if not any(role.prefills for role in there):
        return "prompts"
    return "" if any(role.decodes for role in there) else "decoding"
