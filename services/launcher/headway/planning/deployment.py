"""What flags, environment and file say of a deployment: how many executors of which kind, and each process's settings.

Must not know: where a process runs, its addresses, its cores and devices.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headway.flags.configuration import Given, Layer, build, given_by_environment, given_by_flags, merged, read_tables
from headway.flags.settings import ConfigurationError, ModelDirectoryError, Setting, settings_of
from headway.planning.model_source import ALLOWED, ModelSources
from headway.planning.serve_config import MOST_EXECUTORS, ServeConfig
from headway.planning.services import (
    EXECUTORS_TABLES,
    SERVE,
    SERVICES,
    SETTLED_BY_SERVE,
    serve_settings,
    sources_in_file,
    with_model_directory,
)
from headway_proto.wording import shown

EXECUTOR = "executor"
ANY_ROLE = "both"
_RANK_DEGREES = ("tensor_parallel", "pipeline_parallel")


class EntryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a table ``[[executors]]`` says beside settings of the executor."""

    count: Annotated[int, Meta(ge=0, le=MOST_EXECUTORS, description="executors like this at the start; 0: min")] = 0
    min: Annotated[int, Meta(ge=1, le=MOST_EXECUTORS, description="in a cluster: fewest executors like this")] = 1
    max: Annotated[
        int, Meta(ge=0, le=MOST_EXECUTORS, description="in a cluster: most executors like this; 0: count or min")
    ] = 0
    role: Annotated[Literal["prefill", "decode", "both"], Meta(description="what they are for")] = "both"

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line that begins with the field's name.
        """
        if self.count and self.count < self.min:
            raise ValueError(f"min: {self.min} is not allowed; allowed: at most count, which is {self.count}")
        if self.max and self.max < max(self.count, self.min):
            raise ValueError(f"max: {self.max} is not allowed; allowed: at least {max(self.count, self.min)}")


class ExecutorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Executors that are alike. ``given`` is what differs from ``[executor]``."""

    count: int
    least: int
    most: int
    role: str = ANY_ROLE
    given: Layer = {}


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment as its author wrote it.

    ``values`` are the settings that all replicas of a service share. ``entries`` is one entry without settings where no
    ``[[executors]]`` are given. ``first`` wins over every entry: flags and environment.
    """

    serve: ServeConfig
    values: dict[str, dict[str, Given]]
    entries: tuple[ExecutorEntry, ...]
    models: ModelSources
    first: Layer = {}

    def executor_values(self, entry: ExecutorEntry) -> dict[str, Given]:
        """Return the settings of an executor of this entry."""
        if not entry.given:
            return self.values[EXECUTOR]
        values = with_model_directory(merged((self.first, entry.given, self.values[EXECUTOR])), self.models)
        check_model_directory(values)
        return values

    def starting(self) -> list[ExecutorEntry]:
        """Return the entry of each executor at the start, by number."""
        return [entry for entry in self.entries for _ in range(entry.count)]

    def at_most(self) -> list[ExecutorEntry]:
        """Return the entry of each executor that there may ever be, by number."""
        return [entry for entry in self.entries for _ in range(entry.most)]


def read_deployment(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Deployment:
    """Read every source.

    serve's own value (flag, variable, [serve]) wins over the service's (variable, [scheduler], [executor], [gateway]).

    Raises:
        ConfigurationError: a source is wrong.
    """
    settings = serve_settings()
    files = sources_in_file(arguments, environment)
    first = merged((given_by_flags(arguments, settings), given_by_environment(environment, SERVE, settings)))
    given = merged((first, files[SERVE]))
    serve = build(ServeConfig, given, ServeConfig.validate)
    entries = _entries(arguments.config, given, serve)
    models = ModelSources(offline=serve.offline)
    values = _values_of_services(serve, given, environment, files, models)
    if any(entry.given or entry.role != ANY_ROLE for entry in entries):
        _check_roles(given, entries, values)
    of_executor = given_by_environment(environment, EXECUTOR, SERVICES[EXECUTOR].settings)
    return Deployment(serve=serve, values=values, entries=entries, models=models, first=merged((first, of_executor)))


def entry_settings() -> dict[str, Setting]:
    """Return what a table ``[[executors]]`` may say: its own settings, and those of an executor."""
    own = settings_of(EntryConfig)
    return {
        **own,
        **{name: each for name, each in SERVICES[EXECUTOR].settings.items() if name not in SETTLED_BY_SERVE},
    }


def roles_in_order(entries: Sequence[ExecutorEntry]) -> str:
    """Return the roles of executors by number, as ``--roles`` takes them; empty if nobody has one."""
    roles = [entry.role for entry in entries]
    return ",".join(roles) if set(roles) - {ANY_ROLE} else ""


def num_ranks(values: Layer) -> int:
    """Return how many processes of how many devices an executor with these settings is."""
    product = 1
    for name in _RANK_DEGREES:
        product *= values[name].value if name in values else 1
    return product


def check_model_directory(given: Layer) -> None:
    """Refuse a missing directory once, not in each process.

    Raises:
        ModelDirectoryError: it is missing.
    """
    model = given.get("model")
    if model is not None and not Path(model.value).is_dir():
        raise ModelDirectoryError(f"{model.origin}: {shown(model.value)} is not allowed; allowed: {ALLOWED}")


def _entries(file: str | None, given: Layer, serve: ServeConfig) -> tuple[ExecutorEntry, ...]:
    tables = read_tables(file, EXECUTORS_TABLES, entry_settings()) if file else []
    if not tables:
        return (ExecutorEntry(count=serve.executors, least=serve.executors, most=serve.executors),)
    entries = tuple(_entry(table) for table in tables)
    count, most = sum(entry.count for entry in entries), sum(entry.most for entry in entries)
    if most > MOST_EXECUTORS:
        raise ConfigurationError(
            f"[[{EXECUTORS_TABLES}]] in {file}: {most} executors are not allowed; allowed: {MOST_EXECUTORS} in all tables"
        )
    asked = given.get("executors")
    if asked is not None and asked.value != count:
        raise ConfigurationError(
            f"{asked.origin}: {asked.value} is not allowed; allowed: without it, because [[{EXECUTORS_TABLES}]] in {file} "
            f"describe {count}"
        )
    return entries


def _entry(table: Layer) -> ExecutorEntry:
    config = build(EntryConfig, table, EntryConfig.validate)
    own = settings_of(EntryConfig)
    count = config.count or config.min
    return ExecutorEntry(
        count=count,
        least=config.min if "min" in table else count,
        most=config.max or count,
        role=config.role,
        given={name: each for name, each in table.items() if name not in own},
    )


def _check_roles(given: Layer, entries: Sequence[ExecutorEntry], values: Mapping[str, Layer]) -> None:
    """One source says what executors are for."""
    roles = given.get("roles", values["scheduler"].get("roles"))
    if roles is None or not roles.value or not roles_in_order(entries):
        return
    raise ConfigurationError(
        f"{roles.origin}: {shown(roles.value)} is not allowed; allowed: without it, because [[{EXECUTORS_TABLES}]] give roles"
    )


def _values_of_services(
    serve: ServeConfig,
    given: Layer,
    environment: Mapping[str, str],
    files: Mapping[str, Layer],
    models: ModelSources,
) -> dict[str, dict[str, Given]]:
    """Return the values that all replicas share."""
    presets = {"model": Given(serve.model, "--model")}
    result = {}
    for service in SERVICES.values():
        from_environment = given_by_environment(environment, service.name, service.settings)
        values = with_model_directory(merged((given, from_environment, files[service.name], presets)), models)
        check_model_directory(values)
        result[service.name] = values
    return result
