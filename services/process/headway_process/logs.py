"""The log format: readable lines, or one JSON object per line.

Owns: how a line is made. Must not know: what is logged, ``log_sink``.
JSON has ``event``, ``level``, ``timestamp`` (UTC), ``process``; perhaps ``replica``, ``executor``,
``request_id``, ``trace_id``.
"""

import logging
import os
from typing import TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from headway_process.fleet_numbers import fleet_fields
from headway_process.log_sink import LogSink


def make_logger(process: str, *, level: str, log_format: str, sink: LogSink) -> FilteringBoundLogger:
    """Make a logger."""
    logger: FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, sink)),
        processors=_processors(log_format),
        wrapper_class=_wrapper_class(level),
    )
    return logger.bind(process=process, **fleet_fields(os.environ))


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
