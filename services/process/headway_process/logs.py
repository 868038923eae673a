"""The log format: readable lines, or one JSON object per line.

Owns: how a line is made. Must not know: what is logged, ``log_sink``.
JSON has ``event``, ``level``, ``timestamp`` (UTC), ``process``; perhaps ``replica``, ``executor``,
``request_id``, ``trace_id``.
"""

import logging
import os
from collections.abc import Mapping
from typing import TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from headway_process.log_sink import LogSink

REPLICA_VARIABLE = "_HEADWAY_REPLICA"
"""The number of this process's replica, if there are several."""
EXECUTOR_VARIABLE = "_HEADWAY_EXECUTOR"
"""The number of this executor, if its scheduler has several."""
_FIELDS = (("replica", REPLICA_VARIABLE), ("executor", EXECUTOR_VARIABLE))


def make_logger(process: str, *, level: str, log_format: str, sink: LogSink) -> FilteringBoundLogger:
    """Make a logger."""
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, sink)),
        processors=_processors(log_format),
        wrapper_class=_wrapper_class(level),
    )
    return logger.bind(process=process, **fleet_fields(os.environ))


def fleet_fields(environment: Mapping[str, str]) -> dict[str, int]:
    """Return ``replica`` and ``executor``, each if there are several."""
    given = ((field, environment.get(variable, "")) for field, variable in _FIELDS)
    return {field: int(number) for field, number in given if number.isascii() and number.isdigit()}


def configure(process: str, *, level: str, log_format: str, sink: LogSink) -> None:
    """Set up ``structlog.get_logger``."""
    fields = fleet_fields(os.environ)

    def name_process(_logger: object, _method: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        line.setdefault("process", process)
        line.update(fields)
        return line

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, name_process, *_processors(log_format)],
        wrapper_class=_wrapper_class(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, sink)),
        cache_logger_on_first_use=True,
    )


def _processors(log_format: str) -> list[Processor]:
    first: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if log_format == "json":
        return [*first, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    return [*first, plain]


def _wrapper_class(level: str) -> type[FilteringBoundLogger]:
    return structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()])
