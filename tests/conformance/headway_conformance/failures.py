"""The exceptions of the suite."""


class ConformanceFailure(AssertionError):  # noqa: N818 (it names the finding)
    """The backend broke the contract; the message says where and how."""


class NotApplicable(Exception):  # noqa: N818 (it is an outcome, not an error)
    """The backend announces that it lacks something."""


class CannotCheck(Exception):  # noqa: N818 (it says so)
    """The suite lacks something."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceFailure(message)
