"""The ``headway`` command: a table of commands.

It imports a command's module only to run it, so ``headway scheduler`` needs neither torch nor gRPC.
"""

from headway import quiet_start  # isort: split

import argparse
import contextlib
import errno
import importlib
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.flags.configuration import OneLineParser, suggestion
from headway.flags.settings import ConfigurationError
from headway.standard_streams import open_closed
from headway_process.installation import install_advice
from headway_process.last_words import write_last_line
from headway_process.lean_imports import one_blas_thread
from headway_proto.wording import one_line, shown

FAILED_EXIT_CODE = 1
USAGE_EXIT_CODE = 2

_UNWRITABLE = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

# The extra that brings a module which this host may lack.
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
    "ray": "ray",
    "gguf": "gguf",
    "huggingface_hub": "hub",
    "shtab": "completion",
    "httpx2": "gateway",
    "hpack": "gateway",
    "httptools": "gateway",
    "uvicorn": "gateway",
    "uvloop": "gateway",
}

# What other programs call a command, and what to do here.
_ELSEWHERE = {
    "run": "headway serve MODEL serves a model, and headway generate TEXT asks it",
    "chat": "headway generate --chat TEXT asks a running server",
    "pull": "headway serve ORG/NAME fetches a model that is not here yet",
    "list": "a hub's models are in the cache of huggingface_hub: hf cache ls",
    "ps": "headway top shows a running server",
    "stop": "Ctrl-C or SIGTERM ends headway serve",
}


class Command(msgspec.Struct, frozen=True):
    """A command's line in the overview, and its module."""

    summary: str
    module: str
    words: tuple[str, ...] = ()
    main_flags: tuple[str, ...] = ()
    """What --help shows; empty: everything."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's flags."""
        importlib.import_module(self.module).add_flags(parser, *self.words)

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command; return the exit code."""
        code: int = importlib.import_module(self.module).run(arguments, *self.words)
        return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    open_closed()
    words = _asked(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in {"-h", "--help", "help"}:
        sys.stdout.write(overview())
        return 0 if words else USAGE_EXIT_CODE
    name, rest = words[0].removeprefix("--"), words[1:]
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        hint = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else suggestion(name, COMMANDS)
        return _refuse("headway", f"unknown command {shown(words[0])[1:-1]}{hint}")
    try:
        _require_current_directory()
        with one_blas_thread():
            parser = parser_of(name)
        code = COMMANDS[name].run(parser.parse(rest))
        sys.stdout.flush()
        return code
    except ConfigurationError as error:
        return _refuse(f"headway {name}", str(error), error.exit_code)
    except KeyboardInterrupt:
        # At any moment, also while modules are imported.
        sys.stderr.write(f"headway {name}: cancelled\n")
        return quiet_start.INTERRUPTED_EXIT_CODE
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        _leave_stdout()
        if error.errno == errno.EPIPE:  # whoever reads has seen enough, as head does
            return FAILED_EXIT_CODE
        return _refuse(f"headway {name}", f"the output cannot be written: {error.strerror}", FAILED_EXIT_CODE)
    except ImportError as error:
        if not (problem := _problem_of_import(error)):
            raise
        return _refuse(f"headway {name}", problem)


def _problem_of_import(error: ImportError) -> str:
    """Return what this host lacks, or "" if it lacks nothing that is known."""
    if not isinstance(error, ModuleNotFoundError):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        room = f" (this process may have {limit >> 20} MiB of addresses, see ulimit -v)"
        return f"a package cannot be loaded: {one_line(error)}{'' if limit == resource.RLIM_INFINITY else room}"
    package = (error.name or "").partition(".")[0]
    return f"this host lacks {package}; {install_advice(_EXTRAS[package])}" if package in _EXTRAS else ""


def _require_current_directory() -> None:
    """In one that was deleted, libraries do not even find themselves."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigurationError(f"the current directory: {error.strerror}; allowed: one that exists") from None


def _asked(words: Sequence[str]) -> list[str]:
    """``help COMMAND`` asks for the help of a command."""
    return [words[1], "--help"] if words[:1] == ["help"] and len(words) > 1 else list(words)


def _leave_stdout() -> None:
    """Otherwise Python writes what is left when it ends, and fails again."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def overview() -> str:
    """Return ``headway``'s own help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  headway {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        ("Serve large language models over gRPC.", "", *lines, "", "headway COMMAND --help lists its flags.", "")
    )


