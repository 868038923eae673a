"""The gateway's HTTP door between a fake scheduler and its callers: who may call, bounds, refusals, the end."""

import asyncio
import gc
import json
import shutil
import socket
import ssl
import struct
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import grpc
import openai
import pytest

from e2e.running_server import eventually, finished
from e2e.test_gateway_credentials import certificates, made_by_openssl, tokens  # noqa: F401  (fixtures)
from e2e.test_gateway_serving import DEMO, TEXT_MODEL, Stage, spelling, stage
from fake_scheduler import FakeScheduler
from headway_gateway.calls import servicer
from headway_gateway.config import GatewayConfig
from headway_gateway.openai import listener
from headway_gateway.openai.pieces import PieceMaker
from headway_gateway.openai.thinking import USUAL
from headway_gateway.requests.input_checks import CheckedInputs
from headway_gateway.text.tokenization import TextModel, load_text_model
from headway_proto import generation_pb2 as api
from headway_proto.columns import decode_column
from headway_proto.ingress import REJECT_OVERLOADED, Rejected

FOREVER = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}


@asynccontextmanager
async def door(text_model: TextModel = TEXT_MODEL, **config: object) -> AsyncIterator[tuple[Stage, FakeScheduler, str]]:
    async with stage(text_model, http_address="127.0.0.1:0", **config) as on, FakeScheduler(on.ingress) as scheduler:
        await eventually(lambda: on.server.client.serving)
        yield on, scheduler, f"http://127.0.0.1:{on.server.http_port}"


async def status_of(session: aiohttp.ClientSession, url: str, body: object = None, **options: object) -> int:
    method = "GET" if body is None else "POST"
    async with session.request(method, url, json=body, **options) as answer:
        await answer.read()
        return answer.status


