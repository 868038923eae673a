"""Decoders that are stored without a head, as Qwen3-Embedding-8B is: they make vectors, and are refused where there are none."""

import itertools
import json
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from checkpoints import VOCAB_SIZE, make_model, tokenizer
from group_backend import GroupBackend
from headway.client import AsyncClient, HeadwayError
from headway_executor.backend import BackendConfig, BackendConfigError, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_executor.backends.torch_loading import checked
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.checkpoint.weights import Checkpoint
from headway_executor.models.model_settings import settings_of
from headway_scheduler.core.state.limits import SchedulerLimits
from lora_files import merge_adapter, write_adapter
from threaded_headway import running

PROMPTS = [np.random.default_rng(size).integers(3, VOCAB_SIZE, size=size).tolist() for size in (1, 9, 40)]
SIZES = {"block_size": 8, "max_num_seqs": 8, "num_kv_blocks": 64, "dtype": "float32"}


def make(directory: Path, *, architecture: str = "Qwen3ForCausalLM") -> PreTrainedModel:
    """transformers writes the decoder alone with bare names, under the name of its class."""
    model = make_model("qwen3").model
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    assert not config["tie_word_embeddings"]
    path.write_text(json.dumps(config | {"architectures": [architecture]}))
    return model


def expected(model: PreTrainedModel, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        last = model(torch.tensor([prompt])).last_hidden_state[0, -1].double().numpy()
    return last / np.linalg.norm(last)


@pytest.mark.parametrize(
    ("architecture", "kernels", "num_stages"),
    [*itertools.product(["Qwen3ForCausalLM", "Qwen3Model"], ["compiled", "eager"], [1]), ("Qwen3Model", "compiled", 2)],
)
async def test_it_embeds_over_grpc_and_generates_nothing(
    tmp_path: Path, architecture: str, kernels: str, num_stages: int
) -> None:
    model = make(tmp_path / "model", architecture=architecture)
    adapter = str(write_adapter(tmp_path / "adapter", model, seed=1, task_type="FEATURE_EXTRACTION"))
    config = BackendConfig(
        model=str(tmp_path / "model"), options={"kernels": kernels}, adapters={"a": adapter}, **SIZES
    )
    limits = SchedulerLimits(max_num_batched_tokens=16)
    backend = TorchBackend() if num_stages == 1 else GroupBackend(pipeline_parallel=num_stages)
    with running(tmp_path, tmp_path / "model", backend, config, limits) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            for name in ("", "a"):
                served = merge_adapter(Path(adapter), model) if name else model
                response = await client.embed(PROMPTS, adapter=name)
                for prompt, vector in zip(PROMPTS, response.embeddings, strict=True):
                    assert list(vector.values) == pytest.approx(expected(served, prompt), abs=1e-5)
            for refused in (client.generate([5]).result(), client.score([5], [[6]])):
                with pytest.raises(
                    HeadwayError, match="the model model makes vectors and no text; allowed: Embed"
                ) as no:
                    await refused
                assert no.value.code == grpc.StatusCode.FAILED_PRECONDITION
            described = await client.model()
            assert (described.is_encoder, described.max_model_len) == (True, model.config.max_position_embeddings)


@pytest.mark.parametrize("kernels", ["compiled", "eager"])
def test_its_embedding_is_loaded_once(tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path)
    names: list[str] = []
    read = Checkpoint.read

    def counted(checkpoint: Checkpoint, name: str, *parts: range | None) -> torch.Tensor:
        names.append(name)
        return read(checkpoint, name, *parts)

    monkeypatch.setattr(Checkpoint, "read", counted)
    TorchBackend().open(BackendConfig(model=str(tmp_path), options={"kernels": kernels}, **SIZES))
    assert names.count("embed_tokens.weight") == 1


@pytest.mark.parametrize("kernels", ["compiled", "eager"])
@pytest.mark.parametrize("family", ["phi", "modernbert_decoder", "modernbert_decoder-bias"])
def test_nothing_that_belongs_to_a_head_is_asked_for(tmp_path: Path, family: str, kernels: str) -> None:
    """A bias, and what stands before it."""
    make_model(family).model.save_pretrained(tmp_path)
    backend = TorchBackend()
    assert backend.open(BackendConfig(model=str(tmp_path), options={"kernels": kernels}, **SIZES)).embedding_size == 48
    backend.close()


def test_it_has_nothing_to_propose_for(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make(directory)
    config = BackendConfig(model=str(directory), speculation="ngram", **SIZES)
    message = "speculation 'ngram' is not allowed with a model without a head, which makes vectors"
    with Checkpoint(directory) as checkpoint, pytest.raises(BackendConfigError, match=message):
        checked(checkpoint, settings_of(config, torch.device("cpu")), config)


def test_a_whole_model_that_lacks_its_head_is_damaged(tmp_path: Path) -> None:
    """Its tensors have the names of a model for text."""
    make(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})
    with pytest.raises(ModelFilesError, match=r"tensor lm_head\.weight is missing"):
        TorchBackend().open(BackendConfig(model=str(tmp_path), **SIZES))


@pytest.mark.usefixtures("triton_interpreter")
def test_a_backend_without_vectors_refuses_it(tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(BackendConfigError, match="backend 'triton' is not allowed with a model without a head"):
        TritonBackend().open(BackendConfig(model=str(tmp_path), **SIZES))


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend])
def test_it_proposes_nothing_to_another_model(tmp_path: Path, backend: type[TorchBackend | TritonBackend]) -> None:
    make(tmp_path / "draft")
    model_directory = tmp_path / "model"
    make_model("qwen3").save_pretrained(model_directory)
    tokenizer().save_pretrained(model_directory)
    config = BackendConfig(
        model=str(model_directory), speculation="draft", draft_model=str(tmp_path / "draft"), **SIZES
    )
    with pytest.raises(BackendConfigError, match=r"draft_model '.*/draft' is not allowed with a model without a head"):
        backend().open(config)
