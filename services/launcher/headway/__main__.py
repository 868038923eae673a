"""The ``headway`` command.

Owns: the list of commands, and which module each is in. Must not know: how any of them works; each is imported only
when it is asked for, so that ``headway scheduler`` starts at once on a host without torch or gRPC.
"""

import argparse
import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence

import msgspec

from headway.configuration import OneLineParser, suggestion
from headway.settings import ConfigurationError, shown
from headway_proto.installation import install_advice
from headway_proto.last_words import tell_last

USAGE_EXIT_CODE = 2

# Which extra brings a module that a command needs and this host may lack.
_EXTRAS = {
    "grpc": "gateway",
    "grpc_health": "gateway",
    "google": "gateway",
    "grpc_reflection": "gateway",
    "grpc_status": "gateway",
    "jinja2": "gateway",
    "llguidance": "gateway",
    "tokenizers": "gateway",
    "torch": "executor",
    "prometheus_client": "metrics",
    "opentelemetry": "traces",
    "aiohttp": "bench",
    "rich": "top",
    "matplotlib": "bench",
}


class Command(msgspec.Struct, frozen=True):
    """One command: a line for the overview, its flags, and what it does; ``run`` returns the exit code."""

    summary: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code (2: the command line or the configuration is wrong)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help", "help"}:
        sys.stdout.write(overview())
        return 0 if words else USAGE_EXIT_CODE
    name, rest = words[0].removeprefix("--"), words[1:]
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        return _refuse("headway", f"unknown command {shown(words[0])[1:-1]}{suggestion(name, COMMANDS)}")
    try:
        return COMMANDS[name].run(parser_of(name).parse(rest))
    except ConfigurationError as error:
        return _refuse(f"headway {name}", str(error), error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        return _refuse(f"headway {name}", f"this host lacks {package}; {install_advice(_EXTRAS[package])}")


def overview() -> str:
    """Return the help text of the command itself."""
    width = max(map(len, COMMANDS))
    lines = [f"  headway {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ("Serve large language models over gRPC.", "", *lines, "", "headway COMMAND --help tells the flags.", "")
    )


def parser_of(name: str) -> OneLineParser:
    """Return the parser of a command, with all its flags."""
    summary = COMMANDS[name].summary
    description = f"{summary[0].upper()}{summary[1:]}."
    parser = OneLineParser(prog=f"headway {name}", description=description, allow_abbrev=False)
    COMMANDS[name].add_flags(parser)
    return parser


def _refuse(program: str, message: str, exit_code: int = USAGE_EXIT_CODE) -> int:
    tell_last(f"{program}: {message}")
    return exit_code


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    from headway.services import add_serve_flags

    add_serve_flags(parser)


def _serve(arguments: argparse.Namespace) -> int:
    from headway.serve import run

    return run(arguments, os.environ)


def _add_service_flags(name: str, parser: argparse.ArgumentParser) -> None:
    from headway.services import SERVICES, add_service_flags

    add_service_flags(parser, SERVICES[name])


def _run_service(name: str, arguments: argparse.Namespace) -> int:
    from headway.parentage import launcher_is_gone
    from headway.services import SERVICES, announce, load

    config = load(SERVICES[name], arguments, os.environ)
    run = SERVICES[name].run
    if launcher_is_gone(os.environ):
        return 0
    announce(name, config)
    return run(config)


def _service(name: str, summary: str) -> Command:
    return Command(summary, functools.partial(_add_service_flags, name), functools.partial(_run_service, name))


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    from headway.generate import add_generate_flags

    add_generate_flags(parser)


def _generate(arguments: argparse.Namespace) -> int:
    from headway.generate import run

    return run(arguments)


def _add_demo_flags(parser: argparse.ArgumentParser) -> None:
    from headway.demo import add_demo_flags

    add_demo_flags(parser)


def _demo(arguments: argparse.Namespace) -> int:
    from headway.demo import run

    return run(arguments)


def _add_health_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("address", metavar="HOST:PORT", help="where the gateway serves gRPC")
    parser.add_argument(
        "--root-certificates",
        metavar="FILE",
        help="use TLS and trust these certificates (PEM), such as the server's own",
    )
    parser.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    parser.add_argument("--client-certificate", metavar="FILE", help="certificate to show to the server (PEM)")
    parser.add_argument("--client-key", metavar="FILE", help="private key of --client-certificate (PEM)")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="S", help="seconds to wait (default: 2)")