def bearing(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_tokens_roles_and_tenants(tokens: Path) -> None:  # noqa: F811
    async with door(auth_token_file=str(tokens)) as (_, scheduler, url), aiohttp.ClientSession() as session:
        one = {"prompt": "x", "max_tokens": 1, "tenant": "red"}
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
            assert await status_of(session, url + path, one) == 401
        assert await status_of(session, f"{url}/v1/models") == await status_of(session, f"{url}/health") == 401
        for header in ("bobs", "Basic bobs", "bearer bobs", "Bearer ", "Bearer bob", "Bearer " + "x" * 5000):
            async with session.post(f"{url}/v1/completions", json=one, headers={"authorization": header}) as answer:
                assert answer.status == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                error = (await answer.json())["error"]
                assert error["type"] == "authentication_error"
                assert not any(secret in error["message"] for secret in ("bob", "xxx", str(tokens)))
        assert await status_of(session, f"{url}/v1/completions", one, headers=bearing("watchers")) == 403
        assert await status_of(session, f"{url}/health", headers=bearing("watchers")) == 200
        for token, tenant in (("bobs", "red"), ("alices", "blue")):
            assert await status_of(session, f"{url}/v1/completions", one, headers=bearing(token)) == 200
            assert scheduler.submits[-1].tenant == tenant
        # What a stranger sends is not read.
        assert await status_of(session, f"{url}/v1/completions", headers=bearing("bobs")) == 405
    async with door(auth_token_file=str(tokens), open_health=True) as (_, _, url), aiohttp.ClientSession() as session:
        assert await status_of(session, f"{url}/health") == 200


PAGE = "http://localhost:3000"


async def test_a_browser_is_told_which_pages_may_ask(tokens: Path) -> None:  # noqa: F811
    asked = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    config = {"allowed_origins": f"{PAGE},https://other.example", "auth_token_file": str(tokens)}
    async with door(**config) as (_, _, url), aiohttp.ClientSession() as session:
        async with session.options(f"{url}/v1/chat/completions", headers={"origin": PAGE, **asked}) as answer:
            told = {name.lower().removeprefix("access-control-"): value for name, value in answer.headers.items()}
            assert (answer.status, await answer.read()) == (204, b"")
        assert (told["allow-origin"], told["vary"], told["max-age"]) == (PAGE, "origin", "600")
        assert told["allow-methods"] == "GET, POST"
        assert told["allow-headers"] == asked["access-control-request-headers"]
        for stranger in ("http://localhost:3001", "null", "http://localhost:3000.evil"):
            async with session.options(f"{url}/v1/models", headers={"origin": stranger, **asked}) as answer:
                assert answer.status in {403, 405}
                assert "access-control-allow-origin" not in answer.headers


async def test_pages_of_allowed_origins_get_answers_streams_and_refusals(tokens: Path) -> None:  # noqa: F811
    one = {"prompt": "x", "max_tokens": 1}
    async with (
        door(allowed_origins=PAGE, auth_token_file=str(tokens)) as (_, _, url),
        aiohttp.ClientSession() as session,
    ):
        page = {"origin": PAGE, **bearing("bobs")}
        for body, status, headers in (
            (one, 200, page),
            ({**one, "stream": True}, 200, page),
            ({**one, "max_tokens": -1}, 400, page),
            (one, 401, {"origin": PAGE}),
        ):
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                assert answer.status == status
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert answer.headers["vary"] == "origin"
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
        async with session.post(f"{url}/v1/completions", json=one, headers=bearing("bobs")) as answer:
            assert answer.status == 200
            assert not any(name.lower().startswith("access-control") for name in answer.headers)
        async with session.post(
            f"{url}/v1/completions", json=one, headers={**page, "origin": "http://evil.example"}
        ) as answer:
            assert answer.status == 403
            assert "access-control-allow-origin" not in answer.headers
            message = (await answer.json())["error"]["message"]
            assert (
                message == "requests of pages of 'http://evil.example' are refused; allowed: those of allowed_origins"
            )


async def test_tls_and_certificates_that_change(certificates: Path, tmp_path: Path) -> None:  # noqa: F811
    pair = {"tls_cert_file": tmp_path / "server.pem", "tls_key_file": tmp_path / "server.key"}
    for kind, path in (("pem", pair["tls_cert_file"]), ("key", pair["tls_key_file"])):
        path.write_bytes((certificates / f"localhost.{kind}").read_bytes())
    paths = {name: str(path) for name, path in pair.items()}
    # Made before the door opens: a key takes a second at times, and a scheduler of this process would be silent for so long.
    made_by_openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=new",
                    "-addext", "subjectAltName=IP:127.0.0.1",
                    "-keyout", f"{tmp_path}/new.key", "-out", f"{tmp_path}/new.pem")  # fmt: skip

    def trusting(authority: str, client: str = "") -> aiohttp.TCPConnector:
        context = ssl.create_default_context(cafile=str(certificates / f"{authority}.pem"))
        if client:
            context.load_cert_chain(certificates / f"{client}.pem", certificates / f"{client}.key")
        return aiohttp.TCPConnector(ssl=context, force_close=True)

    async with door(**paths, tls_client_ca_file=str(certificates / "ca.pem")) as (on, _, _):
        url = f"https://localhost:{on.server.http_port}"
        async with aiohttp.ClientSession(connector=trusting("ca", "client")) as session:
            assert await status_of(session, f"{url}/v1/completions", {"prompt": "x", "max_tokens": 1}) == 200
            for wrong in (trusting("other-ca", "client"), trusting("ca"), trusting("ca", "stranger")):
                async with aiohttp.ClientSession(connector=wrong) as stranger:
                    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                        await status_of(stranger, f"{url}/health")
            # Without a name in the handshake, too.
            for kind in ("key", "pem"):
                (tmp_path / f"new.{kind}").replace(tmp_path / f"server.{kind}")
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await status_of(session, f"{url}/health")
        context = ssl.create_default_context(cafile=str(tmp_path / "server.pem"))
        context.load_cert_chain(certificates / "client.pem", certificates / "client.key")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            assert await status_of(session, f"https://127.0.0.1:{on.server.http_port}/health") == 200


