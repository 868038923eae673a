"""Reading safetensors: exactly the tensors a model needs, or one clear line."""

import errno
import json
import pickle
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import make_checkpoint
from headway_executor.backend import BackendConfig, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.families import read_model_config
from headway_executor.models.tensor_shapes import layers_as_stored
from model_core import demo_model

FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    single, sharded = tmp_path_factory.mktemp("single"), tmp_path_factory.mktemp("sharded")
    make_checkpoint(single, "llama3")
    make_checkpoint(sharded, "llama3", max_shard_size="40KB")
    return single, sharded


@pytest.fixture
def single(originals, tmp_path):
    return shutil.copytree(originals[0], tmp_path / "model")


@pytest.fixture
def sharded(originals, tmp_path):
    return shutil.copytree(originals[1], tmp_path / "model")


def open_model(directory):
    return TorchBackend().open(
        BackendConfig(model=str(directory), num_kv_blocks=16, block_size=16, max_num_seqs=2, num_threads=1)
    )


def refused(directory, match):
    with pytest.raises(ModelFilesError, match=match) as caught:
        open_model(directory)
    assert "\n" not in str(caught.value)


def rewrite(directory, change):
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE)


def edit_index(directory, change):
    index = json.loads((directory / INDEX).read_text())
    change(index)
    (directory / INDEX).write_text(json.dumps(index))


def write_raw(path, header, data):
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def test_shards_hold_the_same_tensors_as_one_file(originals):
    single, sharded = originals
    assert not (sharded / FILE).exists()
    with Checkpoint(single) as one, Checkpoint(sharded) as many:
        assert one.headers.keys() == many.headers.keys()
        for name in one.headers:
            assert torch.equal(one.read(name), many.read(name))


def test_fingerprint_is_stable_and_tells_models_apart(originals, single):
    def fingerprint(directory):
        with Checkpoint(directory) as checkpoint:
            return checkpoint.fingerprint()

    assert fingerprint(originals[0]) == fingerprint(single)
    assert open_model(single).model_fingerprint == fingerprint(single)
    assert fingerprint(originals[0]) != fingerprint(originals[1])
    rewrite(single, lambda tensors: tensors["model.norm.weight"].add_(1.0))
    assert fingerprint(originals[0]) != fingerprint(single)


def test_tolerates_what_old_checkpoints_carry(single):
    rewrite(single, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    assert open_model(single).vocab_size == 320


def test_refuses_a_truncated_file(single):
    content = (single / FILE).read_bytes()
    for length in (0, 4, 100, len(content) - 1):
        (single / FILE).write_bytes(content[:length])
        refused(single, "damaged")


def test_refuses_overlapping_tensors(single):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    write_raw(single / FILE, {"a": entry, "b": entry}, bytes(8))
    refused(single, "damaged")


def test_refuses_a_file_that_is_something_else(single):
    (single / FILE).write_bytes(b"PK\x03\x04" + bytes(100))
    refused(single, "damaged")


def test_refuses_missing_extra_misshapen_and_odd_tensors(single):
    intact = (single / FILE).read_bytes()
    for change, match in (
        (lambda t: t.pop(NORM), f"tensor {NORM} is missing"),
        (lambda t: t.update(extra=torch.ones(2)), "tensor extra does not belong"),
        (lambda t: t.update({NORM: torch.ones(47)}), r"has shape \[47\].*asks for \[48\]"),
        (lambda t: t.update({NORM: torch.ones(48, dtype=torch.int64)}), "dtype I64; allowed"),
        (lambda t: t.update({NORM: torch.ones(48, dtype=torch.float64)}), "dtype F64; allowed"),
    ):
        (single / FILE).write_bytes(intact)
        rewrite(single, change)
        refused(single, match)


def test_refuses_a_head_of_another_shape_than_the_embedding_it_is_tied_to(tmp_path):
    make_checkpoint(tmp_path, "llama-tied")
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(321, 48)}))
    refused(tmp_path, r"tensor lm_head.weight has shape \[321, 48\]; config.json asks for \[320, 48\]")
    rewrite(tmp_path, lambda t: [t.pop("lm_head.weight"), t.pop("model.embed_tokens.weight")])
    refused(tmp_path, "tensor model.embed_tokens.weight is missing")