def _health(arguments: argparse.Namespace) -> int:
    from headway.health import SERVING, Target, client_certificate, health_of
    from headway.settings import bytes_of_file, token_of_file

    target = Target(
        address=arguments.address,
        certificates=bytes_of_file(arguments.root_certificates, "--root-certificates"),
        token=token_of_file(arguments.token_file, "--token-file"),
        client=client_certificate(arguments.client_certificate, arguments.client_key, "--client-certificate"),
    )
    status = health_of(target, timeout_s=arguments.timeout)
    sys.stdout.write(f"{status}\n")
    return 0 if status == SERVING else 1


def _add_keys_flags(parser: argparse.ArgumentParser) -> None:
    from headway.keys import add_keys_flags

    add_keys_flags(parser)


def _keys(arguments: argparse.Namespace) -> int:
    from headway.keys import run

    return run(arguments)


def _add_simulate_flags(parser: argparse.ArgumentParser) -> None:
    from headway.simulate.command import add_simulate_flags

    add_simulate_flags(parser)


def _simulate(arguments: argparse.Namespace) -> int:
    from headway.simulate.command import run

    return run(arguments)


def _add_bench_flags(parser: argparse.ArgumentParser) -> None:
    from headway.bench.command import add_bench_flags

    add_bench_flags(parser)


def _bench(arguments: argparse.Namespace) -> int:
    from headway.bench.command import run

    return run(arguments)


def _add_replay_flags(parser: argparse.ArgumentParser) -> None:
    from headway.flight.replay_command import add_replay_flags

    add_replay_flags(parser)


def _replay(arguments: argparse.Namespace) -> int:
    from headway.flight.replay_command import run

    return run(arguments)


def _add_explain_flags(parser: argparse.ArgumentParser) -> None:
    from headway.flight.explain_command import add_explain_flags

    add_explain_flags(parser)


def _explain(arguments: argparse.Namespace) -> int:
    from headway.flight.explain_command import run

    return run(arguments)


def _add_timeline_flags(parser: argparse.ArgumentParser) -> None:
    from headway.flight.timeline_command import add_timeline_flags

    add_timeline_flags(parser)


def _timeline(arguments: argparse.Namespace) -> int:
    from headway.flight.timeline_command import run

    return run(arguments)


def _add_doctor_flags(parser: argparse.ArgumentParser) -> None:
    from headway.doctor.command import add_doctor_flags

    add_doctor_flags(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from headway.doctor.command import run

    return run(arguments)


def _add_top_flags(parser: argparse.ArgumentParser) -> None:
    from headway.top.command import add_top_flags

    add_top_flags(parser)


def _top(arguments: argparse.Namespace) -> int:
    from headway.top.command import run

    return run(arguments)


def _version(arguments: argparse.Namespace) -> int:
    del arguments
    sys.stdout.write(f"headway {importlib.metadata.version('headway')}\n")
    return 0


COMMANDS = {
    "serve": Command(
        "serve a model on this machine: scheduler, executor and gateway, supervised", _add_serve_flags, _serve
    ),
    "scheduler": _service("scheduler", "run the scheduler alone: decide, every step, which tokens run"),
    "executor": _service("executor", "run an executor alone: hold a model and run the steps"),
    "gateway": _service("gateway", "run a gateway alone: serve the gRPC API"),
    "generate": Command("stream answers from a running server to the terminal", _add_generate_flags, _generate),
    "demo": Command(
        "serve the model that ships with Headway, stream several prompts at once, and stop", _add_demo_flags, _demo
    ),
    "simulate": Command(
        "run the real scheduler in virtual time: a model of the device, a workload, a table of latencies",
        _add_simulate_flags,
        _simulate,
    ),
    "bench": Command(
        "send a load to a running server, Headway's or an OpenAI-compatible one, and tell latencies and throughput",
        _add_bench_flags,
        _bench,
    ),
    "replay": Command(
        "do again what a flight log holds, verify every decision, or try other policies on it",
        _add_replay_flags,
        _replay,
    ),
    "explain": Command(
        "tell the life of a request in plain words, from a flight log or from a running server",
        _add_explain_flags,
        _explain,
    ),
    "timeline": Command(
        "draw a flight log, rows against steps, or make a trace of it for ui.perfetto.dev",
        _add_timeline_flags,
        _timeline,
    ),
    "doctor": Command(
        "tell what this host can run, with which flags, and how fast; exit 0 if it can run models",
        _add_doctor_flags,
        _doctor,
    ),
    "health": Command("ask a running server whether it serves; exit 0 if it does", _add_health_flags, _health),
    "top": Command(
        "show a running server in the terminal, live, with keys to pause, drain, cancel and explain",
        _add_top_flags,
        _top,
    ),
    "keys": Command("make the keys that links between hosts need", _add_keys_flags, _keys),
    "version": Command("print the version", lambda _: None, _version),
}
ALIASES = {"keygen": "keys"}


if __name__ == "__main__":
    sys.exit(main())