async def test_nothing_listens_beyond_loopback_unguarded(tokens: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"http_address: '0\.0\.0\.0:1' is not allowed; allowed: a loopback address"):
        GatewayConfig(model=str(DEMO), http_address="0.0.0.0:1", auth_token_file=str(tokens)).validate()
    with pytest.raises(ValueError, match="http_address: 'x' is not allowed; allowed: HOST:PORT"):
        GatewayConfig(model=str(DEMO), http_address="x").validate()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        refused = finished("serve", "--http-address", address)
        assert refused.process.returncode == 2
        assert refused.err[-1].startswith(f"headway serve: --http-address: cannot listen on '{address}'")


async def test_limits_say_when_to_come_again() -> None:
    async with (
        door(max_concurrent_streams=1, max_tenant_requests_per_s=0.1) as (_, scheduler, url),
        aiohttp.ClientSession() as session,
    ):
        scheduler.step_interval_s = 0.01
        async with session.post(f"{url}/v1/completions", json=FOREVER) as first:
            await first.content.readline()
            async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as second:
                assert second.status == 429
                assert int(second.headers["retry-after"]) == 1
                assert (await second.json())["error"]["code"] == "too_many_streams"
            first.close()
        await eventually(lambda: not scheduler.running)
        async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as third:
            assert third.status == 429
            assert int(third.headers["retry-after"]) > 1
        scheduler.reject = lambda submit: Rejected(
            handle=submit.handle, reason=REJECT_OVERLOADED, message="full", retry_after_ms=2500
        )
        async with session.post(f"{url}/v1/chat/completions", json={
            "messages": [{"role": "user", "content": "x"}], "stream": True, "tenant": "other",
        }) as fourth:  # fmt: skip
            assert (fourth.status, fourth.headers["retry-after"]) == (429, "3")
            assert fourth.headers["retry-after-ms"] == "2500"
            assert fourth.headers["content-type"] == "application/json"


async def test_a_failure_in_the_middle_is_the_streams_last_event() -> None:
    async with door() as (_, scheduler, url), aiohttp.ClientSession() as session:
        scheduler.step_interval_s = 0.01
        body = {**FOREVER, "request_id": "mine"}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            await answer.content.readline()
            await scheduler.end("mine", "error", "the row is broken")
            *_, last = [line async for line in answer.content if line.strip()]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["type"] == "server_error"
        assert "the row is broken" in error["message"]


class LikeAPanic(BaseException):
    """As a library in Rust ends a call when it fails."""


@pytest.mark.parametrize("kind", [RuntimeError, LikeAPanic])
async def test_what_nobody_expected_is_not_told(monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]) -> None:
    async with door() as (on, _, url), aiohttp.ClientSession() as session:

        async def broken(*_: object, **__: object) -> None:
            raise kind("a secret")

        monkeypatch.setattr(on.server._generation, "generate", broken)
        async with session.post(f"{url}/v1/completions", json={"prompt": "x"}) as answer:
            assert answer.status == 500
            text = await answer.text()
            assert "internal error; see " in text
            assert "secret" not in text


async def test_a_drain_ends_what_is_open_and_refuses_the_rest() -> None:
    async with door() as (on, scheduler, url), aiohttp.ClientSession() as session:
        scheduler.step_interval_s = 0.005
        async with session.post(f"{url}/v1/completions", json={**FOREVER, "max_tokens": 60}) as answer:
            await answer.content.readline()
            drained = asyncio.create_task(on.server.drain(10))
            await asyncio.sleep(0.02)
            assert await status_of(session, f"{url}/v1/completions", {"prompt": "x"}) == 503
            assert await status_of(session, f"{url}/health") == 503
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await drained


