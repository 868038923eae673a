"""``headway plan``: from flags to the report. Must not know: costs, searching or layout."""

import argparse
import sys

from headway.flags.configuration import add_setting_flags, build, given_by_flags
from headway.flags.settings import settings_of
from headway.terminal.progress import ProgressLine
from headway_lab.output_files import check_output_files, check_pictures, write_output
from headway_lab.plan.deployment_file import as_deployment
from headway_lab.plan.goodput import Trial
from headway_lab.plan.options import PlanOptions
from headway_lab.plan.report import as_json, text, title
from headway_lab.plan.search import Plan, make_plan

NOT_ENOUGH_EXIT_CODE = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    add_setting_flags(parser, settings_of(PlanOptions).values(), title="load, objectives, devices and output")


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    options = build(PlanOptions, given_by_flags(arguments, settings_of(PlanOptions)), PlanOptions.validate)
    check_output_files({"--json": options.json, "--deployment": options.deployment, "--png": options.png})
    check_pictures("--png", options.png)
    plan = _searched(options)
    sys.stdout.write(text(plan))
    _write_outputs(plan)
    return 0 if plan.is_enough else NOT_ENOUGH_EXIT_CODE


def _searched(options: PlanOptions) -> Plan:
    progress = ProgressLine(sys.stderr)
    num_trials = 0

    def show(what: str, trial: Trial) -> None:
        nonlocal num_trials
        num_trials += 1
        progress.note(f"{num_trials} trials; {what}: {100 * trial.share:.0f}% at {trial.rate:.2f} requests/s")

    try:
        return make_plan(options, show)
    finally:
        progress.erase()


def _write_outputs(plan: Plan) -> None:
    if plan.options.json:
        document = as_json(plan)
        write_output("--json", plan.options.json, lambda path: path.write_bytes(document))
    if plan.options.deployment:
        toml = as_deployment(plan)
        write_output("--deployment", plan.options.deployment, lambda path: path.write_text(toml, "utf-8"))
    if plan.options.png:
        from headway_lab.plan.picture import draw

        write_output("--png", plan.options.png, lambda path: draw(path, title(plan), plan))
