"""The exceptions of the suite.

Owns: these. Must not know: what is checked.
"""


class ConformanceFailure(AssertionError):  # noqa: N818 (it names the finding)
    """The backend broke the contract; the message says where and how, in one line."""


class NotApplicable(Exception):  # noqa: N818 (it is an outcome, not an error)
    """The backend announces that it lacks something; the message names it."""


class CannotCheck(Exception):  # noqa: N818 (it says so)
    """The suite lacks something, such as a package."""


def require(condition: bool, message: str) -> None:
    """Raise ``ConformanceFailure`` unless ``condition`` holds."""
    if not condition:
        raise ConformanceFailure(message)
