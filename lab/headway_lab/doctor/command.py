"""``headway doctor``: from flags to the report."""

import argparse
import sys
from pathlib import Path

import msgspec

from headway.flags.settings import ConfigurationError, ModelDirectoryError
from headway.planning.model_source import DEMO_MODEL, DEMO_MODEL_DIRECTORY
from headway_executor.models.config import ModelConfig
from headway_lab.doctor.examination import Model, examine, with_measurements
from headway_lab.doctor.rendering import text_of
from headway_lab.simulate.model_shapes import MODEL_SHAPES, ModelShape
from headway_proto.wording import shown

NOTHING_RUNS_EXIT_CODE = 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model",
        default=DEMO_MODEL,
        metavar="DIRECTORY",
        help="the model whose decode step is estimated: checkpoint directory, or demo for the model that ships with Headway "
        "(default: demo)",
    )
    model.add_argument(
        "--shape",
        metavar="NAME",
        help=f"the same for a model that is not on this host: {', '.join(sorted(MODEL_SHAPES))}",
    )
    parser.add_argument("--quick", action="store_true", help="measure nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """See ``Command``."""
    model = _model(arguments)
    findings = examine()
    if not arguments.quick:
        findings = with_measurements(findings, model, _say)
    if arguments.json:
        sys.stdout.write(f"{msgspec.json.format(msgspec.json.encode(findings)).decode()}\n")
    else:
        sys.stdout.write(text_of(findings))
    return 0 if findings.can_serve else NOTHING_RUNS_EXIT_CODE


def _say(what: str) -> None:
    sys.stderr.write(f"headway doctor: {what}\n")
    sys.stderr.flush()


def _model(arguments: argparse.Namespace) -> Model:
    if arguments.shape is not None:
        if arguments.shape not in MODEL_SHAPES:
            allowed = ", ".join(sorted(MODEL_SHAPES))
            raise ConfigurationError(f"--shape: {shown(arguments.shape)} is not allowed; allowed: {allowed}")
        return Model(shape=MODEL_SHAPES[arguments.shape])
    return _model_of(arguments.model)


def _model_of(directory: str) -> Model:
    from headway_executor.backend import ModelFilesError
    from headway_executor.models.families import read_model_config

    try:
        config = read_model_config(DEMO_MODEL_DIRECTORY if directory == DEMO_MODEL else Path(directory))
    except ModelFilesError as error:
        raise ModelDirectoryError(f"--model: {error}") from None
    shape = ModelShape(
        name=directory if directory == DEMO_MODEL else Path(directory).resolve().name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        # Of latent attention, half of what a head multiplies of a row as key and as value.
        head_dim=(config.attention.vector_dim + config.attention.summed_dim) // 2,
        vocab_size=config.vocab_size,
        context_length=config.context,
        kv_numbers=config.num_kv_numbers or None,
    )
    return Model(shape=_counted(shape, config), is_bfloat16=config.dtype == "bfloat16")


def _counted(shape: ModelShape, config: ModelConfig) -> ModelShape:
    """With the parameters of its layers; without torch they are left out, as all measurements are."""
    try:
        from headway_executor.models.parameter_counts import layer_parameters
    except ModuleNotFoundError:
        return shape
    counted = layer_parameters(config)
    return msgspec.structs.replace(
        shape,
        own_parameters=counted.of_all_tokens,
        expert_parameters=counted.of_experts,
        expert_share=counted.share,
    )
