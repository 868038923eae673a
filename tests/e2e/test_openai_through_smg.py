"""OpenAI's own client, through the real smg, to a gateway: what most people will see of Headway."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs the openai client (extra dev)")
pytest.importorskip("smg", reason="needs smg (extra smg)")
pytest.importorskip("smg_grpc_proto", reason="needs the stubs of VllmEngine (extra smg)")

import jsonschema
import openai
import psutil

import headway
from e2e.running_server import command, wait_until
from e2e.test_gateway_serving import served, spelling
from headway.client import Client
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.backends.torch_backend import TorchBackend
from headway_process.free_ports import free_ports
from headway_proto.ingress import REJECT_OVERLOADED, REJECT_UNAVAILABLE, Rejected
from headway_scheduler.core.state.limits import SchedulerLimits
from smg_process import smg_before
from threaded_headway import RunningHeadway, running

DEMO = Path(headway.__file__).parent / "demo_model"
MODEL = "demo_model"
NUM_BLOCKS = 256
CHAT = [{"role": "user", "content": "What is a list?"}]
PROMPT = "A dictionary is"
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHeadway]:
    config = BackendConfig(model=str(DEMO), block_size=16, num_kv_blocks=NUM_BLOCKS, max_num_seqs=8)
    directory = tmp_path_factory.mktemp("s")
    with running(directory, DEMO, TorchBackend(), config, SchedulerLimits()) as headway_server:
        yield headway_server


@pytest.fixture(scope="module")
def native(server: RunningHeadway) -> Iterator[Client]:
    with Client(server.address) as connected:
        connected.wait_ready()
        yield connected


@pytest.fixture(scope="module")
def client(
    server: RunningHeadway, native: Client, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[openai.OpenAI]":
    with smg_before(server.address, log=tmp_path_factory.mktemp("smg") / "log") as url:
        yield from connected_to(url)


def connected_to(url: str) -> "Iterator[openai.OpenAI]":
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=30.0) as connected:
        yield connected


def test_the_model_is_listed(client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_chat_streams_and_comes_whole_as_headway_itself_has_it(client, native: Client) -> None:
    whole = client.chat.completions.create(messages=CHAT, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=CHAT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    expected = native.generate(CHAT, max_tokens=24, temperature=0.0).result()
    assert whole.choices[0].message.content == expected.text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    for usage in (whole.usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (expected.prompt_tokens, 24)


def test_a_completion_streams_and_comes_whole_as_headway_itself_has_it(client, native: Client) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    chunks = list(
        client.completions.create(prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    expected = native.generate(PROMPT, max_tokens=24, temperature=0.0).result()
    assert whole.choices[0].text == expected.text
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 24


def test_a_text_becomes_the_vector_that_headway_itself_makes(client, native: Client) -> None:
    answer = client.embeddings.create(model=MODEL, input=PROMPT, encoding_format="float")
    (expected,) = native.embed([PROMPT]).embeddings
    assert answer.data[0].embedding == pytest.approx(list(expected.values), abs=1e-6)
    assert answer.usage.prompt_tokens == expected.prompt_tokens


def test_n_choices_come_from_a_seed(client, native: Client) -> None:
    asked = {"messages": CHAT, "model": MODEL, "max_tokens": 16, "n": 3, "seed": 5}
    first, again = (client.chat.completions.create(**asked) for _ in range(2))
    expected = native.generate(CHAT, max_tokens=16, n=3, seed=5).result()
    told = [[choice.message.content for choice in answer.choices] for answer in (first, again)]
    assert told == [[completion.text for completion in expected.completions]] * 2
    assert len(set(told[0])) == 3
    assert first.usage.completion_tokens == sum(len(completion.token_ids) for completion in expected.completions)
    streamed = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == told[0]


def test_a_stop_string_ends_the_text_before_it(client) -> None:
    text = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = text[10:14]
    stopped = client.completions.create(prompt=PROMPT, stop=[stop], **GREEDY).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    chunks = list(client.completions.create(prompt=PROMPT, stop=stop, stream=True, **GREEDY))
    assert "".join(chunk.choices[0].text for chunk in chunks) == stopped.text


def test_an_echo_is_the_prompt_before_the_output(client) -> None:
    text = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    assert client.completions.create(prompt=PROMPT, echo=True, **GREEDY).choices[0].text == PROMPT + text
    chunks = client.completions.create(prompt=PROMPT, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + text


def test_log_probabilities_are_headways(client, native: Client) -> None:
    answer = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    expected = native.generate(CHAT, max_tokens=24, temperature=0.0, logprobs=3).result().completions[0].logprobs
    assert [entry.logprob for entry in entries] == pytest.approx([one.logprob for one in expected], abs=1e-5)
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 24
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content


def test_sampling_parameters_reach_the_sampler(client, native: Client) -> None:
    more = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2}
    asked = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 1.0, "presence_penalty": 0.5, "seed": 9}
    text = (
        client.completions.create(prompt=PROMPT, model=MODEL, max_tokens=24, extra_body=more, **asked).choices[0].text
    )
    assert text == native.generate(PROMPT, max_tokens=24, **asked, **more).result().text


def test_a_client_that_leaves_frees_its_blocks(client, server: RunningHeadway) -> None:
    asked = {"prompt": PROMPT, "model": MODEL, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(stream=True, **asked)
    for _, _ in zip(range(3), stream, strict=False):
        assert server.engine.num_unfinished == 1
    stream.close()
    wait_until(lambda: server.engine.num_unfinished == 0, 10.0, "the end of the request")
    assert server.core_when_quiet().pool.num_free == NUM_BLOCKS


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        ({"max_tokens": 5000}, 400, r"sampling_params.max_tokens: 5000 is not allowed; allowed: at most \d+"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}},
                }
            },
            400,
            r'sampling_params.json_schema: Unimplemented keys: \["uniqueItems"\]',
        ),
        ({"extra_body": {"regex": "(a"}}, 400, "sampling_params.regex: .*unclosed group"),
        ({"extra_body": {"stop_token_ids": [99999]}}, 400, "sampling_params.stop_token_ids: 99999 is not allowed"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 3}, 400, "min_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 2000}]}, 400, "maximum context length is 1024 tokens"),
        ({"messages": []}, 400, "messages"),
        ({"temperature": 9}, 400, "temperature"),
        ({"n": 99}, 400, "n: "),
        ({"stop": list("abcde")}, 400, "stop"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
        ({"model": "another"}, 404, "No worker available for model 'another'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_bad_request_is_an_error_of_its_class(client, wrong: dict, status: int, message: str) -> None:
    with pytest.raises(openai.APIStatusError, match=message) as caught:
        client.chat.completions.create(**{"messages": CHAT, "model": MODEL, "max_tokens": 4} | wrong)
    assert caught.value.status_code == status
    assert type(caught.value) is {400: openai.BadRequestError, 404: openai.NotFoundError}[status]


def test_a_vector_of_a_text_has_length_one(client) -> None:
    (one,) = client.embeddings.create(input="abc", model=MODEL).data
    assert sum(value * value for value in one.embedding) == pytest.approx(1.0, abs=1e-4)


def test_anthropics_api_is_served_by_the_same_way(client) -> None:
    body = GREEDY | {"max_tokens": 8, "messages": CHAT}
    answer = client.post("/messages", cast_to=dict, body=body)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] == 8
    assert answer["content"][0]["text"]


CALL = {"name": "get_weather", "parameters": {"city": "Paris"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "y": {"enum": ["up", "down"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SAMPLED = {"model": MODEL, "messages": CHAT, "max_tokens": 200, "temperature": 1.0}


def test_json_is_what_the_schema_says(client) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    for seed in range(4):
        choice = client.chat.completions.create(response_format=asked, seed=seed, **SAMPLED).choices[0]
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), POINT)
    chunks = client.chat.completions.create(response_format=asked, seed=3, stream=True, **SAMPLED)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == choice.message.content


def test_a_json_object_is_one_as_far_as_it_goes(client) -> None:
    """A small model may write strings without end; what it has written by then begins an object."""
    asked = {"response_format": {"type": "json_object"}}
    for seed in range(4):
        choice = client.chat.completions.create(seed=seed, **SAMPLED, **asked).choices[0]
        assert choice.message.content.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)


def test_a_tool_call_that_is_required_comes(client) -> None:
    weather = {"type": "string", "maxLength": 8}
    tools = [
        ADD,
        {
            "type": "function",
            "function": {
                "name": "get_weather",
                "parameters": ADD["function"]["parameters"] | {"properties": {"city": weather}, "required": ["city"]},
            },
        },
    ]
    checks = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    named = {"type": "function", "function": {"name": "add"}}
    for choice, seed in (("required", 1), ("required", 2), (named, 3)):
        answer = client.chat.completions.create(tools=tools, tool_choice=choice, seed=seed, **SAMPLED).choices[0]
        assert answer.message.tool_calls
        for call in answer.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), checks[call.function.name])
    assert call.function.name == "add"


def test_texts_of_a_regular_expression_and_of_a_grammar(client) -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 50, "temperature": 1.0, "seed": 1}
    text = client.completions.create(extra_body={"regex": "[ab]{4}"}, **asked).choices[0].text
    assert re.fullmatch("[ab]{4}", text)
    grammar = 'root ::= "yes" | "no" rest\nrest ::= "!"'
    assert client.completions.create(extra_body={"ebnf": grammar}, **asked).choices[0].text in {"yes", "no!"}


async def test_a_tool_call_is_parsed_and_the_engines_refusals_are_told(tmp_path: Path) -> None:
    """The model's words are given here, as a model that calls tools would say them."""
    next_token, num_tokens = spelling(json.dumps(CALL))
    flags = ("--tool-call-parser", "json", "--disable-retries")
    async with contextlib.AsyncExitStack() as stack:
        on, scheduler = await stack.enter_async_context(served(next_token=next_token))
        smg = smg_before(on.address, log=tmp_path / "log", flags=flags)
        url = await asyncio.to_thread(stack.enter_context, smg)  # The gateway that it asks runs in this loop.
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        await stack.enter_async_context(client)
        asked = {"model": "fake", "messages": CHAT, "tools": TOOLS, "max_tokens": num_tokens}

        answer = await client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert answer.choices[0].finish_reason == "tool_calls"

        name, arguments = "", ""
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            for part in chunk.choices[0].delta.tool_calls or ():
                name += part.function.name or ""
                arguments += part.function.arguments or ""
        assert (name, json.loads(arguments)) == ("get_weather", {"city": "Paris"})

        scheduler.reject = lambda _: Rejected(handle=0, reason=REJECT_OVERLOADED, message="full")
        with pytest.raises(openai.RateLimitError, match="full"):
            await client.chat.completions.create(**asked)
        scheduler.reject = lambda _: Rejected(handle=0, reason=REJECT_UNAVAILABLE, message="gone")
        with pytest.raises(openai.InternalServerError, match="gone") as caught:
            await client.chat.completions.create(**asked)
        assert caught.value.status_code == 503


