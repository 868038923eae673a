"""``headway gguf``: make a checkpoint directory of a GGUF file.

Owns: the files that it writes. Must not know: how a GGUF file names what is in it.

Quantised weights keep their blocks, byte by byte.
"""

import argparse
import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from headway.gguf_import.file import GgufFile
from headway.gguf_import.model import config_of, tensors_of
from headway.gguf_import.tokenizer import tokenizer_config_of, tokenizer_of
from headway.settings import ConfigurationError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file, which is not changed")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new directory for the checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Write the directory. Raises ``ConfigurationError``: it exists, or the file cannot be served."""
    file, directory = GgufFile(arguments.file), arguments.directory
    config, tokenizer, fields = config_of(file), tokenizer_of(file), tokenizer_config_of(file)
    tensors = dict(tensors_of(file))
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise ConfigurationError(f"{directory} exists; allowed: a new directory") from None
    except OSError as error:
        raise ConfigurationError(f"{directory}: {error.strerror or error}") from None
    _write_json(directory / "config.json", config)
    _write_json(directory / "tokenizer_config.json", fields)
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    sys.stdout.write(f"{directory}: {len(tensors)} tensors of {arguments.file}\n")
    return 0


def _write_json(path: Path, fields: dict[str, object]) -> None:
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