def test_one_file_wins_over_an_index_as_in_transformers(originals, sharded):
    shutil.copy(originals[0] / FILE, sharded / FILE)
    rewrite(sharded, lambda tensors: tensors["model.norm.weight"].add_(1.0))
    theirs = AutoModelForCausalLM.from_pretrained(sharded)
    with Checkpoint(sharded) as checkpoint:
        assert torch.equal(checkpoint.read("model.norm.weight"), theirs.model.norm.weight)


@pytest.mark.parametrize("name", [FILE, INDEX, "config.json", "generation_config.json"])
def test_a_directory_in_the_place_of_a_file_is_called_one(single, name):
    if name == INDEX:
        (single / FILE).unlink()
    (single / name).unlink(missing_ok=True)
    (single / name).mkdir()
    refused(single, rf"{re.escape(name)}: [Ii]s a directory")


def test_a_file_that_cannot_be_opened_is_not_called_damaged(single, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelFilesError, match=r"model\.safetensors: Permission denied$"):
        Checkpoint(single)


def test_a_model_directory_that_cannot_be_looked_into_is_not_called_missing(single, monkeypatch):
    def refuse(path, *args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ModelFilesError, match=r"model: Permission denied$"):
        read_model_config(single)


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}'])
def test_of_two_tokenizer_files_the_one_that_cannot_be_read_is_named(single, tmp_path, content):
    draft = shutil.copytree(single, tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    if content is None:
        (draft / "tokenizer.json").symlink_to("/proc/self/mem")
    else:
        (draft / "tokenizer.json").write_text(content)
    config = BackendConfig(model=str(single), speculation="draft", draft_model=str(draft))
    with pytest.raises(ModelFilesError, match=rf"^{re.escape(str(draft / 'tokenizer.json'))}: "):
        TorchBackend().open(config)


def test_refuses_a_missing_shard(sharded):
    shard = min(sharded.glob("*.safetensors"))
    shard.unlink()
    refused(sharded, shard.name)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "a\\b.safetensors", "weights.bin", 7, None]
)
def test_refuses_shard_names_that_leave_the_directory(sharded, name):
    edit_index(sharded, lambda index: index["weight_map"].update({NORM: name}))
    refused(sharded, "is refused")


def test_refuses_an_index_that_disagrees_with_the_shards(sharded):
    intact = (sharded / INDEX).read_text()
    other = sorted({*json.loads(intact)["weight_map"].values()})
    for change, match in (
        (lambda index: index["weight_map"].update(ghost=other[0]), "ghost is not in"),
        (lambda index: index["weight_map"].pop(NORM), "is not listed"),
        (lambda index: index.update(weight_map=[]), "weight_map"),
        (lambda index: index["weight_map"].clear(), "weight_map"),
    ):
        (sharded / INDEX).write_text(intact)
        edit_index(sharded, change)
        refused(sharded, match)
    (sharded / INDEX).write_text("{")
    refused(sharded, "not valid JSON")


def test_never_unpickles(single):
    class Trap:
        def __reduce__(self):
            return pytest.fail, ("a checkpoint was unpickled",)

    (single / FILE).unlink()
    refused(single, "no model.safetensors")
    (single / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refused(single, r"pytorch_model\.bin is a pickle checkpoint, which is never loaded")


def test_reading_tells_how_many_mebibytes_of_a_ranks_share_it_has_read(tmp_path):
    tensors = {name: torch.zeros(1 << 18) for name in ("a", "b", "c", "d")}  # of 1 MiB each
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text("{}")
    for num_ranks in (1, 2):
        said = []
        with Checkpoint(tmp_path, lambda *words: said.append(words), num_ranks) as checkpoint:  # noqa: B023
            for name in tensors:
                whole = range(1 << 18)
                checkpoint.read(name, None if num_ranks == 1 else whole[: 1 << 17])
        share = 4 // num_ranks
        assert said == [("reading the weights, MiB", place * share // 4, share) for place in range(1, 5)]


def test_layers_are_loaded_in_the_order_in_which_files_hold_them(tmp_path):
    names = [f"model.layers.{index}.{part}.weight" for index in range(12) for part in ("mlp.down_proj", "norm")]
    save_file({name: torch.zeros(1) for name in ("lm_head.weight", *names, "model.norm.weight")}, tmp_path / FILE)
    (tmp_path / "config.json").write_text("{}")
    config = read_model_config(demo_model())
    with Checkpoint(tmp_path) as checkpoint:
        assert layers_as_stored(config, checkpoint.headers, range(1, 12)) == [1, 10, 11, *range(2, 10)]
