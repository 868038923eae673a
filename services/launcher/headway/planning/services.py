"""The three services and their configurations.

A service is imported only when needed, because a scheduler's host has no torch.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

import msgspec

from headway.flags.configuration import (
    Layer,
    add_setting_flags,
    build,
    check_environment,
    effective,
    given_by_environment,
    given_by_flags,
    is_setting,
    merged,
    read_file,
)
from headway.flags.settings import ModelDirectoryError, Setting, settings_of
from headway.planning.cluster_config import ClusterConfig
from headway.planning.model_source import ModelSourceError, ModelSources
from headway.planning.serve_config import ServeConfig
from headway_process.log_sink import LogSink
from headway_proto.wording import shown

SERVE = "serve"
CLUSTER = "cluster"
EXECUTORS_TABLES = "executors"
"""The tables ``[[executors]]`` of a file, for executors that differ."""
_LOG_DRAIN_S = 0.5

# serve settles these itself; every other setting of a service is also a flag of `serve`.
SETTLED_BY_SERVE = frozenset(
    {
        "ingress_address",
        "step_address",
        "max_executors",
        "curve_keys",
        "exit_with_parent",
        "reuse_port",
        "launcher_token_digest",
        "launcher_health_name",
        "metrics_address",
    }
)


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """A service's modules."""

    name: str
    package: str
    struct_name: str

    @property
    def struct(self) -> type[msgspec.Struct]:
        """The frozen configuration struct."""
        struct: type[msgspec.Struct] = getattr(importlib.import_module(f"{self.package}.config"), self.struct_name)
        return struct

    @property
    def settings(self) -> dict[str, Setting]:
        """The settings by field name."""
        return settings_of(self.struct)

    @property
    def run(self) -> Callable[[Any], int]:
        """The process; it returns the exit code."""
        run: Callable[[Any], int] = importlib.import_module(f"{self.package}.process").run
        return run

    def build(self, given: Layer) -> msgspec.Struct:
        """Make and validate the configuration."""
        return build(self.struct, given, lambda config: config.validate())  # type: ignore[attr-defined]


SERVICES = {
    service.name: service
    for service in (
        Service(
            name="scheduler",
            package="headway_scheduler",
            struct_name="SchedulerConfig",
        ),
        Service(
            name="executor",
            package="headway_executor",
            struct_name="ExecutorConfig",
        ),
        Service(
            name="gateway",
            package="headway_gateway",
            struct_name="GatewayConfig",
        ),
    )
}


def serve_settings() -> dict[str, Setting]:
    """Return the settings that are flags of ``serve``."""
    settings = settings_of(ServeConfig)
    for service in SERVICES.values():
        for name, setting in service.settings.items():
            if name not in SETTLED_BY_SERVE:
                settings.setdefault(name, setting)
    return settings


def load(service: Service, arguments: argparse.Namespace, environment: Mapping[str, str]) -> msgspec.Struct:
    """Build the configuration of a service by itself.

    Raises:
        ConfigurationError: a source is wrong.
    """
    from_flags = given_by_flags(arguments, service.settings)
    from_file = sources_in_file(arguments, environment)[service.name]
    from_environment = given_by_environment(environment, service.name, service.settings)
    return service.build(with_model_directory(merged((from_flags, from_environment, from_file)), ModelSources()))


def sources_in_file(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Layer]:
    """Read the ``--config`` file.

    Raises:
        ConfigurationError: an environment variable is unknown, or the file is wrong.
    """
    if arguments.config is None and not any(map(is_setting, environment)):
        return {section: {} for section in (SERVE, CLUSTER, *SERVICES)}  # the other services are not even imported
    sections = {
        SERVE: serve_settings(),
        CLUSTER: settings_of(ClusterConfig),
        **{name: service.settings for name, service in SERVICES.items()},
    }
    check_environment(environment, sections)
    if arguments.config is None:
        return {section: {} for section in sections}
    return read_file(arguments.config, sections, tables=EXECUTORS_TABLES)


def with_model_directory(given: Layer, models: ModelSources) -> dict[str, Any]:
    """Replace the model's name by its directory, and serve the model by the name that was given.

    Raises:
        ModelDirectoryError: the model cannot be had.
    """
    result = dict(given)
    model = result.get("model")
    if model is not None:
        try:
            found = models.find(model.value)
        except ModelSourceError as error:
            raise ModelDirectoryError(f"{model.origin}: {shown(model.value)} is not allowed; {error}") from None
        result["model"] = msgspec.structs.replace(model, value=found.directory)
        result.setdefault("served_model_name", msgspec.structs.replace(model, value=found.served_name))
    return result


def add_service_flags(parser: argparse.ArgumentParser, service: Service) -> None:
    """Add ``--config`` and one service's flags."""
    add_config_flag(parser)
    add_setting_flags(parser, service.settings.values())


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``, serve's and the services' flags."""
    add_config_flag(parser)
    own = settings_of(ServeConfig)
    shown_already = set(own) | SETTLED_BY_SERVE
    add_setting_flags(parser, own.values())
    for service in SERVICES.values():
        new = {name: setting for name, setting in service.settings.items() if name not in shown_already}
        add_setting_flags(parser, new.values(), title=f"settings of the {service.name}")
        shown_already |= set(new)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add the TOML file's flag."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with the sections [serve], [scheduler], [executor], [gateway], [cluster] and tables [[executors]]; flags "
        "and HEADWAY_* environment variables win over it",
    )


def announce(name: str, config: msgspec.Struct) -> None:
    """Log the effective configuration at level debug."""
    import structlog

    from headway_process.fleet_numbers import fleet_fields

    settings = effective(config)
    if settings.get("log_level") != "debug":
        return
    as_json = settings.get("log_format") == "json"
    renderer = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=False, sort_keys=False)
    )
    sink = LogSink(sys.stderr.fileno())
    log = structlog.wrap_logger(
        structlog.WriteLogger(cast(TextIO, sink)),
        processors=[structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso"), renderer],
    )
    log.debug("configuration", service=name, **fleet_fields(os.environ), **settings)
    sink.drain(_LOG_DRAIN_S)