async def test_a_drain_lets_a_call_of_many_inputs_ask_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for 64 at a time."""
    async with door() as (on, _, url), aiohttp.ClientSession() as session:
        asked, may_go_on = asyncio.Event(), asyncio.Event()

        async def embed(request: api.EmbedRequest, *_: object) -> api.EmbedResponse:
            asked.set()
            await may_go_on.wait()
            return api.EmbedResponse(embeddings=[api.Embedding(values=[1.0])] * len(request.inputs))

        monkeypatch.setattr(on.server._generation._batches, "embed", embed)
        monkeypatch.setattr(servicer, "check_embed", lambda request, model: CheckedInputs(request.request_id, ""))
        answer = asyncio.create_task(session.post(f"{url}/v1/embeddings", json={"input": ["x"] * 65}))
        await asked.wait()
        drained = asyncio.create_task(on.server.drain(10))
        await eventually(lambda: on.server._generation.streams._is_draining)
        assert await status_of(session, f"{url}/v1/embeddings", {"input": ["x"]}) == 503
        may_go_on.set()
        async with await answer as whole:
            assert whole.status == 200
            assert len((await whole.json())["data"]) == 65
        assert await drained


async def test_a_drain_waits_until_a_large_answer_is_read() -> None:
    async with door() as (on, scheduler, _):
        scheduler.step_interval_s = 0.0
        body = json.dumps({**FOREVER, "stream": False, "n": 16, "logprobs": 20}).encode()
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, ("127.0.0.1", on.server.http_port))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            await loop.sock_sendall(slow, head % len(body) + body)
            answer = await loop.sock_recv(slow, 4096)
            assert on.server._generation.streams.num_open == 0
            drained = asyncio.create_task(on.server.drain(60))
            await asyncio.sleep(0.1)
            assert not drained.done()
            while data := await loop.sock_recv(slow, 65536):
                answer += data
        length = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len(answer.partition(b"\r\n\r\n")[2]) == length
        assert await drained


async def test_closing_ends_open_streams() -> None:
    async with door() as (on, scheduler, url), aiohttp.ClientSession() as session:
        scheduler.step_interval_s = 0.01
        answer = await session.post(f"{url}/v1/completions", json=FOREVER)
        await answer.content.readline()
        async with asyncio.timeout(5):
            await on.server.close()
        with pytest.raises(aiohttp.ClientError):
            await answer.read()
        assert on.server._generation.streams.num_open == 0


async def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async with door(slow_client_s=0.4) as (on, scheduler, _):
        body = json.dumps({**FOREVER, "n": 16, "logprobs": 20}).encode()
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", on.server.http_port))
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            reader.sendall(head + body)
            await eventually(lambda: len(scheduler.submits) == 16)
            await eventually(lambda: on.server._generation.streams.num_open == 0)
        await eventually(lambda: not scheduler.running)
        counted = on.server._statistics
        await eventually(lambda: sum(count for (method, _), count in counted.calls.items() if "HTTP" in method) == 1)
        assert counted.calls["HTTP/v1/completions", "OK"] == 0


def copied_model(directory: Path, template: str) -> TextModel:
    shutil.copytree(DEMO, directory)
    (directory / "chat_template.jinja").write_text(template)
    return load_text_model(directory)


HERMES = """{% if tools %}{{ tools | tojson }} answer with <tool_call>{% endif %}{% for m in messages %}{{ m.role }}:
{{- m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.at }}){% endfor %}
{{- m.tool_call_id }}|{% endfor %}"""
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ASKED = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "moon"}'}}],
    },
    {"role": "tool", "content": "round", "tool_call_id": "1"},
]


async def test_tools_reach_the_template_and_calls_come_back(tmp_path: Path) -> None:
    text_model = copied_model(tmp_path / "model", HERMES)
    async with door(text_model) as (on, scheduler, url):
        text = 'Wait. <tool_call>{"name": "look", "arguments": {"at": "sun"}}</tool_call>'
        scheduler.next_token, num_tokens = spelling(text)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            request = {"model": "fake", "messages": ASKED, "max_tokens": num_tokens}
            whole = (await client.chat.completions.create(**request, tools=[TOOL])).choices[0]
            prompt = text_model.decode(decode_column(scheduler.submits[-1].token_ids).tolist())
            assert prompt.startswith('[{"type": "function", "function": {"name": "look"')
            assert prompt.endswith("user:Look.|assistant:look(moon)|tool:round1|")
            assert (whole.message.content, whole.finish_reason) == ("Wait.", "tool_calls")
            (call,) = whole.message.tool_calls
            assert (call.type, call.function.name, call.function.arguments) == ("function", "look", '{"at":"sun"}')
            assert len(call.id) == 9
            again = {**request, "messages": [ASKED[0], whole.message, {**ASKED[2], "tool_call_id": call.id}]}
            await client.chat.completions.create(**again, tools=[TOOL])
            prompt = text_model.decode(decode_column(scheduler.submits[-1].token_ids).tolist())
            assert prompt.endswith(f"user:Look.|assistant:Wait.look(sun)|tool:round{call.id}|")
            stream = await client.chat.completions.create(**request, tools=[TOOL], stream=True)
            deltas = [chunk.choices[0] async for chunk in stream]
            assert "".join(one.delta.content or "" for one in deltas) == "Wait."
            (streamed,) = [call for one in deltas for call in one.delta.tool_calls or ()]
            assert (streamed.index, streamed.function.name, streamed.function.arguments) == (0, "look", '{"at":"sun"}')
            assert deltas[-1].finish_reason == "tool_calls"
            for unused in ({}, {"tools": [TOOL], "tool_choice": "none"}):
                plain = (await client.chat.completions.create(**request, **unused)).choices[0]
                assert (plain.message.content, plain.finish_reason) == (text, "stop")
            for wrong, field in (
                ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
                ({"tool_choice": "required"}, "tool_choice"),
                ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "go"}}}, "tool_choice"),
                ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "tool_choice"),
                ({"tools": [{"type": "search"}]}, "tools[0].type"),
            ):
                with pytest.raises(openai.BadRequestError) as refusal:
                    await client.chat.completions.create(**request, extra_body=wrong)
                assert refusal.value.param == field
        chat = api.Chat(messages=[api.ChatMessage(role="user", content="x", more="[]")], tools="{}")
        with pytest.raises(grpc.aio.AioRpcError) as over_grpc:
            await on.stub.Tokenize(api.TokenizeRequest(chat=chat))
        assert "chat.messages[0].more: '[]' is not allowed; allowed: a JSON object; chat.tools: '{}'" in (
            over_grpc.value.details() or ""
        )


async def test_thoughts_are_divided_from_the_answer(tmp_path: Path) -> None:
    template = "{{ messages[0].content.split('</think>')[-1] }}"
    for name, end, text in (
        ("own", "", "<think>Hm.</think>\n\nYes."),
        ("templates", "<think>\n", "Hm.</think>\n\nYes."),
    ):
        text_model = copied_model(tmp_path / name, template + end)
        async with door(text_model) as (_, scheduler, url):
            scheduler.next_token, num_tokens = spelling(text)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                request = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": num_tokens}
                whole = (await client.chat.completions.create(**request)).choices[0].message
                assert (whole.content, whole.reasoning_content) == ("Yes.", "Hm.")
                stream = await client.chat.completions.create(**request, stream=True)
                deltas = [chunk.choices[0].delta async for chunk in stream]
                assert "".join(delta.content or "" for delta in deltas) == "Yes."
                assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
                plain = await client.chat.completions.create(**request, extra_body={"separate_reasoning": False})
                assert plain.choices[0].message.content == text


async def test_a_thought_that_the_last_message_began_goes_on(tmp_path: Path) -> None:
    template = "{{ messages[-1].content }}{{ '<think></think>' if add_generation_prompt }}"
    text_model = copied_model(tmp_path / "model", template)
    async with (
        door(text_model) as (_, scheduler, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        scheduler.next_token, num_tokens = spelling("Hm.</think>Yes.")
        for begun, thought, content in (
            ("<think>I", "Hm.", "Yes."),
            ("<think>I</think>", None, "Hm.</think>Yes."),
            ("I say ", None, "Hm.</think>Yes."),
        ):
            chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": begun}]
            body = {"model": "fake", "messages": chat, "max_tokens": num_tokens}
            made = await client.chat.completions.create(**body, extra_body={"continue_final_message": True})
            assert text_model.decode(decode_column(scheduler.submits[-1].token_ids).tolist()) == begun
            assert made.choices[0].message.content == content
            assert getattr(made.choices[0].message, "reasoning_content", None) == thought


async def test_large_variables_are_not_kept(tmp_path: Path) -> None:
    text_model = copied_model(
        tmp_path / "model", "{{ messages[0].content }}{% if level %}<think>{% else %}</think>{% endif %}"
    )
    maker = PieceMaker(text_model)
    async with door(text_model) as (on, _, _):
        for size in (1, 10_000, 1_000_000):
            for variables in (f'{{"level":"{"x" * size}"}}', f'{{"unknown":"{"x" * size}"}}'):
                chat = api.Chat(messages=[api.ChatMessage(role="user", content="x")], variables=variables)
                mark = await maker._mark_at_end(USUAL, chat, on.server.client.serving)
                assert mark == ("<think>" if "level" in variables and size < 1_000_000 else "")
    assert sum(map(len, maker._marks_at_end)) < 1000


async def test_variables_reach_the_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{{ level }}{{ reasoning_effort }}{% if thinking %}<think>{% else %}<think></think>{% endif %}"
    text_model = copied_model(tmp_path / "model", template)
    async with (
        door(text_model) as (_, scheduler, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        scheduler.next_token, num_tokens = spelling("Hm.</think>Yes.")
        request = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": num_tokens}
        for variables, prompt, thought in (
            ({"thinking": True, "level": 1.5}, "x1.5<think>", "Hm."),
            ({"thinking": False}, "x<think></think>", None),
            ({}, "x<think></think>", None),
            ({"thinking": 0, "reasoning_effort": "low"}, "xlow<think></think>", None),
        ):
            body = {"chat_template_kwargs": dict(variables)}
            if "reasoning_effort" in variables:
                body["reasoning_effort"] = body["chat_template_kwargs"].pop("reasoning_effort")
            answer = (await client.chat.completions.create(**request, extra_body=body)).choices[0].message
            assert text_model.decode(decode_column(scheduler.submits[-1].token_ids).tolist()) == prompt
            assert getattr(answer, "reasoning_content", None) == thought
        with pytest.raises(openai.BadRequestError, match="'messages' is not allowed; allowed: names beside") as refusal:
            await client.chat.completions.create(**request, extra_body={"chat_template_kwargs": {"messages": []}})
        assert refusal.value.param == "chat_template_kwargs"
        with pytest.raises(
            openai.BadRequestError, match="has no variable 'think'; it reads level, reasoning_effort, th"
        ) as refusal:
            await client.chat.completions.create(**request, extra_body={"chat_template_kwargs": {"think": True}})
        assert refusal.value.param == "chat_template_kwargs"


async def test_channels_are_thoughts_calls_and_the_answer(tmp_path: Path) -> None:
    text_model = copied_model(
        tmp_path / "model",
        "{% for m in messages %}{{ m.content }}{{ m.thinking }}{% endfor %}<|channel|>final<|message|>{{ tools }}",
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    async with (
        door(text_model) as (_, scheduler, url),
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        request = {"model": "fake", "messages": [{"role": "user", "content": "x"}]}
        scheduler.next_token, request["max_tokens"] = spelling(f"{thought}<|channel|>final<|message|>Yes.")
        answer = (await client.chat.completions.create(**request)).choices[0].message
        assert (answer.content, answer.reasoning_content) == ("Yes.", "Hm.")
        text = f'{thought}<|channel|>commentary to=functions.look json<|message|>{{"at": "sun"}}'
        scheduler.next_token, request["max_tokens"] = spelling(text)
        called = (await client.chat.completions.create(**request, tools=[TOOL])).choices[0]
        (call,) = called.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", '{"at":"sun"}')
        assert (called.message.reasoning_content, called.finish_reason) == ("Hm.", "tool_calls")
        plain = await client.chat.completions.create(**request, extra_body={"separate_reasoning": False})
        assert plain.choices[0].message.content == text
        answered = {"role": "tool", "content": "round", "tool_call_id": call.id}
        await client.chat.completions.create(
            **{**request, "messages": [*request["messages"], called.message, answered]}
        )
        prompt = text_model.decode(decode_column(scheduler.submits[-1].token_ids).tolist())
        assert prompt.startswith("xHm.round<")


async def test_tools_need_a_form_that_is_known() -> None:
    async with door() as (_, _, url), aiohttp.ClientSession() as session:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == "tools"


async def test_connections_that_end_leave_nothing_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes by once in many thousand connections; also those count that are reset while an answer is unread."""
    made: weakref.WeakSet[object] = weakref.WeakSet()
    begin = listener._Connection.connection_made

    def connection_made(self: listener._Connection, transport: asyncio.Transport) -> None:
        made.add(self)
        begin(self, transport)

    monkeypatch.setattr(listener._Connection, "connection_made", connection_made)
    async with door() as (on, _, url):
        gc.collect()
        gc.disable()
        try:
            async with aiohttp.ClientSession() as session:
                assert await status_of(session, f"{url}/v1/models") == 200
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
                await reader.read(1)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            await eventually(lambda: not made)
        finally:
            gc.enable()


