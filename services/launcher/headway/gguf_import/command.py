"""``headway gguf``: make a checkpoint directory of a GGUF file.

Owns: the files that it writes. Must not know: how a GGUF file names what is in it.

Quantised weights keep their blocks, byte by byte.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headway.flags.settings import ConfigurationError
from headway.gguf_import.file import GgufFile
from headway.gguf_import.model import config_of, pooling_of, tensors_of
from headway.gguf_import.tokenizer import tokenizer_config_of, tokenizer_of

MOST_BYTES = 4 << 30
"""Of one file of tensors."""
_POOLING = "1_Pooling"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the GGUF file, which is not changed")
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new directory for the checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Write the directory. Raises ``ConfigurationError``: it exists, or the file cannot be served."""
    file, directory = GgufFile(arguments.file), arguments.directory
    config, tokenizer, fields = config_of(file), tokenizer_of(file), tokenizer_config_of(file)
    pooling = pooling_of(file)
    tensors = tensors_of(file)
    with _whole_or_not_at_all(directory) as made:
        _write_json(made / "config.json", config)
        _write_json(made / "tokenizer_config.json", fields)
        (made / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        if pooling is not None:
            _write_pooling(made, pooling)
        count = _write_tensors(made, tensors)
    sys.stdout.write(f"{directory}: {count} tensors of {arguments.file}\n")
    return 0


@contextmanager
def _whole_or_not_at_all(directory: Path) -> Iterator[Path]:
    """A place beside the new directory, which gets its name at the end; nothing stays of one that fails."""
    if directory.exists():
        raise ConfigurationError(f"{directory} exists; allowed: a new directory")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as beside:
            made = Path(beside) / "checkpoint"
            made.mkdir()
            yield made
            made.rename(directory)
    except OSError as error:
        raise ConfigurationError(f"{directory}: {error.strerror or error}") from None
    except SafetensorError as error:  # its name for a disk that is full, too
        raise ConfigurationError(f"{directory}: {error}") from None


def _write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """One file, or several with an index, so that no more than one of them is in memory. Return how many tensors."""
    places: dict[str, str] = {}
    for number, some in enumerate(_batches(tensors), 1):
        file = f"model-{number:05d}.safetensors"
        save_file(some, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(some, file)
    if len(set(places.values())) == 1:
        (directory / file).rename(directory / "model.safetensors")
    else:
        _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    return len(places)


def _batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if batch and num_bytes + tensor.nbytes > MOST_BYTES:
            yield batch
            batch, num_bytes = {}, 0
        batch[name] = tensor
        num_bytes += tensor.nbytes
    yield batch


def _write_pooling(directory: Path, mode: str) -> None:
    """As sentence-transformers keeps it."""
    names = {"Transformer": "", "Pooling": _POOLING}
    modules = [{"type": f"sentence_transformers.models.{name}", "path": path} for name, path in names.items()]
    (directory / _POOLING).mkdir()
    _write_json(directory / "modules.json", modules)
    _write_json(directory / _POOLING / "config.json", {"pooling_mode": mode})


def _write_json(path: Path, fields: object) -> None:
    path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
