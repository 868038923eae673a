"""Loggers of modules that the launcher imports too, for their settings and checks.

Owns: importing structlog only to log. Must not know: what is logged. That import takes longer than those of such a module,
and nothing starts before the launcher has read the settings.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger


def log_of(module: str) -> "FilteringBoundLogger":
    """Return the logger of a module, as ``structlog.get_logger`` does."""
    import structlog

    log: FilteringBoundLogger = structlog.get_logger(module)
    return log
