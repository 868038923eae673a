"""OpenAI's API of the gateway itself, over a whole Headway with the demo model: the same tokens as over gRPC."""

import asyncio
import gzip
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

import headway
from e2e.running_server import eventually
from headway.client import AsyncClient
from headway_executor.backend import BackendConfig
from headway_executor.backends.torch_backend import TorchBackend
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import RunningHeadway, running

DEMO = Path(headway.__file__).parent / "demo_model"
CONFIG = BackendConfig(
    model=str(DEMO), dtype="float32", block_size=16, num_kv_blocks=256, max_num_seqs=16, num_threads=1
)
PROMPT = "A dictionary is"
CHAT = [{"role": "user", "content": "What does str.split do?"}]
MOST_BYTES = 100_000


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHeadway]:
    at = tmp_path_factory.mktemp("served")
    shows_tools = Path(shutil.copytree(DEMO, at / "demo_model"))
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    (shows_tools / "chat_template.jinja").write_text(config["chat_template"] + "{{ tools or '' }}")
    with running(
        at, shows_tools, TorchBackend(), CONFIG, SchedulerLimits(max_num_seqs=16),
        http_address="127.0.0.1:0", max_message_bytes=MOST_BYTES, slow_client_s=0.5,
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
async def native(served: RunningHeadway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served.address) as client:
        await client.wait_ready(20)
        yield client


@pytest.fixture
async def client(served: RunningHeadway, native: AsyncClient) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{served.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
async def http(served: RunningHeadway, native: AsyncClient) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{served.http_port}") as session:
        yield session


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 40}])
async def test_a_completion_is_that_of_grpc(client, native, sampling: dict) -> None:
    expected = await native.generate(PROMPT, max_tokens=24, **sampling).result()
    extra = {"top_k": sampling["top_k"]} if "top_k" in sampling else {}
    openais = {name: value for name, value in sampling.items() if name != "top_k"}
    request = {"model": "demo_model", "prompt": PROMPT, "max_tokens": 24, **openais, "extra_body": extra}
    whole = await client.completions.create(**request)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == expected.completions[0].finish_reason
    assert whole.usage.completion_tokens == len(expected.token_ids)
    chunks = [one async for one in await client.completions.create(**request, stream=True)]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected.text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)
    options = {"include_usage": True}
    *_, last = [one async for one in await client.completions.create(**request, stream=True, stream_options=options)]
    assert last.choices == []
    assert last.usage.total_tokens == whole.usage.total_tokens
    options |= {"continuous_usage_stats": True}
    chunks = [one async for one in await client.completions.create(**request, stream=True, stream_options=options)]
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == whole.usage.completion_tokens
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected.text