async def test_heads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway_gateway.openai.listener._MOST_HEAD_S", 0.3)
    async with door() as (on, _, _):
        for first, more in (
            (b"", b""),
            (b"POST /v1/completions HTT", b""),
            (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 20_000),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
            writer.write(first + more)
            async with asyncio.timeout(3):
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()


async def test_what_stands_behind_the_last_chunk_is_bounded() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    async with door() as (on, _, _):
        for trailers in (b"a: b\r\n" * 100_000, b"a: " + b"b" * 600_000):
            reader, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
            writer.write(head + trailers)
            async with asyncio.timeout(3):
                with suppress(ConnectionResetError):
                    assert await reader.read() == b""
            writer.close()


async def test_a_request_right_behind_a_long_body_is_answered() -> None:
    """Its head is not as long as the body that comes in the same read."""
    body = json.dumps({"prompt": "x", "max_tokens": 1, "user": "y" * 100_000}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with door() as (on, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
        protocols: list[listener._Connection] = []
        await eventually(lambda: protocols.extend(on.server._http._server.server_state.connections) or protocols)
        # As one read, which the system may cut otherwise.
        protocols[0].data_received(request + request[:30])
        protocols[0].data_received(request[30:])
        async with asyncio.timeout(5):
            for _ in range(2):
                answer = await reader.readuntil(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 OK")
                (length,) = [line for line in answer.split(b"\r\n") if line.startswith(b"content-length")]
                await reader.readexactly(int(length.split()[1]))
        writer.close()


async def test_a_deadline_holds_before_anything_runs() -> None:
    async with (
        stage(http_address="127.0.0.1:0", unavailable_grace_s=30.0) as on,
        aiohttp.ClientSession() as session,
        asyncio.timeout(5),
    ):
        url, options = f"http://127.0.0.1:{on.server.http_port}", {"headers": {"headway-timeout-ms": "100"}}
        for path in ("/v1/completions", "/tokenize"):
            assert await status_of(session, url + path, {"prompt": "x"}, **options) == 504
        assert await status_of(session, f"{url}/v1/models", **options) == 504
        reader, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
        writer.write(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nHeadway-Timeout-Ms: 100\r\nContent-Length: 9\r\n\r\n{")
        assert (await reader.readline()).startswith(b"HTTP/1.1 504")
        writer.close()


@pytest.mark.parametrize("streams", [True, False])
async def test_who_goes_with_a_request_waiting_behind_another_ends_both(streams: bool) -> None:
    body = json.dumps({**FOREVER, "stream": streams}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    async with door() as (on, scheduler, _):
        scheduler.step_interval_s = 0.01
        _, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
        writer.write(request)
        await eventually(lambda: scheduler.running)
        writer.write(request)
        await asyncio.sleep(0.1)
        writer.close()
        await eventually(lambda: not scheduler.running)
        assert len(scheduler.submits) == 1
        assert on.server._statistics.calls["HTTP/v1/completions", "CANCELLED"] == 1


async def test_a_client_of_the_oldest_version_gets_its_stream_without_chunks() -> None:
    async with door() as (on, _, _):
        for streams, most in ((True, 3), (False, 3)):
            body = json.dumps({"prompt": "x", "max_tokens": most, "stream": streams}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
            writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            head, _, answer = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            if streams:
                assert answer.endswith(b"data: [DONE]\n\n")
                assert all(event.startswith(b"data: ") for event in answer.split(b"\n\n") if event)
            else:
                assert json.loads(answer)["usage"]["completion_tokens"] == most
            writer.close()


@pytest.mark.parametrize("cut", [40, 10_000, None])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_who_asks_for_http2_meanwhile_is_answered_as_if_it_did_not(cut: int | None, is_chunked: bool) -> None:
    """As Java's client does with every first request."""
    body = b'{"prompt": "x", "max_tokens": 3}'
    length = b"Transfer-Encoding: chunked" if is_chunked else b"Content-Length: %d" % len(body)
    head = b"POST /v1/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: x\r\nHTTP2-Settings: AA\r\n"
    head += length + b"\r\nUpgrade: h2c\r\nX-Request-Id: mine\r\n\r\n"
    whole = head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body)
    async with door() as (on, _, _), asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", on.server.http_port)
        at = len(head) if cut is None else cut
        for _ in range(2):
            for part in (whole[:at], whole[at:]):
                writer.write(part)
                await asyncio.sleep(0.05)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK")
            (length,) = [line for line in answer.split(b"\r\n") if line.startswith(b"content-length")]
            made = json.loads(await reader.readexactly(int(length.split()[1])))
            assert made["usage"]["completion_tokens"] == 3
        many = b"GET /v1/models HTTP/1.1\r\nConnection: Upgrade\r\nHost: x\r\nUpgrade: h2c\r\n\r\n" * 2000
        writer.write(many)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 OK")
        writer.close()


async def test_a_client_that_reads_a_large_answer_slowly_gets_all_of_it() -> None:
    asked = json.dumps({"tokens": [300] * 1_000_000}).encode()
    async with door(slow_client_s=0.4) as (on, _, _), asyncio.timeout(30):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", on.server.http_port))
            client.setblocking(False)
            connections = on.server._http._server.server_state.connections
            await eventually(lambda: connections)
            (connection,) = connections
            # The system's own buffer is not seen to be read before a good part of it is.
            connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
            loop = asyncio.get_running_loop()
            head = b"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(asked)
            await loop.sock_sendall(client, head + asked)
            answer = b""
            while not answer.endswith(b'"}'):
                more = await loop.sock_recv(client, 1 << 18)
                assert more
                answer += more
                await asyncio.sleep(len(more) / 4e6)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % len(body) in head + b"\r\n"


async def test_what_each_of_several_prompts_would_get_is_bounded() -> None:
    async with door() as (_, scheduler, url), aiohttp.ClientSession() as session:
        body = {"prompt": ["x", "y"], "stop": ["z" * 600_000]}
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "prompt")
        assert "2 prompts are not allowed with other fields of 600" in error["message"]
        assert not scheduler.submits
