"""Reading safetensors: exactly the tensors a model needs, or one clear line."""

import json
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import make_checkpoint
from headway_executor.backend import BackendConfig, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.weights import Checkpoint

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
