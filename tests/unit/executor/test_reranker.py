"""Rerankers of the BERT family: their scores are those of transformers, over gRPC and HTTP, and they do nothing else."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

from headway.client import AsyncClient, HeadwayError
from headway_executor.backend import BackendConfig, ModelFilesError
from headway_executor.backends.torch_backend import TorchBackend
from headway_proto import generation_pb2 as api
from headway_proto.pooling import POOL_SCORE
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
    "initializer_range": 0.3,
    "num_labels": 1,
}
MAKERS = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=CONTEXT)),
    "roberta": lambda: RobertaForSequenceClassification(
        RobertaConfig(**SIZES, max_position_embeddings=CONTEXT + 2, pad_token_id=1)
    ),
    "xlm-roberta": lambda: XLMRobertaForSequenceClassification(
        XLMRobertaConfig(**SIZES, max_position_embeddings=CONTEXT + 2, pad_token_id=1, type_vocab_size=1)
    ),
}
QUERY = "w9 w8 w7"
DOCUMENTS = ["w4", "w5 w6 w7 w8", " ".join(f"w{number}" for number in range(20, 60)), "w9 w8 w7", "w30 w31 " * 10]


def make(directory: Path, name: str) -> torch.nn.Module:
    torch.manual_seed(5)
    model = MAKERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory)
    words = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3} | {f"w{number}": number for number in range(4, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if name == "bert" else "[CLS] $A [SEP] [SEP] $B [SEP]"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair=pair, special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def config_of(directory: Path) -> BackendConfig:
    return BackendConfig(model=str(directory), block_size=4, max_num_seqs=8, num_kv_blocks=26)


def expected(directory: Path, model: torch.nn.Module, query: str, documents: Sequence[str]) -> list[float]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    with torch.no_grad():
        pairs = [tokenizer(query, one, return_tensors="pt", return_token_type_ids=True) for one in documents]
        return [torch.sigmoid(model(**pair).logits)[0, 0].item() for pair in pairs]


@pytest.mark.parametrize("name", MAKERS)
async def test_scores_equal_those_of_transformers_over_grpc_and_http(tmp_path: Path, name: str) -> None:
    """Pairs of all lengths, in chunks of a few tokens, under a pool of two of them."""
    directory = tmp_path / "model"
    model = make(directory, name)
    want = expected(directory, model, QUERY, DOCUMENTS)
    assert max(want) - min(want) > 0.1, "the scores do not differ"
    limits = SchedulerLimits(max_num_batched_tokens=8, reserve="none")
    served = running(tmp_path, directory, TorchBackend(), config_of(directory), limits, http_address="127.0.0.1:0")
    with served as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            response = await client.score(QUERY, DOCUMENTS)
            assert [one.relevance for one in response.scores] == pytest.approx(want, abs=1e-5)
            assert not any(one.tokens or one.logprob for one in response.scores)
            num_special = 3 if name == "bert" else 4
            num_tokens = sum(3 + len(one.split()) + num_special for one in DOCUMENTS)
            assert response.prompt_tokens == num_tokens
            described = await client.model()
            assert (described.is_encoder, described.is_reranker, described.embedding_size) == (True, True, 0)
            assert described.default_pooling == api.POOLING_UNSPECIFIED
            for refused, words in (
                (client.generate([5]).result(), "scores pairs and makes no text; allowed: Score"),
                (client.embed(["w5"]), "scores pairs and makes no vectors; allowed: Score"),
                (client.score([5], ["w5"]), "prompt: token_ids are not allowed for a reranker"),
                (client.score("w5", ["w6", [5]]), r"continuations\[1\]: token_ids are not allowed for a reranker"),
                (
                    client.score("w5", ["w6", "w7 " * CONTEXT]),
                    r"continuations\[1\].text: the prompt has \d+ tokens; allowed: at most",
                ),
            ):
                with pytest.raises(HeadwayError, match=words):
                    await refused
        assert server.core_when_quiet().pool.num_free == 26
        base = f"http://127.0.0.1:{server.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=20) as http:
            await check_http(http, want, num_tokens)


async def check_http(http: httpx2.AsyncClient, want: list[float], num_tokens: int) -> None:
    order = sorted(range(len(want)), key=lambda index: -want[index])
    body: dict[str, Any] = {"model": "model", "query": QUERY, "documents": DOCUMENTS}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = (await http.post(path, json=body)).json()
        assert [one["index"] for one in answer["results"]] == order
        assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(sorted(want)[::-1], abs=1e-5)
        assert "document" not in answer["results"][0]
        assert (answer["model"], answer["usage"]["total_tokens"]) == ("model", num_tokens)
    mixed = body | {"documents": [{"text": one} for one in DOCUMENTS] * 30, "top_n": 2, "return_documents": True}
    answer = (await http.post("/v1/rerank", json=mixed)).json()
    assert [one["index"] for one in answer["results"]] == [order[0], order[0] + len(want)], "of equals, the first"
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
    cut = body | {"max_tokens_per_doc": 4, "return_documents": True}
    answer = (await http.post("/v2/rerank", json=cut)).json()
    short = (
        await http.post("/v2/rerank", json=body | {"documents": [" ".join(one.split()[:4]) for one in DOCUMENTS]})
    ).json()
    assert [one["relevance_score"] for one in answer["results"]] == [one["relevance_score"] for one in short["results"]]
    assert answer["usage"] == short["usage"]
    assert {one["document"]["text"] for one in answer["results"]} == set(DOCUMENTS), "whole, as they were sent"
    for wrong, field, words in (
        ({"documents": []}, "documents", "0 are not allowed; allowed: 1 to 1024"),
        ({"top_n": 0}, "top_n", "0 is not allowed"),
        ({"query": ""}, "query.text", "it is empty"),
        ({"documents": ["w5"] * 70 + ["w7 " * CONTEXT]}, "documents[70].text", "tokens; allowed: at most"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc", "0 is not allowed"),
        ({"rank_fields": []}, "rank_fields", "it is not known here"),
    ):
        refused = await http.post("/v1/rerank", json=body | wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert words in refused.json()["error"]["message"]


async def test_a_query_with_the_separator_is_refused_where_it_would_end_the_query(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    model = make(directory, "bert")
    with running(tmp_path, directory, TorchBackend(), config_of(directory), SchedulerLimits()) as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            with pytest.raises(HeadwayError, match=r"continuations\[0\].text: it holds '\[SEP\]', which separates"):
                await client.score("w5 [SEP] w6", ["w7"])
            (score,) = (await client.score("w5", ["w7 [SEP] w8"])).scores
            assert score.relevance == pytest.approx(*expected(directory, model, "w5", ["w7 [SEP] w8"]), abs=1e-5)


async def test_other_models_order_no_documents(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make(directory, "bert")
    change(directory, architectures=["BertModel"])
    model = BertForSequenceClassification.from_pretrained(directory)
    model.bert.save_pretrained(directory)
    backend, limits = TorchBackend(), SchedulerLimits()
    with running(tmp_path, directory, backend, config_of(directory), limits, http_address="127.0.0.1:0") as server:
        async with AsyncClient(server.address) as client:
            await client.wait_ready(20)
            assert not (await client.model()).is_reranker
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=20) as http:
            refused = await http.post("/v1/rerank", json={"query": "w5", "documents": ["w6"]})
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == "the model model is no reranker, so it cannot order documents"


def change(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_bytes(msgspec.json.encode(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ["activation_fn", "sbert_ce_default_activation_function"])
@pytest.mark.parametrize("is_logistic", [True, False])
def test_the_checkpoint_chooses_what_is_made_of_the_number(tmp_path: Path, name: str, is_logistic: bool) -> None:
    make(tmp_path, "bert")
    value = "torch.nn.modules." + ("activation.Sigmoid" if is_logistic else "linear.Identity")
    change(tmp_path, **({"sentence_transformers": {name: value}} if name == "activation_fn" else {name: value}))
    backend = TorchBackend()
    info = backend.open(config_of(tmp_path))
    assert (info.embedding_size, info.default_pooling, info.generates) == (1, POOL_SCORE, False)
    head = backend._opened._encoder.head
    assert head.is_logistic == is_logistic
    backend.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"id2label": {"0": "no", "1": "yes"}},
            "id2label {'0': 'no', '1': 'yes'} is not supported; allowed: one label",
        ),
        ({"id2label": None}, "num_labels None is not supported; allowed: one label"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            "activation_fn 'torch.nn.Tanh' is not supported",
        ),
        ({"architectures": ["BertModel"]}, "tensor (bert|classifier).* does not belong|embeddings.* is missing"),
        ({"architectures": ["BertForTokenClassification"]}, "architectures .* is not supported; allowed: one of"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ],
)
def test_what_is_no_reranker_is_refused_by_name(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    make(tmp_path, "bert")
    change(tmp_path, **fields)
    with pytest.raises(ModelFilesError, match=words):
        TorchBackend().open(config_of(tmp_path))