async def test_prompts_of_every_kind_and_several_outputs(client, native) -> None:
    ids = await native.tokenize(PROMPT)
    first, second = "A list is", PROMPT
    texts = []
    for prompt in (first, second):
        result = await native.generate(prompt, max_tokens=8, seed=3, n=2).result()
        texts += [output.text for output in result.completions]
    for prompts in ([first, second], [await native.tokenize(first), ids]):
        made = await client.completions.create(model="demo_model", prompt=prompts, max_tokens=8, seed=3, n=2)
        assert [choice.text for choice in made.choices] == texts
        assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    one = await client.completions.create(model="", prompt=ids, max_tokens=8, seed=3)
    assert one.choices[0].text == texts[2]
    assert one.model == "demo_model"
    stream = await client.completions.create(
        model="demo_model", prompt=[first, second], max_tokens=8, seed=3, n=2, stream=True, echo=True
    )
    streamed = [""] * 4
    async for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [first + texts[0], first + texts[1], second + texts[2], second + texts[3]]
    best = await client.completions.create(model="demo_model", prompt=ids, max_tokens=8, seed=3, n=1, best_of=4)
    of_grpc = await native.generate(PROMPT, max_tokens=8, seed=3, best_of=4).result()
    assert best.choices[0].text == of_grpc.text


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_prompt_as_lm_eval_asks_for_them(client, native, max_tokens: int, stream) -> None:
    ids = await native.tokenize("def read(path): return open(path)")
    told = await native.generate(ids, max_tokens=1, temperature=0.0, prompt_logprobs=1, logprobs=1).result()
    request = {"model": "demo_model", "prompt": [ids], "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    answer = await client.completions.create(**request, seed=1234, temperature=0, stream=stream)
    pieces = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    columns = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    values = [value for column in columns for value in column.token_logprobs]
    tops = [top for column in columns for top in column.top_logprobs]
    tokens = [token for column in columns for token in column.tokens]
    offsets = [offset for column in columns for offset in column.text_offset]
    text = "".join(piece.text for piece in pieces)
    assert len(values) == len(tops) == len(tokens) == len(offsets) == len(ids) + max_tokens
    assert values[0] is tops[0] is None
    assert values[1 : len(ids)] == pytest.approx([entry.logprob for entry in told.prompt.logprobs], abs=1e-5)
    assert text == "".join(tokens) == "def read(path): return open(path)" + told.text * max_tokens
    assert offsets == [len("".join(tokens[:place])) for place in range(len(tokens))]
    assert all(value <= max(top.values()) for value, top in zip(values[1:], tops[1:], strict=True))
    assert pieces[-1].finish_reason == "length"
    if not stream:
        assert answer.usage.completion_tokens == max_tokens
        assert answer.usage.prompt_tokens == len(ids)


async def test_prompt_logprobs_by_token_id(http, native) -> None:
    ids = await native.tokenize(PROMPT)
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 2}
    answer = await (await http.post("/v1/completions", json=body)).json()
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [str(token_id) in entry for token_id, entry in zip(ids[1:], others, strict=True)] == [True] * len(others)
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"echo": True, "logprobs": 1}])
async def test_a_completion_may_have_its_token_ids(http, native, stream: bool, more: dict) -> None:
    prompts = [await native.tokenize(text) for text in (PROMPT, "def f")]
    body = {"prompt": prompts, "max_tokens": 9, "n": 2, "seed": 5, "return_token_ids": True, "stream": stream} | more
    choices = await _choices(http, "/v1/completions", body)
    assert sorted(choices) == [0, 1, 2, 3]
    for index, found in choices.items():
        asked = await native.generate(prompts[index // 2], n=2, max_tokens=9, seed=5).result()
        assert found["prompt_token_ids"] == prompts[index // 2]
        assert found["token_ids"] == asked.completions[index % 2].token_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 3}])
async def test_a_chat_may_have_its_token_ids(http, native, stream: bool, more: dict) -> None:
    body = {"messages": CHAT, "max_tokens": 9, "seed": 5, "return_token_ids": True, "stream": stream} | more
    choices = await _choices(http, "/v1/chat/completions", body)
    prompt = (await (await http.post("/tokenize", json={"messages": CHAT})).json())["tokens"]
    expected = await native.generate(CHAT, n=len(choices), max_tokens=9, seed=5).result()
    for index, found in choices.items():
        assert found["prompt_token_ids"] == prompt
        assert found["token_ids"] == expected.completions[index].token_ids


async def _choices(http, path: str, body: dict) -> dict[int, dict]:
    """Of each choice its tokens and those of the prompt, which an answer or its first event may have once."""
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        if not body["stream"]:
            told = await answer.json()
            return {one["index"]: {"prompt_token_ids": told.get("prompt_token_ids"), **one} for one in told["choices"]}
        choices: dict[int, dict] = {}
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for one in event["choices"]:
                first = {"prompt_token_ids": event.get("prompt_token_ids"), **one}
                found = choices.setdefault(one["index"], first | {"token_ids": []})
                found["token_ids"] += one.get("token_ids", [])
        return choices


