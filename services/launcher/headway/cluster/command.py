"""``headway cluster up``, ``status`` and ``down``."""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.cluster.description import ClusterPlan, describe
from headway.cluster.engine import Deployed, engine_of
from headway.commands.keys import make_keys
from headway.flags.configuration import add_setting_flags, build, given_by_environment, given_by_flags, merged
from headway.flags.named_files import bytes_of_file, token_of_file
from headway.flags.settings import ConfigurationError, settings_of
from headway.planning.cluster_config import ClusterConfig
from headway.planning.deployment import Deployment, read_deployment
from headway.planning.services import CLUSTER, add_config_flag, sources_in_file
from headway.terminal.tables import aligned

UP, STATUS, DOWN = "up", "status", "down"
_POLL_S = 0.5
_COLUMNS = ("process", "node", "pid", "state", "restarts", "metrics")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("action", choices=(UP, STATUS, DOWN), help="start the deployment, show it, or end it in order")
    add_config_flag(parser)
    add_setting_flags(parser, settings_of(ClusterConfig).values(), title="settings of the cluster, also [cluster]")
    parser.add_argument("--json", action="store_true", help="status as one object for machines, with logs and events")


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    settings = _settings(arguments)
    with _others_on_stderr():
        answer = _act(arguments, settings)
    sys.stdout.write(answer)
    return 0


def _act(arguments: argparse.Namespace, settings: ClusterConfig) -> str:
    """Do it; return what to write."""
    if arguments.action == UP:
        return _up(arguments, settings)
    deployed = engine_of(settings.engine).connect(settings)
    if arguments.action == DOWN:
        deployed.down()
        return f"headway cluster {settings.name} is down\n"
    try:
        return _shown(deployed.describe(), as_json=arguments.json)
    finally:
        deployed.leave()


@contextlib.contextmanager
def _others_on_stderr() -> Iterator[None]:
    """What an engine's libraries write to the standard output, as when a node has died, goes to the standard error.

    Whoever reads ``status --json`` wants one object.
    """
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def _settings(arguments: argparse.Namespace) -> ClusterConfig:
    known = settings_of(ClusterConfig)
    given = merged(
        (
            given_by_flags(arguments, known),
            given_by_environment(os.environ, CLUSTER, known),
            sources_in_file(arguments, os.environ)[CLUSTER],
        )
    )
    return build(ClusterConfig, given, ClusterConfig.validate)


def _up(arguments: argparse.Namespace, settings: ClusterConfig) -> str:
    started = time.monotonic()
    plan = _plan(read_deployment(argparse.Namespace(config=arguments.config), os.environ), settings)
    deployed = engine_of(settings.engine).up(settings, plan)
    try:
        state = _wait_until_ready(deployed, started, settings.ready_s)
    except BaseException:
        deployed.down()
        raise
    count = sum(each["process"].startswith("executor") for each in state["processes"])
    return (
        f"headway cluster {settings.name} is ready on {state['address']} ({count} executor{'s' * (count != 1)}, "
        f"{time.monotonic() - started:.1f} s)\n"
    )


def _plan(deployment: Deployment, settings: ClusterConfig) -> ClusterPlan:
    gateway = deployment.values["gateway"]
    certificate = gateway["tls_cert_file"].value if "tls_cert_file" in gateway else ""
    tokens = (
        bytes_of_file(certificate, "tls_cert_file"),
        token_of_file(settings.token_file, "token_file"),
    )
    with tempfile.TemporaryDirectory(prefix="headway-keys-") as directory:
        keys = Path(directory) / "keys"
        make_keys(keys)
        return describe(deployment, settings, keys, tokens)


def _wait_until_ready(deployed: Deployed, started: float, ready_s: float) -> dict[str, Any]:
    num_said = 0
    while True:
        state = deployed.describe()
        for line in state["events"][num_said:]:
            sys.stderr.write(f"headway cluster: {line}\n")
        num_said = len(state["events"])
        if state["refusal"]:
            raise ConfigurationError(state["refusal"].splitlines()[-1].partition(": ")[2] or state["refusal"])
        if state["is_ready"]:
            return state
        if time.monotonic() - started > ready_s:
            late = [f"{each['process']} {each['state']}" for each in state["processes"] if each["state"] != "running"]
            raise ConfigurationError(f"not ready after {ready_s:g} s ({', '.join(late) or 'no answer'}); see --ready-s")
        time.sleep(_POLL_S)


def _shown(state: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(state).decode() + "\n"
    rows = [_COLUMNS, *(tuple(_cell(each[name]) for name in _COLUMNS) for each in state["processes"])]
    word = "serves" if state["is_ready"] else "is not ready"
    return "\n".join((*aligned(rows, left=(0, 1, 3, 5)), f"{state['address']} {word}", ""))


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else str(value)
