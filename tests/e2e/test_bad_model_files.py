"""Model files that cannot be served: the command ends with code 3 and one line."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import headway
from e2e.running_server import finished

DEMO = Path(headway.__file__).parent / "demo_model"


def change_config(model: Path, **fields: object) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))


def truncate_weights(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])


def wide_end(model: Path) -> None:
    (model / "generation_config.json").unlink()
    change_config(model, eos_token_id=99999)


def directory_for_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()


def only_pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def config_of_odd_types(model: Path) -> None:
    change_config(model, rope_scaling={"type": []})


def remote_code(model: Path) -> None:
    change_config(model, auto_map={"AutoModel": "modeling.Model"})


def no_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def narrow_logits(model: Path) -> None:
    change_config(model, vocab_size=100)


DEFECTS: list[tuple[str, Callable[[Path], None], str]] = [
    ("executor", lambda model: (model / "config.json").unlink(), "config.json: No such file"),
    ("executor", lambda model: (model / "config.json").write_text("{"), "not valid JSON"),
    ("executor", config_of_odd_types, "type [] is not supported; allowed: default, linear"),
    ("executor", remote_code, "auto_map asks for code from the checkpoint, which is never run"),
    ("executor", truncate_weights, "damaged or not a safetensors file"),
    ("executor", only_pickle, "pytorch_model.bin is a pickle checkpoint, which is never loaded"),
    ("gateway", no_tokenizer, "tokenizer.json: cannot be read"),
    ("gateway", narrow_logits, "token ids; allowed: at most 100, the logits in config.json"),
    ("executor", wide_end, "config.json: eos_token_id 99999 is not below"),
    ("executor", directory_for_weights, "model.safetensors: is a directory; allowed: a file"),
]


@pytest.mark.parametrize(("service", "damage", "words"), DEFECTS, ids=[words[:40] for _, _, words in DEFECTS])
def test_code_3_and_one_line(tmp_path: Path, service: str, damage: Callable[[Path], None], words: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    damage(model)
    run = finished(service, "--model", str(model), "--log-level", "error")
    assert run.process.returncode == 3, "".join(run.err)
    (line,) = run.err
    assert line.startswith(f"headway {service}: ")
    assert words in line
