"""``python -m headway_conformance --backend NAME``: every scenario on an installed backend.

Owns: flags, table, exit code.

Exit code 0: everything passed or does not apply. 1: something failed. 2: it could not be checked.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from headway_conformance.failures import CannotCheck, ConformanceFailure
from headway_conformance.scenario import Scenario
from headway_conformance.sizes import SIZES
from headway_conformance.suite import SCENARIOS, STEP_TIMEOUT_S, check
from headway_executor.backend import BackendConfigError
from headway_executor.startup.registry import backend_names, create_backend

EXIT_PASSED = 0
EXIT_FAILED = 1
EXIT_CANNOT_CHECK = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    flags = parser.parse_args(arguments)
    chosen = _chosen(flags.scenario, parser)
    if flags.list:
        for scenario in chosen:
            _say(f"{scenario.name}\n    {scenario.proves}\n")
        return EXIT_PASSED
    if not flags.backend:
        parser.error(f"--backend is needed; installed: {', '.join(backend_names())}")
    try:
        create_backend(flags.backend)
        with tempfile.TemporaryDirectory(prefix="headway-conformance-") as directory:
            return _run(chosen, flags, Path(directory))
    except (BackendConfigError, CannotCheck) as error:
        sys.stderr.write(f"headway_conformance: {error}\n")
        return EXIT_CANNOT_CHECK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m headway_conformance", description="Check that an executor backend does what Headway expects."
    )
    parser.add_argument("--backend", help="name of an installed backend (entry point group headway.executor_backends)")
    parser.add_argument("--device", default="cpu", help="device to open it with (default: cpu)")
    parser.add_argument(
        "--dtype", default="float32", help="dtype to open it with (default: float32, the strictest check)"
    )
    parser.add_argument(
        "--backend-option", action="append", default=[], metavar="NAME=VALUE", help="one of its own options; repeatable"
    )
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="of models and scripts (default: small)")
    parser.add_argument(
        "--numerics",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether it computes a real model (default: unless it announces the dtype none)",
    )
    parser.add_argument("--tolerance", type=float, help="of a log probability (default: by the dtype it announces)")
    parser.add_argument(
        "--timeout", type=float, default=STEP_TIMEOUT_S, help=f"seconds for one step (default: {STEP_TIMEOUT_S:g})"
    )
    parser.add_argument("--scenario", action="append", default=[], metavar="NAME", help="only this one; repeatable")
    parser.add_argument("--list", action="store_true", help="list the scenarios with what they prove, and stop")
    return parser


def _chosen(names: Sequence[str], parser: argparse.ArgumentParser) -> tuple[Scenario, ...]:
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name in names:
        if name not in known:
            parser.error(f"--scenario {name!r:.64} is not allowed; --list names those that are")
    return tuple(known[name] for name in names) or SCENARIOS


def _options(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise CannotCheck(f"--backend-option {pair!r:.64} is not allowed; allowed: NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _run(chosen: Sequence[Scenario], flags: argparse.Namespace, directory: Path) -> int:
    options = _options(flags.backend_option)
    width = max(len(scenario.name) for scenario in chosen)
    failed = []
    began = time.perf_counter()
    for number, scenario in enumerate(chosen, start=1):
        _say(f"[{number:{len(str(len(chosen)))}}/{len(chosen)}] {scenario.name:{width}}  ")
        started, why = time.perf_counter(), ""
        try:
            outcome = check(
                scenario,
                lambda: create_backend(flags.backend),
                directory=directory,
                device=flags.device,
                dtype=flags.dtype,
                options=options,
                size=SIZES[flags.size],
                numerics=flags.numerics,
                tolerance=flags.tolerance,
                timeout_s=flags.timeout,
            ).value
        except ConformanceFailure as failure:
            outcome = "FAILED"
            why = f"    {str(failure).removeprefix(f'{scenario}: ')}\n"
            failed.append(scenario.name)
        _say(f"{outcome:14}  {time.perf_counter() - started:7.2f} s\n{why}")
    summary = f"{len(failed)} of {len(chosen)} failed: {', '.join(failed)}" if failed else f"all {len(chosen)} hold"
    _say(f"\n{flags.backend}: {summary} ({time.perf_counter() - began:.1f} s)\n")
    return EXIT_FAILED if failed else EXIT_PASSED


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
