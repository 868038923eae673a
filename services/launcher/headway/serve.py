"""``headway serve``: scheduler, executor and gateway on this machine, as one thing that starts, runs and stops.

Owns: the configuration of all three out of one set of flags, the private directory of their sockets, the readiness
line, and the loop that turns signals and ends of children into events for the supervision state machine.
Must not know: what the processes do, or when to restart one (``supervision`` decides).
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from headway.configuration import Given, Layer, build, given_by_environment, given_by_flags, merged
from headway.health import Target
from headway.processes import ChildExited, Children
from headway.readiness import wait_until_serving
from headway.serve_config import DEMO_MODEL, ServeConfig
from headway.services import (
    SERVE,
    SERVICES,
    serve_settings,
    sources_in_file,
    with_model_directory,
)
from headway.settings import ConfigurationError, ModelDirectoryError, as_text, bytes_of_file, settings_of, shown
from headway.supervision import Action, Fleet, Kill, Report, RestartPolicy, Start, Terminate
from headway_gateway.config import GatewayConfig

MAX_IPC_PATH_BYTES = 107
STOP_GRACE_S = 5.0
START_ORDER = ("executor", "scheduler", "gateway")
STOP_ORDER = ("gateway", "scheduler", "executor")


class StopRequested(msgspec.Struct, frozen=True):
    """SIGINT or SIGTERM arrived."""

    signum: int


Event = ChildExited | StopRequested

WhenReady = Callable[[str, str], Awaitable[bool]]
"""Called with the readiness line and the address once the fleet serves; False ends it."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a process is started. ``commands`` are by service name."""

    serve: ServeConfig
    commands: dict[str, list[str]]
    target: Target
    stop_grace_s: dict[str, float]


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Serve until told to stop; return the exit code.

    Raises:
        ConfigurationError: nothing has been started.
    """
    with socket_directory() as directory:
        plan = make_plan(arguments, environment, directory)
        return asyncio.run(serve(plan, without_settings(environment), _print_readiness))


def make_plan(arguments: argparse.Namespace, environment: Mapping[str, str], directory: Path) -> Plan:
    """Settle every configuration and validate it, so that a mistake is told before anything starts.

    A setting that several services share reaches each of them. What serve is given (flag, variable, [serve]) wins over
    what the service itself is given (variable, [scheduler], [executor], [gateway]).

    Raises:
        ConfigurationError: some source is wrong.
    """
    settings = serve_settings()
    files = sources_in_file(arguments, environment)
    given = merged(
        (given_by_flags(arguments, settings), given_by_environment(environment, SERVE, settings), files[SERVE])
    )
    serve = build(ServeConfig, given, ServeConfig.validate)
    presets = {"model": Given(serve.model, "--model")}
    configs = {}
    for service in SERVICES.values():
        settled = _settled(service.settings, directory)
        from_environment = given_by_environment(environment, service.name, service.settings)
        layers = (settled, given, from_environment, files[service.name], presets)
        values = with_model_directory(merged(layers))
        _check_model_directory(values)
        configs[service.name] = service.build(_with_a_port(values))
    gateway = configs["gateway"]
    assert isinstance(gateway, GatewayConfig)
    return Plan(
        serve=serve,
        commands={name: _command(name, config) for name, config in configs.items()},
        target=_target(gateway),
        # How long a process may take over its own grace before it is killed.
        stop_grace_s={name: getattr(configs[name], "grace_s", 0.0) + STOP_GRACE_S for name in STOP_ORDER},
    )


def _target(gateway: GatewayConfig) -> Target:
    """Return how this host reaches the gateway. Its certificate and its token lie here, so both are at hand.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    return Target(
        address=gateway.grpc_address,
        certificates=bytes_of_file(gateway.tls_cert_file, "--tls-cert-file"),
        token=(bytes_of_file(gateway.auth_token_file, "--auth-token-file") or b"").decode().strip(),
    )


def _check_model_directory(given: Layer) -> None:
    """Refuse a directory that is not there once, here, rather than once in each process that reads it."""
    model = given.get("model")
    if model is not None and not Path(model.value).is_dir():
        raise ModelDirectoryError(
            f"{model.origin}: {shown(model.value)} is not allowed; allowed: a checkpoint directory, or {DEMO_MODEL}"
        )


def _settled(settings: Mapping[str, object], directory: Path) -> Layer:
    values = {
        "ingress_address": f"ipc://{directory}/ingress",
        "step_address": f"ipc://{directory}/step",
        "exit_with_parent": True,
    }
    return {name: Given(value, "the launcher") for name, value in values.items() if name in settings}


