"""The exceptions of the suite.

Owns: these. Must not know: what is checked.
"""


class ConformanceFailure(AssertionError):  # noqa: N818 (it names the finding)
    """The backend broke the contract; the message says where and how, in one line."""


class NotApplicable(Exception):  # noqa: N818 (it is an outcome, not an error)
    """The scenario needs something that this backend announces it does not have; the message names it."""


class CannotCheck(Exception):  # noqa: N818 (it says so)
    """The suite lacks something itself, such as a package; this says nothing about the backend."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConformanceFailure`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ConformanceFailure(message)
