"""Encoders of the BERT family: their vectors are those of transformers, and what is not theirs is refused."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel, XLMRobertaConfig, XLMRobertaModel

from headway.client import AsyncClient, HeadwayError
from headway_executor.backend import BackendConfig, BackendConfigError, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_proto import generation_pb2 as api
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

VOCAB_SIZE = 64
CONTEXT = 48
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
MAKERS = {
    "bert": lambda: BertModel(BertConfig(**SIZES, max_position_embeddings=CONTEXT), add_pooling_layer=True),
    "roberta": lambda: RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=CONTEXT + 2, pad_token_id=1)),
    "xlm-roberta": lambda: XLMRobertaModel(
        XLMRobertaConfig(**SIZES, max_position_embeddings=CONTEXT + 2, pad_token_id=1, type_vocab_size=1),
        add_pooling_layer=False,
    ),
}


def make(directory: Path, name: str, *poolings: str) -> torch.nn.Module:
    torch.manual_seed(3)
    model = MAKERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    words = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{number}": number for number in range(4, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_padding(length=32)  # as files of sentence-transformers have it
    tokenizer.enable_truncation(4)
    tokenizer.save(str(directory / "tokenizer.json"))
    for pooling in poolings:
        modules = [{"type": "a.Transformer"}, {"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Normalize"}]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return model


def config_of(directory: Path, **changes: object) -> BackendConfig:
    return BackendConfig(**{"model": str(directory), "block_size": 4, "max_num_seqs": 8} | changes)


def expected(model: torch.nn.Module, token_ids: list[int], pooling: str) -> np.ndarray:
    with torch.no_grad():
        # All tokens count, as they do here: ids of padding among them too.
        mask = torch.ones(1, len(token_ids), dtype=torch.long)
        states = model(torch.tensor([token_ids]), attention_mask=mask).last_hidden_state[0].double()
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling].numpy()
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("name", MAKERS)
async def test_vectors_equal_those_of_transformers_over_grpc(tmp_path: Path, name: str) -> None:
    """Inputs of all lengths up to the whole context, in chunks of a few tokens, under a pool of two of them."""
    model = make(tmp_path / "model", name)
    rng = np.random.default_rng(1)
    inputs = [rng.integers(0, VOCAB_SIZE, size=size).tolist() for size in (1, 2, 7, 20, 33, CONTEXT)]
    backend_config = config_of(tmp_path / "model", num_kv_blocks=26)
    limits = SchedulerLimits(max_num_batched_tokens=8, reserve="none")
    with running(tmp_path, tmp_path / "model", TorchBackend(), backend_config, limits) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            for pooling in ("last", "mean", "cls"):
                response = await client.embed(inputs, pooling=pooling)
                for token_ids, embedding in zip(inputs, response.embeddings, strict=True):
                    assert list(embedding.values) == pytest.approx(expected(model, token_ids, pooling), abs=1e-5)
            (text,) = (await client.embed(["w7 w8 w9 w10"])).embeddings
            assert list(text.values) == pytest.approx(expected(model, [2, 7, 8, 9, 10, 3], "mean"), abs=1e-5)
            with pytest.raises(HeadwayError, match=f"has {CONTEXT + 1} tokens; allowed: at most {CONTEXT}"):
                await client.embed([[5] * (CONTEXT + 1)])
            for refused in (client.generate([5]).result(), client.score([5], [[6]])):
                with pytest.raises(HeadwayError, match="the model model makes vectors and no text; allowed: Embed"):
                    await refused
            described = await client.model()
            assert (described.is_encoder, described.embedding_size) == (True, 32)
        assert server.core_when_quiet().pool.num_free == 26


@pytest.mark.parametrize(("pooling", "number"), [("cls_token", api.POOLING_CLS), ("mean_tokens", api.POOLING_MEAN)])
def test_the_checkpoint_chooses_the_pooling(tmp_path: Path, pooling: str, number: int) -> None:
    make(tmp_path, "bert", pooling)
    backend = TorchBackend()
    info = backend.open(config_of(tmp_path))
    backend.close()
    assert (info.default_pooling, info.max_model_len, info.generates) == (number, CONTEXT + 1, False)


def change(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; allowed: 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not supported"),
        ({"is_decoder": True}, "is_decoder True is not supported; allowed: False"),
        ({"is_causal": True}, "is_causal True is not supported; allowed: False"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map .* is not supported; allowed: absent"),
        ({"num_attention_heads": 5}, "num_attention_heads 5 is not supported; allowed: a divisor of hidden_size 32"),
        (
            {"vocab_size": 65},
            r"embeddings.word_embeddings.weight has shape \[64, 32\]; config.json asks for \[65, 32\]",
        ),
        ({"num_hidden_layers": 1}, "tensor encoder.layer.1.* does not belong to this model"),
        ({"architectures": ["BertForMaskedLM"]}, "architectures .* is not supported; allowed: one of"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    make(tmp_path, "bert")
    change(tmp_path, **fields)
    with pytest.raises(ModelFilesError, match=words):
        TorchBackend().open(config_of(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": "int8"}, "quantization 'int8' is not allowed for an encoder; allowed: none"),
        ({"speculation": "ngram"}, "speculation 'ngram' is not allowed for an encoder; allowed: off"),
        ({"options": {"kernels": "compiled"}}, "kernels 'compiled' is not allowed for an encoder"),
        (
            {"options": {"activations": "int8"}},
            "activations 'int8' is not allowed for an encoder; allowed: auto, exact",
        ),
        (
            {"options": {"activations": "bfloat16"}},
            "activations 'bfloat16' is not allowed for an encoder; allowed: auto, exact",
        ),
        ({"max_model_len": CONTEXT + 1}, f"max_model_len {CONTEXT + 1} is not allowed; allowed: 1 to"),
        ({"num_kv_blocks": 3}, "num_kv_blocks 3 is not allowed"),
        ({"dtype": "int4"}, "dtype 'int4' is not allowed"),
    ],
)
def test_a_setting_that_is_not_an_encoders_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    make(tmp_path, "bert")
    with pytest.raises(BackendConfigError, match=words):
        TorchBackend().open(config_of(tmp_path, **changes))