async def test_an_answer_goes_on_with_the_last_message(http, client, native) -> None:
    request = {"model": "demo_model", "max_tokens": 24, "temperature": 0}
    whole = (await client.chat.completions.create(**request, messages=CHAT)).choices[0].message.content
    asked = (await (await http.post("/tokenize", json={"messages": CHAT})).json())["tokens"]
    for begun in (whole[: len(whole) // 2].rpartition(" ")[0], ""):
        messages = [*CHAT, {"role": "assistant", "content": begun}]
        more = {"continue_final_message": True}
        prompt = (await (await http.post("/tokenize", json={"messages": messages} | more)).json())["tokens"]
        assert prompt[: len(asked)] == asked
        assert prompt[len(asked) :] == await native.tokenize(begun)
        for setting in (more, more | {"add_generation_prompt": False}):
            rest = (await client.chat.completions.create(**request, messages=messages, extra_body=setting)).choices[0]
            assert (begun + rest.message.content)[: len(whole)] == whole[: len(begun + rest.message.content)]
            assert rest.message.content
    ended = (await (await http.post("/tokenize", json={"messages": CHAT, "add_generation_prompt": False})).json())[
        "tokens"
    ]
    assert asked[: len(ended)] == ended
    assert len(ended) < len(asked)
    with pytest.raises(openai.BadRequestError, match="true is not allowed together with add_generation_prompt") as no:
        await client.chat.completions.create(
            **request, messages=CHAT, extra_body={"continue_final_message": True, "add_generation_prompt": True}
        )
    assert no.value.param == "continue_final_message"
    refused = await http.post("/tokenize", json={"prompt": "x", "continue_final_message": True})
    assert (await refused.json())["error"]["param"] == "continue_final_message"


async def test_a_chat_is_that_of_grpc(client, native) -> None:
    expected = await native.generate(CHAT, max_tokens=24, temperature=0.0).result()
    request = {"model": "demo_model", "messages": CHAT, "max_completion_tokens": 24, "temperature": 0}
    whole = await client.chat.completions.create(**request, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == expected.text
    entries = whole.choices[0].logprobs.content
    assert len(entries) == len(expected.token_ids) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().startswith(expected.text)
    chunks = [one async for one in await client.chat.completions.create(**request, stream=True)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
    again = await client.chat.completions.create(**{**request, "messages": parts})
    assert again.choices[0].message.content == expected.text


async def test_a_response_is_that_of_grpc(client, native) -> None:
    expected = await native.generate(CHAT, max_tokens=24, temperature=0.0).result()
    request = {"model": "demo_model", "input": CHAT[0]["content"], "max_output_tokens": 24, "temperature": 0}
    whole = await client.responses.create(**request)
    assert whole.output_text == expected.text
    assert whole.usage.output_tokens == len(expected.token_ids)
    events = [one async for one in await client.responses.create(**request, stream=True)]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == expected.text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert events[-1].response.output_text == expected.text


async def test_as_many_vectors_as_of_openai_in_one_call(client, native) -> None:
    texts = [f"text {number}" for number in range(130)]
    made = await client.embeddings.create(model="demo_model", input=texts)
    assert [one.index for one in made.data] == list(range(130))
    of_grpc = await native.embed(texts[64:128])
    assert made.data[100].embedding == pytest.approx(list(of_grpc.embeddings[36].values), abs=1e-5)
    assert made.usage.prompt_tokens >= 2 * 130
    for wrong, told in (([*texts, ""], r"input\[130\]: "), (["x"] * 2049, "input: 2049 are .* 1 to 2048")):
        with pytest.raises(openai.BadRequestError, match=told):
            await client.embeddings.create(model="demo_model", input=wrong)


async def test_parts_of_characters_have_their_bytes_and_places(client) -> None:
    said, prompt = "日本🙂é end", "naïve “café”"
    only = {"model": "demo_model", "temperature": 0, "extra_body": {"choice": [said]}}
    made = await client.chat.completions.create(messages=CHAT, logprobs=True, max_tokens=40, **only)
    content = b"".join(bytes(entry.bytes) for entry in made.choices[0].logprobs.content)
    assert content.decode().startswith(said)
    for echo in (False, True):
        made = await client.completions.create(prompt=prompt, logprobs=0, echo=echo, max_tokens=40, **only)
        text, columns = made.choices[0].text, made.choices[0].logprobs
        assert text == prompt * echo + said
        wholes = [pair for pair in zip(columns.tokens, columns.text_offset, strict=True) if "\ufffd" not in pair[0]]
        assert [text[offset : offset + len(token)] for token, offset in wholes[:-1]] == [one for one, _ in wholes[:-1]]
        assert columns.text_offset == sorted(columns.text_offset)
        assert columns.text_offset[-1] == len(text), "the end has no text"


async def test_answers_are_input_of_the_next_turn(client) -> None:
    request = {"model": "demo_model", "max_output_tokens": 4, "temperature": 0}
    first = await client.responses.create(input=CHAT[0]["content"], **request)
    more = {"role": "user", "content": "More"}
    second = await client.responses.create(input=[*CHAT, *first.output, more], **request)
    said = [*CHAT, {"role": "assistant", "content": first.output_text}, more]
    chat = {"model": "demo_model", "messages": said, "max_tokens": 4, "temperature": 0}
    expected = (await client.chat.completions.create(**chat)).choices[0].message.content
    assert second.output_text == expected
    # As OpenAI's own messages have them.
    said[1] |= {"annotations": [], "refusal": None, "audio": None, "function_call": None, "tool_calls": None}
    assert (await client.chat.completions.create(**chat)).choices[0].message.content == expected
    said[1] |= {"annotations": ["x"]}
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].annotations: "):
        await client.chat.completions.create(**chat)


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
async def test_who_is_refused_while_it_sends_reads_why(served, native, path: str) -> None:
    """More than the sockets hold, and no look at the answer before all is sent."""

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", served.http_port), 10) as connection:
            connection.sendall(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 30000000\r\n\r\n" % path.encode())
            for _ in range(30):
                connection.sendall(b"x" * 1_000_000)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    answer = await asyncio.to_thread(ask)
    assert answer.startswith(b"HTTP/1.1 413" if path == "/v1/completions" else b"HTTP/1.1 404")
    assert b"connection: close" in answer
    assert answer.endswith(b"}}")


async def test_constraints(client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    made = await client.chat.completions.create(
        model="demo_model", messages=CHAT, response_format=form, max_tokens=40, seed=1
    )
    assert json.loads(made.choices[0].message.content)["a"] in {1, 2}
    chosen = await client.completions.create(
        model="demo_model", prompt=PROMPT, max_tokens=20, extra_body={"choice": ["yes", "no"]}
    )
    assert chosen.choices[0].text in {"yes", "no"}


async def test_constraints_in_the_words_of_other_servers(http) -> None:
    """Of vLLM, and of llama.cpp."""
    schema = {"enum": ["yes"]}
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</a>"}
    asked: dict[str, list[dict]] = {
        '"yes"': [
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"json": json.dumps(schema), "regex": None, "json_object": False}},
            {"response_format": {"type": "json_object", "schema": schema}},
        ],
        "yes": [
            {"structured_outputs": {"regex": "yes"}},
            {"structured_outputs": {"choice": ["yes"]}},
            {"structured_outputs": {"grammar": 'start: "yes"'}},
        ],
        '<a>"yes"</a>': [
            {"response_format": {"type": "structural_tag", "format": tag}},
            {"structured_outputs": {"structural_tag": {"format": tag}}},
            {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": tag})}},
        ],
    }
    for said, bodies in asked.items():
        for body in bodies:
            async with http.post("/v1/completions", json={"prompt": PROMPT} | body) as answer:
                assert (await answer.json())["choices"][0]["text"] == said, body
    body = {"messages": CHAT, "structured_outputs": {"json_object": True}, "max_tokens": 40, "logprobs": True}
    async with http.post("/v1/chat/completions", json=body) as answer:
        assert (await answer.json())["choices"][0]["message"]["content"].startswith("{")
    for wrong, field in (
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
        ({"structured_outputs": {"json": {"type": 1}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a"}, "regex": "a"}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"type": 1}}}, "response_format.schema"),
        # What is not followed is refused.
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "grammar"}}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": tag, "schema": schema}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "triggers": []}}, "response_format.triggers"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "format": {**tag, "content": {"type": "json_schema", "json_schema": {"type": 1}}}
                    }
                }
            },
            "structured_outputs.structural_tag",
        ),
        ({"response_format": {"type": "text", "schema": schema}}, "response_format.schema"),
        ({"response_format": {"type": "json_schema", "schema": schema}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": schema}}},
            "response_format.json_schema.schema",
        ),
    ):
        async with http.post("/v1/completions", json={"prompt": PROMPT} | wrong) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"]) == (400, field), error
    for form, field in (({"type": "text", "schema": schema}, "schema"), ({"type": "json_schema"}, "schema")):
        async with http.post("/v1/responses", json={"input": "x", "text": {"format": form}}) as answer:
            assert (await answer.json())["error"]["param"] == f"text.format.{field}"


UNIT = {"$defs": {"Unit": {"enum": ["C", "F"]}}, "properties": {"unit": {"$ref": "#/$defs/Unit"}}, "required": ["unit"]}
LOOK = {"name": "look", "parameters": {"type": "object", "additionalProperties": False, **UNIT}}
GO = {"name": "go", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": function} for function in (LOOK, GO)]


async def test_a_call_is_forced(client) -> None:
    """Whatever form the template teaches; the demo's teaches none."""
    request = {"model": "demo_model", "messages": CHAT, "tools": TOOLS, "max_tokens": 400, "seed": 1}
    with pytest.raises(openai.BadRequestError, match="has no form of calls that is known"):
        await client.chat.completions.create(**request)
    named = {"type": "function", "function": {"name": "look"}}
    for seed in range(3):
        forced = {**request, "seed": seed, "parallel_tool_calls": False, "tool_choice": ("required", named)[seed % 2]}
        choice = (await client.chat.completions.create(**forced)).choices[0]
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert arguments in ([{"unit": "C"}, {"unit": "F"}] if call.function.name == "look" else [{}])
        assert call.function.name in {"look", "look" if seed % 2 else "go"}
        chunks = [one.choices[0] async for one in await client.chat.completions.create(**forced, stream=True)]
        (streamed,) = [one for chunk in chunks for one in chunk.delta.tool_calls or ()]
        assert streamed.function.model_dump() == call.function.model_dump()
        assert not any(chunk.delta.content for chunk in chunks)
    cut = await client.chat.completions.create(**{**request, "max_tokens": 3}, tool_choice="required")
    assert (cut.choices[0].finish_reason, cut.choices[0].message.tool_calls) == ("length", None)
    wrong = [{"type": "function", "function": {"name": "x", "parameters": {"type": 1}}}]
    with pytest.raises(openai.BadRequestError) as refusal:
        await client.chat.completions.create(**{**request, "tools": wrong}, tool_choice="required")
    assert refusal.value.param == "tools"


async def test_models_tokens_and_vectors(client, native, http) -> None:
    assert [one.id async for one in await client.models.list()] == ["demo_model"]
    assert (await client.models.retrieve("demo_model")).id == "demo_model"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")
    ids = await native.tokenize(PROMPT)
    assert (await (await http.post("/tokenize", json={"prompt": PROMPT})).json())["tokens"] == ids
    assert await (await http.post("/detokenize", json={"tokens": ids})).json() == {"prompt": PROMPT}
    rendered = await (await http.post("/tokenize", json={"messages": CHAT})).json()
    assert rendered["count"] == len(rendered["tokens"]) > 5
    made = await client.embeddings.create(
        model="demo_model", input=[PROMPT, "x"], extra_body={"pooling": "mean"}
    )  # the client asks for base64
    plain = await client.embeddings.create(
        model="demo_model", input=[ids], encoding_format="float", extra_body={"pooling": "mean"}
    )
    assert made.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert made.usage.prompt_tokens == len(ids) + 1
    of_grpc = await native.embed([PROMPT], pooling="mean")
    assert plain.data[0].embedding == pytest.approx(list(of_grpc.embeddings[0].values), abs=1e-5)
    assert (await http.get("/health")).status == 200
    assert (await http.head("/health")).status == 200


BAD = {
    "not json": (b"{", "body"),
    "nothing": (b"", "body"),
    "no object": (b"[1]", "body"),
    "nesting": (b'{"prompt": "x", "metadata": ' + b"[" * 50_000, "body"),
    "nan": (b'{"prompt": "x", "temperature": NaN}', "body"),
    "lone surrogate": (b'{"prompt": "\\ud800 "}', "body"),
    "unknown field": ({"prompt": "x", "guided_jsn": 1}, "guided_jsn"),
    "unknown field inside": ({"prompt": "x", "stream_options": {"usage": True}}, "stream_options.usage"),
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "empty ids": ({"prompt": [[]]}, "prompt[0]"),
    "one of several prompts": ({"prompt": ["x", ""]}, "prompt[1]"),
    "one of several prompts that is too long": ({"prompt": ["x", "y", "z " * 45_000]}, "prompt[2]"),
    "an id of one of several prompts": ({"prompt": [[1], [2, -1]]}, "prompt[1][1]"),
    "mixed": ({"prompt": [1, "x"]}, "prompt"),
    "ids over the vocabulary": ({"prompt": [1, 2, 1 << 30]}, "prompt[2]"),
    "negative ids": ({"prompt": [-1]}, "prompt[0]"),
    "too many prompts": ({"prompt": ["x"] * 257}, "prompt"),
    "wrong type": ({"prompt": "x", "temperature": "hot"}, "temperature"),
    "infinite": (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    "huge float": ({"prompt": "x", "temperature": 1e300}, "temperature"),
    "negative temperature": ({"prompt": "x", "temperature": -1}, "temperature"),
    "top_p": ({"prompt": "x", "top_p": 1.5}, "top_p"),
    "top_k": ({"prompt": "x", "top_k": -2}, "top_k"),
    "no tokens": ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    "negative max_tokens": ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    "huge max_tokens": ({"prompt": "x", "max_tokens": 1 << 70}, "max_tokens"),
    "max_tokens over the context": ({"prompt": "x", "max_tokens": 100_000}, "max_tokens"),
    "min over max": ({"prompt": "x", "max_tokens": 1, "min_tokens": 2}, "min_tokens"),
    "n": ({"prompt": "x", "n": 0}, "n"),
    "many": ({"prompt": "x", "n": 1 << 31}, "n"),
    "logprobs": ({"prompt": "x", "logprobs": 21}, "logprobs"),
    "seed": ({"prompt": "x", "seed": 1 << 64}, "seed"),
    "many biases": ({"prompt": "x", "logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
    "two biases of a token": ({"prompt": "x", "logit_bias": {"5": 1, "05": 1}}, "logit_bias"),
    "bias of no token": ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias"),
    "bias over the vocabulary": ({"prompt": "x", "logit_bias": {"999999": 1}}, "logit_bias"),
    "stops": ({"prompt": "x", "stop": ["a"] * 5}, "stop"),
    "empty stop": ({"prompt": "x", "stop": ""}, "stop[0]"),
    "schema": ({"prompt": "x", "response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    "schema that is not UTF-8": (
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["\xff"]}}}}',
        "response_format.json_schema.schema",
    ),
    "wrong schema": (
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
        "response_format.json_schema.schema",
    ),
    "two constraints": ({"prompt": "x", "regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
    "store": ({"prompt": "x", "store": True}, "store"),
    "suffix": ({"prompt": "x", "suffix": "y"}, "suffix"),
    "priority": ({"prompt": "x", "priority": "urgent" * 500}, "priority"),
    "id": ({"prompt": "x", "request_id": "a\r\nb: c"}, "request_id"),
    "tenant": ({"prompt": "x", "tenant": "t" * 129}, "tenant"),
}
BAD_CHATS = {
    "no messages": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "top_logprobs alone": ({"messages": CHAT, "top_logprobs": 1}, "top_logprobs"),
    "top_logprobs": ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a tool's name": (
        {"messages": CHAT, "tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
    ),
    "two tools of one name": (
        {
            "messages": CHAT,
            "tools": [
                {"type": "function", "function": {"name": "a"}},
                {"type": "function", "function": {"name": "a", "description": "another"}},
            ],
        },
        "tools[1].function.name",
    ),
    "two limits": ({"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
}


async def test_bad_input_is_refused_with_the_fields_name(http, served) -> None:
    rows = [("/v1/completions", *row) for row in BAD.items()] + [
        ("/v1/chat/completions", *row) for row in BAD_CHATS.items()
    ]
    for path, name, (body, field) in rows:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        for stream in (b"", b'"stream": true, ') if content.startswith(b'{"') else (b"",):
            sent = content[:1] + stream + content[1:]
            async with http.post(path, data=sent) as answer:
                error = (await answer.json())["error"]
                assert (answer.status, error["param"]) == (400, field), (name, error)
                assert error["type"] == "invalid_request_error", name
                assert "\n" not in error["message"], name
                assert len(error["message"]) < 400, (name, error)
    assert served.core_when_quiet().num_unfinished == 0


async def test_other_refusals(http) -> None:
    for method, path, status in (("GET", "/v1/completions", 405), ("GET", "/", 404), ("POST", "/v1/models", 405)):
        async with http.request(method, path) as answer:
            assert answer.status == status
            assert answer.headers.get("allow") == {"/v1/completions": "POST", "/v1/models": "GET"}.get(path)
            assert (await answer.json())["error"]["message"]
    packed, coding = gzip.compress(b'{"prompt": "x"}'), {"content-encoding": "gzip"}
    async with http.post("/v1/completions", data=packed, headers=coding) as answer:
        assert answer.status == 415
        assert (await answer.json())["error"]["message"].startswith("header content-encoding: 'gzip' is not allowed; ")
    async with http.post("/v1/completions", json={"prompt": "x", "model": "gpt"}) as answer:
        assert answer.status == 404
        assert "'demo_model'" in (await answer.json())["error"]["message"]
    async with http.post("/v1/completions", data=b"x" * (MOST_BYTES + 1)) as answer:
        assert answer.status == 413
    async with http.post("/v1/completions", json={"prompt": "x"}, headers={"origin": "http://evil"}) as answer:
        assert answer.status == 403
    deadline = {"headway-timeout-ms": "30"}
    endless = {"prompt": "x", "max_tokens": 900, "ignore_eos": True}
    async with http.post("/v1/completions", json=endless, headers=deadline) as answer:
        assert answer.status == 504
    async with http.post("/v1/completions", json={"prompt": "x"}, headers={"headway-timeout-ms": "soon"}) as answer:
        assert answer.status == 400


async def test_a_stream_that_fails_ends_with_an_error_of_its_own_kind(http) -> None:
    endless, deadline = {"ignore_eos": True, "stream": True}, {"headway-timeout-ms": "400"}
    for path, body in (
        ("/v1/completions", {"prompt": "x", "max_tokens": 1000}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "x"}),
    ):
        async with http.post(path, json=body | endless, headers=deadline) as answer:
            assert answer.status == 200
            *events, last, rest = (await answer.text()).split("\n\n")
        told = json.loads(last.removeprefix("event: error\n").removeprefix("data: "))
        assert told["error"]["type"] == "timeout_error"
        assert not rest
        if path == "/v1/responses":
            assert last.startswith("event: error\n")
            assert (told["type"], told["sequence_number"]) == ("error", len(events))


async def test_a_word_of_no_list_is_refused_with_the_list(http) -> None:
    answers = []
    for wrong in ({"priority": "urgent"}, {"response_format": {"type": "yaml"}}):
        async with http.post("/v1/completions", json={"prompt": "x", **wrong}) as answer:
            answers.append((await answer.json())["error"]["message"])
    assert answers == [
        "priority: 'urgent' is not allowed; allowed: high, low, normal, realtime",
        "response_format.type: 'yaml' is not allowed; allowed: json_object, json_schema, structural_tag, text",
    ]


async def test_a_field_of_other_servers_is_refused_with_ours(http) -> None:
    completion, embedding = ("/v1/completions", {"prompt": "x"}), ("/v1/embeddings", {"input": "x"})
    for (path, body), name, ours in (
        (completion, "max_new_tokens", ", with max_tokens in its place"),
        (completion, "guided_json", ", with structured_outputs.json in its place"),
        (embedding, "max_new_tokens", ""),
        (completion, "nothing", ""),
    ):
        async with http.post(path, json={**body, name: 1}) as answer:
            told = (await answer.json())["error"]["message"]
        assert told == f"{name}: it is not known here; allowed: unset{ours}"


async def test_what_does_not_fit_is_told_in_the_words_that_clients_look_for(http) -> None:
    """By the code, or by these words of the message, they shorten their prompt and come again."""
    long, huge = "x " * 2000, "x" * 90_000
    for path, body, field in (
        ("/v1/completions", {"prompt": long}, "prompt"),
        ("/v1/completions", {"prompt": huge}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 1024}, "prompt"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 1024}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}, "messages"),
        ("/v1/responses", {"input": long}, "input"),
        ("/v1/embeddings", {"input": ["x", huge]}, "input[1]"),
        ("/v1/embeddings", {"input": huge}, "input"),
    ):
        async with http.post(path, json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
        assert "this model's maximum context length is 1024 here" in error["message"]


async def test_an_id_comes_back_and_is_one_live_requests(http, native) -> None:
    body = {"prompt": "x", "max_tokens": 500, "request_id": "mine", "ignore_eos": True, "stream": True}
    async with http.post("/v1/completions", json=body) as first:
        assert first.headers["x-request-id"] == "mine"
        async with http.post("/v1/completions", json={"prompt": "x", "request_id": "mine"}) as second:
            assert second.status == 409


async def chunked(port: int, *pieces: bytes, pause_s: float) -> bytes:
    """Send a body slowly; return the answer's first bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    for piece in pieces:
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await asyncio.sleep(pause_s)
    answer = await reader.read(4096)
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_slow_body_and_a_large_one_without_a_length(served, native) -> None:
    slow, large = await asyncio.gather(
        chunked(served.http_port, b'{"prompt":', pause_s=0.7),
        chunked(served.http_port, *[b"x" * 60_000] * 2, pause_s=0.0),
    )
    assert slow.startswith(b"HTTP/1.1 408")
    assert large.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in slow


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_frees_its_blocks(served, http, native, stream: bool) -> None:
    body = {"prompt": [PROMPT, "x"], "max_tokens": 900, "ignore_eos": True, "n": 2, "stream": stream}
    request = asyncio.create_task(http.post("/v1/completions", json=body))
    core = served.engine.fleet.cells[0].core
    await eventually(lambda: core.num_unfinished == 4)
    if stream:
        answer = await request
        await answer.content.readline()
        answer.close()
    else:
        request.cancel()
    await eventually(lambda: not core.num_unfinished, 2)
    core = served.core_when_quiet()
    assert core.pool.num_free == core.pool.num_blocks