def parser_of(name: str) -> OneLineParser:
    """Return a command's parser, with all flags."""
    summary = COMMANDS[name].summary
    description = f"{summary[0].upper()}{summary[1:]}."
    command = COMMANDS[name]
    parser = OneLineParser(
        prog=f"headway {name}", description=description, allow_abbrev=False, main_flags=command.main_flags
    )
    command.add_flags(parser)
    return parser


def _refuse(program: str, message: str, exit_code: int = USAGE_EXIT_CODE) -> int:
    write_last_line(f"{program}: {message}")
    return exit_code


_EVERYWHERE = ("--config", "--log-level")
_OF_EXECUTOR = (
    *("--device", "--dtype", "--quantization", "--tensor-parallel", "--pipeline-parallel", "--num-threads"),
    *("--max-model-len", "--adapter"),
)
_OF_SCHEDULER = ("--max-num-seqs", "--max-num-batched-tokens", "--order", "--flight-log")
_OF_GATEWAY = ("--grpc-address", "--auth-token-file")

COMMANDS = {
    "serve": Command(
        "serve a model on this machine: scheduler, executor and gateway, supervised",
        "headway.commands.serve",
        main_flags=(
            *_EVERYWHERE,
            *("--offline", "--executors", "--replicas", "--http-address", "--metrics-port"),
            *(*_OF_GATEWAY, *_OF_EXECUTOR, *_OF_SCHEDULER),
        ),
    ),
    "cluster": Command("run a deployment on several machines: up, status, down (extra ray)", "headway.cluster.command"),
    "scheduler": Command(
        "run the scheduler alone: decide, every step, which tokens run",
        "headway.commands.service_command",
        ("scheduler",),
        (*_EVERYWHERE, "--ingress-address", "--step-address", "--curve-keys", "--metrics-address", *_OF_SCHEDULER),
    ),
    "executor": Command(
        "run an executor alone: hold a model and run the steps",
        "headway.commands.service_command",
        ("executor",),
        (*_EVERYWHERE, "--model", "--step-address", "--curve-keys", "--metrics-address", *_OF_EXECUTOR),
    ),
    "gateway": Command(
        "run a gateway alone: serve the gRPC API",
        "headway.commands.service_command",
        ("gateway",),
        (
            *_EVERYWHERE,
            "--model",
            "--ingress-address",
            "--curve-keys",
            "--http-address",
            "--metrics-address",
            "--workers",
            *_OF_GATEWAY,
        ),
    ),
    "generate": Command("stream answers from a running server to the terminal", "headway.commands.generate"),
    "batch": Command("answer a file of requests, resumable; OpenAI's batch format, or bodies", "headway.batch.command"),
    "demo": Command(
        "serve the model that ships with Headway, stream several prompts at once, and stop", "headway.commands.demo"
    ),
    "simulate": Command(
        "run the real scheduler in virtual time: a model of the device, a workload, a table of latencies",
        "headway_lab.simulate.command",
    ),
    "plan": Command(
        "search how many executors of which role and degrees of parallelism serve a rate within objectives",
        "headway_lab.plan.command",
    ),
    "bench": Command(
        "send a load to a running server, Headway's or an OpenAI-compatible one, and report latencies and throughput",
        "headway_lab.bench.command",
    ),
    "replay": Command(
        "do again what a flight log holds, verify every decision, or try other policies on it",
        "headway_lab.flight.replay_command",
    ),
    "explain": Command(
        "describe the life of a request in plain words, from a flight log or from a running server",
        "headway_lab.flight.explain_command",
    ),
    "timeline": Command(
        "draw a flight log, rows against steps, or make a trace of it for ui.perfetto.dev",
        "headway_lab.flight.timeline_command",
    ),
    "doctor": Command(
        "report what this host can run, with which flags, and how fast; exit 0 if it can run models",
        "headway_lab.doctor.command",
    ),
    "gguf": Command("make a checkpoint directory of a GGUF file (extra gguf)", "headway.gguf_import.command"),
    "health": Command("ask a running server whether it serves; exit 0 if it does", "headway.commands.health_command"),
    "top": Command(
        "show a running server in the terminal, live, with keys to pause, drain, cancel and explain",
        "headway_lab.top.command",
    ),
    "keys": Command("make the keys that links between hosts need", "headway.commands.keys"),
    "completion": Command("print what bash, zsh or fish need to complete these commands", "headway.completion"),
    "version": Command("print the version", "headway.commands.version"),
}
ALIASES = {"keygen": "keys"}

quiet_start.end()

if __name__ == "__main__":
    sys.exit(main())