def _command(name: str, config: msgspec.Struct) -> list[str]:
    """Return the command line of a child: every setting that is not its default, and no other source."""
    words = [sys.executable, "-m", "headway", name]
    for setting in settings_of(type(config)).values():
        value = getattr(config, setting.name)
        if setting.required or value != setting.default:
            words += as_text(setting, value)
    return words


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without ``HEADWAY_*``: for children, whose settings have become flags already."""
    return {name: value for name, value in environment.items() if not name.startswith("HEADWAY_")}


def _with_a_port(given: Layer) -> Layer:
    """Replace port 0 of the gRPC address by a free port, so that the address holds over restarts of the gateway."""
    address = given.get("grpc_address")
    if address is None or not address.value.endswith(":0"):
        return given
    host = address.value.removesuffix(":0")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host.strip("[]"), 0))
            port = probe.getsockname()[1]
    except OSError as error:
        raise ConfigurationError(
            f"{address.origin}: {shown(address.value)} cannot be bound: {error.strerror}"
        ) from None
    return {**given, "grpc_address": Given(f"{host}:{port}", address.origin)}


@contextlib.contextmanager
def socket_directory() -> Iterator[Path]:
    """Make a directory that only this user can enter, and remove it at the end.

    The path of a Unix socket is at most 107 bytes, so a long TMPDIR is passed over for the system's own.
    """
    longest_name = "/headway-12345678/ingress"
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent + longest_name)) > MAX_IPC_PATH_BYTES:
        parent = "/tmp"  # noqa: S108  # mkdtemp below makes a fresh private directory in it
    directory = Path(tempfile.mkdtemp(prefix="headway-", dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def serve(plan: Plan, environment: Mapping[str, str], when_ready: WhenReady) -> int:
    """Run the fleet until it is told to stop or cannot go on; return its exit code."""
    policy = RestartPolicy(max_restarts=plan.serve.max_restarts, window_s=plan.serve.restart_window_s)
    fleet = Fleet(plan.stop_grace_s, policy)
    events: asyncio.Queue[Event] = asyncio.Queue()
    children = Children(plan.commands, environment, events.put_nowait)
    _deliver_signals(events)
    attendant = asyncio.create_task(_attend(plan.target, when_ready, events))
    try:
        say(f"starting {', '.join(START_ORDER)}")
        await _perform(fleet.start(START_ORDER), children)
        return await _supervise(fleet, children, events)
    finally:
        attendant.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await attendant
        children.kill_all()


def _deliver_signals(events: "asyncio.Queue[Event]") -> None:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, events.put_nowait, StopRequested(signum))


async def _attend(target: Target, when_ready: WhenReady, events: "asyncio.Queue[Event]") -> None:
    """Wait until the fleet serves, do what is to be done then, and stop it if that is all or went wrong."""
    keep_serving = False
    try:
        readiness_line = await wait_until_serving(target, started=time.monotonic(), tell=say)
        keep_serving = await when_ready(readiness_line, target.address)
    finally:
        if not keep_serving:
            events.put_nowait(StopRequested(signal.SIGTERM))


async def _print_readiness(readiness_line: str, address: str) -> bool:
    """Print the one line on stdout that says the fleet serves; keep serving."""
    del address
    with contextlib.suppress(OSError):
        sys.stdout.write(readiness_line + "\n")
        sys.stdout.flush()
    return True


async def _supervise(fleet: Fleet, children: Children, events: "asyncio.Queue[Event]") -> int:
    """Feed the fleet with what happens until it has ended; return its exit code."""
    while (exit_code := fleet.exit_code) is None:
        event = await _next_event(events, fleet.next_deadline)
        now = time.monotonic()
        match event:
            case None:
                actions = fleet.tick(now)
            case ChildExited(name, returncode):
                actions = fleet.child_exited(name, returncode, now)
            case StopRequested(signum):
                actions = fleet.stop_requested(now, impatient_exit_code=128 + signum)
        await _perform(actions, children)
    return exit_code


async def _next_event(events: "asyncio.Queue[Event]", deadline: float | None) -> Event | None:
    """Return what happens next, or None if nothing has by the deadline (monotonic seconds)."""
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
    try:
        async with asyncio.timeout(timeout):
            return await events.get()
    except TimeoutError:
        return None


async def _perform(actions: list[Action], children: Children) -> None:
    for action in actions:
        match action:
            case Start(name):
                await children.start(name)
            case Terminate(name):
                children.terminate(name)
            case Kill(name):
                children.kill(name)
            case Report(text):
                say(text)


def say(text: str) -> None:
    """Tell the operator on stderr. A closed stderr is no reason to stop serving."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"headway serve: {text}\n")
        sys.stderr.flush()