def test_serve_starts_smg_tells_where_and_ends_it() -> None:
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    flags = ("--backend", "simulated", "--grpc-address", "127.0.0.1:0", "--log-level", "warning")
    with command("serve", *flags, "--openai-address", address) as serving:
        serving.wait_for_ready()
        told = f"headway serve: OpenAI API on http://{address}/v1\n"
        wait_until(lambda: told in serving.err or serving.process.poll() is not None, 60.0, "smg")
        for client in connected_to(f"http://{address}/v1"):
            assert client.completions.create(prompt=PROMPT, **GREEDY | {"model": "demo"}).usage.completion_tokens == 24
        processes = psutil.Process(serving.process.pid).children(recursive=True)
        assert len(processes) >= 4
        assert serving.stop() == 0
        assert "headway serve: stopping: smg, then gateway, then scheduler, then executor\n" in serving.err
        assert not any(process.is_running() for process in processes)


def test_smg_learns_from_kv_events_who_has_a_prompt_cached(tmp_path: Path) -> None:
    """Each prompt is warmed behind smg's back on one of two replicas; only their events can tell it which."""
    config = BackendConfig(model=str(DEMO), block_size=16, num_kv_blocks=256, options={"real_time": "false"})
    with contextlib.ExitStack() as stack:
        replicas = []
        for name in ("a", "b"):
            directory = tmp_path / name
            directory.mkdir(mode=0o700)
            started = running(directory, DEMO, SimulatedBackend(), config, SchedulerLimits(), kv_events=True)
            replicas.append(stack.enter_context(started))
        natives = [stack.enter_context(Client(replica.address)) for replica in replicas]
        for one in natives:
            one.wait_ready()
        workers = ("--worker-urls", *(f"grpc://{replica.address}" for replica in replicas))
        flags = (*workers, "--policy", "cache_aware", "--log-level", "info")
        log = tmp_path / "log"
        url = stack.enter_context(smg_before(replicas[0].address, log=log, flags=flags))
        client = stack.enter_context(openai.OpenAI(base_url=url, api_key="none"))
        wait_until(lambda: log.read_text().count("KV event stream connected") == 2, 20.0, "both event streams")

        def num_routed_right(pause_s: float) -> int:
            prompts = [f"{number}, {pause_s}: " + "a prompt that fills blocks, " * 20 for number in range(8)]
            for number, prompt in enumerate(prompts):
                natives[number % 2].generate(prompt, max_tokens=1).result()
            time.sleep(pause_s)
            answers = [client.completions.create(prompt=prompt, model=MODEL, max_tokens=1) for prompt in prompts]
            return sum(answer.usage.prompt_tokens_details.cached_tokens >= 96 for answer in answers)

        # How long the news takes on its way is smg's affair; without any, half of them would be right.
        assert any(num_routed_right(pause_s) == 8 for pause_s in (0.5, 2.0, 8.0))
