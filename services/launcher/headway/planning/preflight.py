"""Checks of this host before a process starts. The processes check again."""

import functools
import importlib.util
from collections.abc import Callable

from headway.flags.configuration import in_the_authors_words
from headway.flags.settings import ConfigurationError, ModelDirectoryError, settings_of
from headway.planning import openai_front
from headway.planning.plan import Plan, Settled
from headway.planning.serve_config import ServeConfig
from headway_executor.backend import BackendConfigError, ModelFilesError
from headway_executor.config import ExecutorConfig
from headway_executor.startup import preflight as of_executor
from headway_gateway import preflight as of_gateway
from headway_gateway.config import GatewayConfig
from headway_gateway.listening import problem_of_listening
from headway_proto.wording import one_line, shown
from headway_scheduler import preflight as of_scheduler
from headway_scheduler.config import SchedulerConfig


def check(plan: Plan) -> None:
    """Check that the processes can start.

    Raises:
        ConfigurationError: a setting prevents it.
        ModuleNotFoundError: a package is missing.
    """
    for settled in plan.settled:
        config = settled.config
        if getattr(config, "metrics_address", ""):
            require("prometheus_client")
        if isinstance(config, GatewayConfig):
            for package in of_gateway.packages_of(config):
                require(package)
            _checked(settled, functools.partial(of_gateway.check, config))
        elif isinstance(config, SchedulerConfig):
            _checked(settled, functools.partial(of_scheduler.check, config))
        elif isinstance(config, ExecutorConfig):
            _checked(settled, functools.partial(of_executor.check, config))
    try:
        if plan.smg_flags:
            openai_front.check_flags(plan.smg_flags)
    except ValueError as error:
        raise ConfigurationError(in_the_authors_words(one_line(error), settings_of(ServeConfig), {})) from None
    for flag, address in plan.listeners:
        check_free(flag, address)


def require(package: str) -> None:
    """Check for a package without importing it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def _checked(settled: Settled, look: Callable[[], None]) -> None:
    try:
        look()
    except (ModelFilesError, of_gateway.MissingFileError) as error:
        raise ModelDirectoryError(one_line(error)) from None
    except (BackendConfigError, ValueError) as error:
        words = in_the_authors_words(one_line(error), settled.service.settings, settled.given)
        raise ConfigurationError(words) from None


def check_free(flag: str, address: str) -> None:
    """Check that HOST:PORT is free; ``flag`` asks for it.

    Raises:
        ConfigurationError: it is taken, or not this machine's.
    """
    problem = problem_of_listening(address)
    if problem:
        raise ConfigurationError(f"{flag}: cannot listen on {shown(address)} ({problem}); allowed: a free address")
