"""Calls of tools and thoughts over HTTP, in the forms of published chat templates, which here are shortened.

The marks are special tokens. The model writes what the template makes of such a message, so a chat that goes on repeats it.
"""

# ruff: noqa: RUF001 (marks of DeepSeek have full-width lines)

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import openai
import openai.types.responses
import pydantic
import pytest
from tokenizers import Tokenizer

from e2e.running_server import eventually
from e2e.test_gateway_serving import DEMO, stage
from fake_scheduler import MODEL, FakeScheduler
from headway_gateway.openai.thinking import thoughts_of
from headway_gateway.text.tokenization import TextModel, load_text_model
from headway_proto.columns import decode_column
from headway_proto.grammars import ConstraintError, GrammarCompiler
from headway_proto.ingress import Submit

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "hours": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = {"at": "sun", "hours": 3}
SHOWN = '{"at": "sun", "hours": 3}'


class Family(NamedTuple):
    """``template`` makes ``written`` of a message of the model with two calls, between a user's and an answer to a call."""

    template: str
    marks: str
    """Special tokens, between spaces."""
    written: str
    content: str | None = None
    thought: str | None = None


FAMILIES = {
    "DeepSeek V3": Family(
        "{{ tools | tojson }}{% for m in messages %}{% if m['role'] == 'assistant' and m['tool_calls'] is defined %}"
        "{{ (m['content'] or '') + '<｜tool▁calls▁begin｜>' }}{% for t in m['tool_calls'] %}{{ ('' if loop.first else '\n') + "
        "'<｜tool▁call▁begin｜>' + t['type'] + '<｜tool▁sep｜>' + t['function']['name'] + '\n```json\n' + "
        "t['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
        "{% else %}{{ '|' + m['content'] }}{% endif %}{% endfor %}",
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{SHOWN}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I look.",
    ),
    "DeepSeek V3.1": Family(
        "{{ tools | tojson }}{% for m in messages %}{% if m['role'] == 'assistant' and m['tool_calls'] is defined %}"
        "{% if m['reasoning_content'] is defined %}<think>{{ m['reasoning_content'] }}</think>{% endif %}"
        "{% for t in m['tool_calls'] %}{% if loop.first %}{{ (m['content'] or '') + '<｜tool▁calls▁begin｜>' }}{% endif %}"
        "{{ '<｜tool▁call▁begin｜>' + t['function']['name'] + '<｜tool▁sep｜>' + t['function']['arguments'] + "
        "'<｜tool▁call▁end｜>' }}{% endfor %}{{ '<｜tool▁calls▁end｜>' }}"
        "{% else %}{{ '|' + m['content'] }}{% endif %}{% endfor %}",
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <｜tool▁calls▁end｜>",
        f"<think>Hm.</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{SHOWN}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>go<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        thought="Hm.",
    ),
    "Command R7B": Family(
        "{% for tool in tools or [] %}{{ tool['function'] | tojson }}{% endfor %}{% for m in messages %}{% if m.tool_calls %}"
        "<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|><|START_ACTION|>[\n{% for tc in m.tool_calls %}"
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ tc[\'function\'][\'name\'] }}", "parameters": '
        "{{ tc['function']['arguments'] | tojson }}}{{ ',\n' if not loop.last else '\n' }}{% endfor %}]<|END_ACTION|>"
        "{% elif m.role == 'assistant' %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "<|START_THINKING|> <|END_THINKING|> <|START_ACTION|> <|END_ACTION|> <|START_RESPONSE|> <|END_RESPONSE|>",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "look", '
        f'"parameters": {SHOWN}}},\n    {{"tool_call_id": "1", "tool_name": "go", "parameters": {{}}}}\n]<|END_ACTION|>',
        thought="Hm.",
    ),
    "Phi-4-mini": Family(
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not "
        "none %}{{ message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}{% else %}{{ '<|' + message['role'] "
        "+ '|>' + message['content'] }}{% endif %}{% endfor %}",
        "<|tool_call|> <|/tool_call|>",
        f'<|tool_call|>[{{"name": "look", "arguments": {SHOWN}}}, {{"name": "go", "arguments": {{}}}}]<|/tool_call|>',
    ),
    "Qwen3-Coder": Family(
        "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% for m in messages %}{{ '|' + (m.content or '') }}"
        "{% for call in m.tool_calls or [] %}{% set call = call.function %}{{ '\n<tool_call>\n<function=' + call.name + '>\n' }}"
        "{% for name, value in call.arguments | items %}{{ '<parameter=' + name + '>\n' }}{{ value | string }}"
        "{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{% endfor %}",
        "<tool_call> </tool_call>",
        "I look.\n<tool_call>\n<function=look>\n<parameter=at>\nsun\n</parameter>\n<parameter=hours>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=go>\n</function>\n</tool_call>",
        "I look.",
    ),
    "GLM 4.5": Family(
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<think>' + m.reasoning_content + '</think>\n' + m.content }}{% for tc in m.tool_calls %}{% set tc = tc.function %}"
        "{{ '\n<tool_call>' + tc.name + '\n' }}{% for k, v in tc.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n' }}"
        "{{ '<arg_value>' }}{{ v | tojson if v is not string else v }}{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "<tool_call> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value>",
        "<think>Hm.</think>\nI look.\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>sun</arg_value>\n"
        "<arg_key>hours</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>go\n</tool_call>",
        "I look.",
        "Hm.",
    ),
    "Gemma 4": Family(
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|channel>thought\n' + m.reasoning_content + '<channel|>' }}{% for tc in m.tool_calls %}"
        "{{ '<|tool_call>call:' + tc.function.name + '{' }}{% for k, v in tc.function.arguments | items %}"
        "{{ (',' if not loop.first else '') + k + ':' }}{{ '<|\"|>' + v + '<|\"|>' if v is string else v }}{% endfor %}"
        "{{ '}<tool_call|>' }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        '<|tool_call> <tool_call|> <|"|> <|channel> <channel|>',
        '<|channel>thought\nHm.<channel|><|tool_call>call:look{at:<|"|>sun<|"|>,hours:3}<tool_call|>'
        "<|tool_call>call:go{}<tool_call|>",
        thought="Hm.",
    ),
    "Seed-OSS": Family(
        "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<seed:think>' + m.reasoning_content + '</seed:think>' }}{% for tc in m.tool_calls %}"
        "{{ '<seed:tool_call>\n<function=' + tc.function.name + '>\n' }}{% for k, v in tc.function.arguments | items %}"
        "{{ '<parameter=' + k + '>' }}{{ v }}{{ '</parameter>\n' }}{% endfor %}{{ '</function>\n</seed:tool_call>' }}"
        "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "<seed:think> </seed:think> <seed:tool_call> </seed:tool_call>",
        "<seed:think>Hm.</seed:think><seed:tool_call>\n<function=look>\n<parameter=at>sun</parameter>\n"
        "<parameter=hours>3</parameter>\n</function>\n</seed:tool_call><seed:tool_call>\n<function=go>\n</function>\n"
        "</seed:tool_call>",
        thought="Hm.",
    ),
    "MiniMax M2": Family(
        "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content + '\n<minimax:tool_call>\n' }}"
        '{% for tc in m.tool_calls %}<invoke name="{{ tc.function.name }}">\n{% for k, v in tc.function.arguments | items %}'
        '<parameter name="{{ k }}">{{ v | tojson if v is not string else v }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}'
        "</minimax:tool_call>{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "<minimax:tool_call> </minimax:tool_call>",
        'I look.\n<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">sun</parameter>\n'
        '<parameter name="hours">3</parameter>\n</invoke>\n<invoke name="go">\n</invoke>\n</minimax:tool_call>',
        "I look.",
    ),
    "Magistral": Family(
        "{{ tools | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}[THINK]{{ m.reasoning_content }}[/THINK]"
        "{{ m.content }}{% for t in m.tool_calls %}{{ '[TOOL_CALLS]' + t['function']['name'] + '[ARGS]' + "
        "t['function']['arguments'] | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "[THINK] [/THINK] [TOOL_CALLS] [ARGS]",
        f"[THINK]Hm.[/THINK]I look.[TOOL_CALLS]look[ARGS]{SHOWN}[TOOL_CALLS]go[ARGS]{{}}",
        "I look.",
        "Hm.",
    ),
}


IN_MARKUP = ("Qwen3-Coder", "Gemma 4", "GLM 4.5", "Seed-OSS", "MiniMax M2")


def model_with(directory: Path, template: str, marks: str = "") -> TextModel:
    shutil.copytree(DEMO, directory)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(marks.split())
    tokenizer.save(str(directory / "tokenizer.json"))
    return load_text_model(directory)


class Door(NamedTuple):
    """``write`` makes the model write a text and end; ``prompt`` returns the last request's prompt."""

    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession
    scheduler: FakeScheduler
    text_model: TextModel

    def write(self, text: str) -> None:
        ids = [*self.text_model.encode(text), 0]

        def next_token(submit: Submit, index: int) -> int:
            return ids[index]

        self.scheduler.next_token = next_token

    def prompt_ids(self) -> list[int]:
        return decode_column(self.scheduler.submits[-1].token_ids).tolist()

    def prompt(self) -> str:
        return self.text_model._tokenizer.decode(self.prompt_ids(), skip_special_tokens=False)


@asynccontextmanager
async def door(text_model: TextModel, *, supports_constraints: bool = True) -> AsyncIterator[Door]:
    model = msgspec.structs.replace(MODEL, vocab_size=4200, supports_constraints=supports_constraints)
    async with (
        stage(text_model, http_address="127.0.0.1:0") as on,
        FakeScheduler(on.ingress, model=model) as scheduler,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{on.server.http_port}/v1", api_key="none", max_retries=0
        ) as client,
        aiohttp.ClientSession(f"http://127.0.0.1:{on.server.http_port}") as http,
    ):
        await eventually(lambda: on.server.client.serving)
        yield Door(client, http, scheduler, text_model)


@pytest.mark.parametrize("name", FAMILIES)
async def test_calls_come_out_and_go_back_in_the_familys_form(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    async with door(model_with(tmp_path / "model", family.template, family.marks)) as at:
        at.write(family.written)
        request: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400}
        choice = (await at.client.chat.completions.create(**request, tools=TOOLS)).choices[0]
        assert (choice.message.content, choice.finish_reason) == (family.content, "tool_calls")
        assert getattr(choice.message, "reasoning_content", None) == family.thought
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]
        assert calls == [("look", ARGUMENTS), ("go", {})]
        assert '"look"' in at.prompt() or "lookgo" in at.prompt()
        stream = await at.client.chat.completions.create(**request, tools=TOOLS, stream=True)
        deltas = [chunk.choices[0] async for chunk in stream]
        streamed = [call.function for one in deltas for call in one.delta.tool_calls or ()]
        assert [(call.name, json.loads(call.arguments)) for call in streamed] == calls
        assert "".join(one.delta.content or "" for one in deltas) == (family.content or "")
        assert "".join(getattr(one.delta, "reasoning_content", None) or "" for one in deltas) == (family.thought or "")
        assert deltas[-1].finish_reason == "tool_calls"
        answered = {"role": "tool", "content": "round", "tool_call_id": choice.message.tool_calls[0].id}
        going_on = {**request, "messages": [*request["messages"], choice.message, answered]}
        await at.client.chat.completions.create(**going_on, tools=TOOLS)
        _, written, behind = at.prompt().partition(family.written)
        assert written
        assert "round" in behind
        # As many tokens as the chat's prompt has, and the same.
        messages = [*request["messages"], choice.message.model_dump(exclude_none=True), answered]
        async with at.http.post("/tokenize", json={"messages": messages, "tools": TOOLS}) as answer:
            assert (await answer.json())["tokens"] == at.prompt_ids()


FORM: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "integer"}}}


def lets_pass(at: Door, text: str) -> bool:
    """Whether the constraint of the last request lets the model write a text and end."""
    constraint = at.scheduler.submits[-1].sampling.constraint
    assert constraint is not None
    tokenizer = at.text_model._tokenizer
    size = tokenizer.get_vocab_size()
    compiler = GrammarCompiler(tokenizer.to_str(), vocab_size=size, eos_token_ids=[0])
    matcher = compiler.compile(constraint).matcher()
    try:
        matcher.accept([*tokenizer.encode(text).ids, 0])
    except ConstraintError:
        return False
    return True


@pytest.mark.parametrize("name", FAMILIES)
async def test_an_answer_in_a_form_may_have_a_thought_before_it_or_be_calls(tmp_path: Path, name: str) -> None:
    family, form = FAMILIES[name], thoughts_of(FAMILIES[name].template)
    calls = family.written.replace(family.content or "", "").lstrip()  # Other text is none of the form.
    thought = form.begin + "Hm." + form.end if form is not None else ""
    async with door(model_with(tmp_path / "model", family.template, family.marks)) as at:

        async def answer(written: str, **more: Any) -> Any:
            at.write(written)
            made = await at.client.chat.completions.create(
                model="fake",
                messages=[{"role": "user", "content": "x"}],
                tools=TOOLS,
                response_format=FORM,
                **more,
                max_tokens=400,
            )
            assert not lets_pass(at, "I look.")
            return made.choices[0].message

        made = await answer(calls)
        assert lets_pass(at, calls)
        assert [call.function.name for call in made.tool_calls] == ["look", "go"]
        assert made.content is None
        for (written, names), content in (((f"{thought}7", []), "7"), ((calls, ["look", "go"]), None)):
            made = await answer(written, tool_choice="required" if names else "auto")
            assert lets_pass(at, written)
            assert [call.function.name for call in made.tool_calls or ()] == names
            assert made.content == content
            assert getattr(made, "reasoning_content", None) == ("Hm." if thought else None)
        assert not lets_pass(at, "7")
        # Both are called.
        for more in (
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ):
            await answer(calls, **more)
            assert not lets_pass(at, calls)


@pytest.mark.parametrize("name", FAMILIES)
async def test_calls_of_strict_tools_follow_their_schemas_without_being_forced(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tools: Any = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    async with door(model_with(tmp_path / "model", family.template, family.marks)) as at:
        at.write(family.written)
        chat: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400}
        choice = (await at.client.chat.completions.create(**chat, tools=tools)).choices[0]
        assert [call.function.name for call in choice.message.tool_calls or ()] == ["look", "go"]
        assert lets_pass(at, family.written)
        assert lets_pass(at, "No call.")
        assert not lets_pass(at, family.written.replace("look", "come"))
        assert not lets_pass(at, family.written.replace("3", "x"))
        tools[1]["function"]["parameters"] = {"type": "object", "not": {"patternProperties": {"a": {}}}}
        problem = "tools: 'go': not is not allowed in this form" if name in IN_MARKUP else "tools: Unimplemented keys"
        with pytest.raises(openai.BadRequestError, match=problem) as caught:
            await at.client.chat.completions.create(**chat, tools=tools)
        assert caught.value.param == "tools"
        tools[1]["function"]["strict"] = False
        await at.client.chat.completions.create(**chat, tools=tools)
        await at.client.chat.completions.create(**chat, tools=tools, extra_body={"grammar": 'start: "7"'})
        assert lets_pass(at, "7")
        assert not lets_pass(at, family.written)


async def test_what_the_form_of_the_template_cannot_say_is_refused_or_forced_in_json(tmp_path: Path) -> None:
    family = FAMILIES["Qwen3-Coder"]
    look = {"type": "object", "properties": {"at": {"type": "string", "format": "hostname"}}}
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": look, "strict": True}}]
    chat: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
    async with door(model_with(tmp_path / "model", family.template, family.marks)) as at:
        with pytest.raises(
            openai.BadRequestError, match="tools: 'look': format: 'hostname' is not allowed in this form"
        ):
            await at.client.chat.completions.create(**chat, tools=tools)
        written = '[{"name": "look", "parameters": {"at": "a.b"}}]'
        at.write(written)
        made = await at.client.chat.completions.create(**chat, tools=tools, tool_choice="required")
        assert [call.function.arguments for call in made.choices[0].message.tool_calls or ()] == ['{"at":"a.b"}']
        assert lets_pass(at, written)
        assert not lets_pass(at, family.written)
        tools[0]["function"]["parameters"] = {"type": "object", "properties": {"a": {"enum": ["x" * 300_000]}}}
        with pytest.raises(openai.BadRequestError, match="the most of 'look'; allowed: at most 262144"):
            await at.client.chat.completions.create(**chat, tools=tools)


async def test_strict_tools_are_taken_where_nothing_can_be_bound(tmp_path: Path) -> None:
    async with door(model_with(tmp_path / "model", HERMES), supports_constraints=False) as at:
        at.write(TWO_CALLS)
        tool: Any = openai.pydantic_function_tool(Look)
        assert tool["function"]["strict"] is True
        chat: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
        made = await at.client.chat.completions.create(**chat, tools=[tool])
        assert len(made.choices[0].message.tool_calls or ()) == 2
    async with door(model_with(tmp_path / "bound", HERMES, "<tool_call> </tool_call>")) as at:
        at.write(TWO_CALLS)
        for more, is_bound in (({}, True), ({"min_tokens": 2}, False), ({"ignore_eos": True}, False)):
            await at.client.chat.completions.create(**chat | {"max_tokens": 2}, tools=[tool], extra_body=more)
            assert (at.scheduler.submits[-1].sampling.constraint is not None) == is_bound


async def test_in_channels_answers_follow_their_form_and_calls_their_schemas(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}{# <|channel|><|message|> #}"
    )
    marks = "<|channel|> <|message|> <|end|> <|start|> <|constrain|>"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    answer, call = "<|channel|>final<|message|>7", f" to=functions.look<|channel|>commentary json<|message|>{SHOWN}"
    other = call.replace("sun", "moon").replace("look", "go")
    tools: Any = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    look: Any = {"type": "function", "function": {"name": "look"}}
    async with door(model_with(tmp_path / "model", template, marks)) as at:
        for more, may_be in (
            ({"response_format": FORM}, [answer]),
            ({"response_format": FORM, "tools": tools}, [answer, call, other]),
            ({"tools": TOOLS, "tool_choice": "required"}, [call, other]),
            ({"tools": TOOLS, "tool_choice": look}, [call]),
        ):
            for written in may_be:
                at.write(thought + written)
                made = await at.client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=200, **more
                )
                message = made.choices[0].message
                names = [one.function.name for one in message.tool_calls or ()]
                assert names == {answer: [], call: ["look"], other: ["go"]}[written]
                assert message.content == ("7" if written == answer else None)
                assert message.reasoning_content == "Hm."
                assert lets_pass(at, thought + written)
                assert lets_pass(at, written)
            for text in (call, answer, other):
                assert lets_pass(at, text) == (text in may_be), more
            assert not lets_pass(at, answer.replace("7", "x"))
            assert not lets_pass(at, call.replace("3", '"3"'))


async def test_a_constraint_binds_all_of_an_output_that_is_not_to_be_divided(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think></think>' if x == 'none' else '<think>' if x }}"
    )
    async with door(model_with(tmp_path / "model", template)) as at:
        chat: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 99}
        thought, inside, own = "<think>Hm.</think>7", "Hm.</think>7", {"grammar": 'start: "7"'}
        for more, may_be in (
            ({"response_format": FORM}, {"7", thought}),
            ({"response_format": FORM, "separate_reasoning": False}, {"7"}),
            ({"response_format": FORM, "chat_template_kwargs": {"x": "none"}}, {"7"}),
            ({"response_format": FORM, "chat_template_kwargs": {"x": "some"}}, {inside, thought}),
            ({"regex": "[7]"}, {"7", thought}),
            ({"choice": ["7", "8"]}, {"7", thought}),
            (own, {"7"}),
        ):
            at.write(inside if inside in may_be else max(may_be, key=len))
            made = await at.client.chat.completions.create(**chat, extra_body=more)
            assert made.choices[0].message.content == "7"
            assert {text for text in ("7", thought, inside) if lets_pass(at, text)} == may_be, more
        refused = {"name": "n", "schema": {"not": {"items": {}}}}
        with pytest.raises(openai.BadRequestError, match="schema: Unimplemented keys") as caught:
            await at.client.chat.completions.create(
                **chat, response_format={"type": "json_schema", "json_schema": refused}
            )
        assert caught.value.param == "response_format.json_schema.schema"
        form: Any = {"format": {"type": "json_schema", **refused}}
        with pytest.raises(openai.BadRequestError, match="schema: Unimplemented keys") as caught:
            await at.client.responses.create(model="fake", input="x", text=form)
        assert caught.value.param == "text.format.schema"


async def test_answers_have_no_marks(tmp_path: Path) -> None:
    for name, written in (
        ("Command R7B", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
        ("Command R7B", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
        ("Magistral", "[THINK]Hm.[/THINK]Yes."),
    ):
        text_model = model_with(tmp_path / f"{name} {len(written)}", FAMILIES[name].template, FAMILIES[name].marks)
        async with door(text_model) as at:
            at.write(written)
            request: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99, "model": ""}
            answer = (await at.client.chat.completions.create(**request)).choices[0].message
            assert answer.content == "Yes."
            assert getattr(answer, "reasoning_content", None) == ("Hm." if "Hm." in written else None)
            whole = await at.client.chat.completions.create(
                **request, extra_body={"separate_reasoning": False, "skip_special_tokens": False}
            )
            assert whole.choices[0].message.content == written + "<|endoftext|>"


CHANNELS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}{% endfor %}{{ reasoning_effort }}<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
MARKS = "<|channel|> <|message|> <|end|> <|start|> <|return|>"


async def test_a_response_has_thoughts_as_items_of_their_own(tmp_path: Path) -> None:
    async with door(model_with(tmp_path / "model", CHANNELS, MARKS)) as at:
        at.write(f"{THOUGHT}<|channel|>final<|message|>Yes.")
        request: dict[str, Any] = {
            "model": "fake",
            "input": "x",
            "max_output_tokens": 99,
            "reasoning": {"effort": "low"},
        }
        made = await at.client.responses.create(**request)
        assert at.prompt() == "user:xlow<|channel|>final<|message|>"
        thought, message = made.output
        assert thought.type == "reasoning"
        assert [part.text for part in thought.content or ()] == ["Hm."]
        assert (made.output_text, message.id.startswith("msg_"), thought.id.startswith("rs_")) == ("Yes.", True, True)
        async with at.client.responses.stream(**request) as stream:
            events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Yes."
        final = events[-1].response
        assert [item.type for item in final.output] == ["reasoning", "message"]
        assert [item.content[0].text for item in final.output] == ["Hm.", "Yes."]
        done = [(event.output_index, event.item.type) for event in events if event.type == "response.output_item.done"]
        assert done == [(0, "reasoning"), (1, "message")]
        # What came out goes in again.
        await at.client.responses.create(
            **{**request, "input": [{"role": "user", "content": "x"}, *made.output, {"role": "user", "content": "y"}]}
        )
        assert at.prompt().startswith("user:xassistant:Yes.Hm.user:ylow")
        await at.client.responses.create(**{**request, "input": [thought]})
        assert at.prompt().startswith("assistant:Hm.low")
        whole = await at.client.responses.create(**request, extra_body={"separate_reasoning": False})
        assert whole.output_text == "analysisHm.assistantfinalYes."
        for written, kinds in ((THOUGHT.partition(".")[0], ["reasoning"]), ("", ["message"])):
            at.write(written)
            cut = await at.client.responses.create(**request)
            assert [item.type for item in cut.output] == kinds
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].role: it is missing"):
            await at.client.responses.create(**{**request, "input": [{"content": "x"}]})


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_response_has_calls_as_items_of_their_own(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    async with door(model_with(tmp_path / "model", family.template, family.marks)) as at:
        at.write(family.written)
        request: dict[str, Any] = {
            "model": "fake",
            "input": [{"role": "user", "content": "x"}],
            "max_output_tokens": 400,
        }
        made = await at.client.responses.create(**request, tools=tools)
        calls = [item for item in made.output if item.type == "function_call"]
        kinds = ["reasoning"] * bool(family.thought) + ["message"] * bool(family.content)
        assert [item.type for item in made.output] == [*kinds, "function_call", "function_call"]
        assert [(call.name, json.loads(call.arguments), call.status) for call in calls] == [
            ("look", ARGUMENTS, "completed"),
            ("go", {}, "completed"),
        ]
        assert len({call.call_id for call in calls} | {call.id for call in calls}) == 4
        assert made.output_text == (family.content or "")
        assert (made.tool_choice, [tool.name for tool in made.tools]) == ("auto", ["look", "go"])
        assert '"look"' in at.prompt() or "lookgo" in at.prompt()
        async with at.client.responses.stream(**request, tools=tools) as stream:
            events = [event async for event in stream]
        final = events[-1].response
        assert [(one.name, json.loads(one.arguments)) for one in final.output if one.type == "function_call"] == [
            (call.name, json.loads(call.arguments)) for call in calls
        ]
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert [event.delta for event in deltas] == [event.arguments for event in done]
        assert [event.name for event in done] == ["look", "go"]
        assert [event.item_id for event in done] == [one.id for one in final.output if one.type == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": "round"}]
        await at.client.responses.create(
            **{**request, "input": [*request["input"], *made.output, *outputs]}, tools=tools
        )
        _, written, behind = at.prompt().partition(family.written)
        assert written
        assert "round" in behind


async def test_a_template_that_does_not_show_tools_is_told_whether_calls_are_forced_or_not(tmp_path: Path) -> None:
    async with door(model_with(tmp_path / "model", "{{ messages[0].content }}")) as at:
        for choice in ("auto", "required"):
            with pytest.raises(
                openai.BadRequestError, match="tools: this model's chat template does not show them"
            ) as told:
                await at.client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": "x"}], tools=TOOLS, tool_choice=choice
                )
            assert told.value.param == "tools"


async def test_calls_of_a_response_may_be_forced_and_its_items_are_checked(tmp_path: Path) -> None:
    tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
    async with door(model_with(tmp_path / "model", "{{ tools | tojson }}{{ messages[0].content }}")) as at:
        request: dict[str, Any] = {"model": "fake", "input": "x", "max_output_tokens": 99}
        with pytest.raises(openai.BadRequestError, match="no form of calls that is known"):
            await at.client.responses.create(**request, tools=tools)
        at.write('[{"name": "go", "parameters": {}}]')
        for choice in ("required", {"type": "function", "name": "go"}):
            made = await at.client.responses.create(
                **request, tools=tools, tool_choice=choice, parallel_tool_calls=False
            )
            (call,) = made.output
            assert (call.type, call.name, call.arguments) == ("function_call", "go", "{}")
            assert not made.parallel_tool_calls
            assert at.scheduler.submits[-1].sampling.constraint is not None
        for wrong, field in (
            ({"tool_choice": {"type": "function", "function": {"name": "go"}}}, "tool_choice"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"input": [{"type": "function_call", "call_id": "a", "name": "go"}]}, "input[0].arguments"),
            (
                {"input": [{"type": "function_call", "call_id": "a", "name": "go", "arguments": "["}]},
                "input[0].arguments",
            ),
            ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
            ({"input": [{"role": "user", "content": "x", "call_id": "a"}]}, "input[0].call_id"),
        ):
            async with at.http.post("/v1/responses", json=request | {"tools": tools} | wrong) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["param"] == field


class Look(pydantic.BaseModel):
    """Look at it."""

    at: str


HERMES = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"
TWO_CALLS = '<tool_call>{"name": "Look", "arguments": {"at": "sun"}}</tool_call>' * 2


A_CALL = {"type": "function_call", "call_id": "a", "name": "Look", "arguments": "{}"}
BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


async def test_what_clients_always_send_is_accepted_where_it_changes_nothing(tmp_path: Path) -> None:
    async with door(model_with(tmp_path / "model", HERMES)) as at:
        at.write("Yes.")
        response: dict[str, Any] = {"input": "x", "max_output_tokens": 9}
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
        common = {"service_tier": "auto", "prompt_cache_retention": "24h"}
        for path, body, harmless, wrong in (
            (
                "/v1/responses",
                response,
                {
                    "include": ["reasoning.encrypted_content"],
                    "truncation": "disabled",
                    "background": False,
                    "top_logprobs": 0,
                    "text": {"verbosity": "medium"},
                    "reasoning": {"summary": "auto", "generate_summary": None},
                    "stream_options": {"include_obfuscation": False},
                    "previous_response_id": None,
                    "conversation": None,
                    "prompt": None,
                    "max_tool_calls": None,
                    "context_management": None,
                    "moderation": None,
                    "prompt_cache_options": {"mode": "implicit"},
                    "client_metadata": {"session_id": "x"},
                    "input": [
                        {"role": "user", "name": "bob", "content": [{"type": "input_text", "text": "x", **BREAKPOINT}]},
                        {
                            **A_CALL,
                            "id": "fc_1",
                            "status": "completed",
                            "namespace": None,
                            "caller": None,
                            "async": False,
                        },
                        {"type": "function_call_output", "call_id": "a", "output": "y"},
                    ],
                },
                {
                    "include[0]": {"include": ["message.output_text.logprobs"]},
                    "truncation": {"truncation": "auto"},
                    "background": {"background": True},
                    "top_logprobs": {"top_logprobs": 1},
                    "text.verbosity": {"text": {"verbosity": "low"}},
                    "reasoning.summary": {"reasoning": {"summary": "detailed"}},
                    "previous_response_id": {"previous_response_id": "resp_1"},
                    "moderation": {"moderation": {}},
                    "input[0].async": {"input": [{**A_CALL, "async": True}]},
                    "input[0].name": {"input": [{"type": "reasoning", "content": "x", "name": "bob"}]},
                },
            ),
            (
                "/v1/chat/completions",
                chat,
                {
                    "verbosity": "medium",
                    "modalities": ["text"],
                    "top_logprobs": 0,
                    "parallel_tool_calls": False,
                    **dict.fromkeys(("functions", "function_call", "audio", "moderation", "prediction")),
                    "web_search_options": None,
                    "prompt_cache_options": {"mode": "implicit"},
                    "messages": [{"role": "user", "content": [{"type": "text", "text": "x", **BREAKPOINT}]}],
                },
                {
                    "functions": {"functions": []},
                    "verbosity": {"verbosity": "high"},
                    "modalities[1]": {"modalities": ["text", "audio"]},
                    "service_tier": {"service_tier": "flex"},
                    "stream_options.include_obfuscation": {"stream_options": {"include_obfuscation": True}},
                },
            ),
        ):
            async with at.http.post(path, json=body | common | harmless) as answer:
                assert answer.status == 200, await answer.text()
            for field, more in wrong.items():
                async with at.http.post(path, json=body | more) as answer:
                    assert (await answer.json())["error"]["param"] == field


async def test_some_of_the_tools_may_be_allowed(tmp_path: Path) -> None:
    """The others are as if they were not there."""
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 99, "tools": TOOLS}
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response: dict[str, Any] = {"input": "x", "max_output_tokens": 99, "tools": flat}
    go, nowhere = ({"type": "function", "function": {"name": name}} for name in ("go", "nowhere"))
    async with door(model_with(tmp_path / "model", HERMES)) as at:
        for mode in ("auto", "required"):
            at.write('[{"name": "go", "parameters": {}}]' if mode == "required" else TWO_CALLS.replace("Look", "go"))
            allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [go]}}
            async with at.http.post("/v1/chat/completions", json=chat | {"tool_choice": allowed}) as answer:
                (choice,) = (await answer.json())["choices"]
            assert {call["function"]["name"] for call in choice["message"]["tool_calls"]} == {"go"}
            assert ('"go"' in at.prompt(), '"look"' in at.prompt()) == (True, False)
            constraint = at.scheduler.submits[-1].sampling.constraint
            assert (constraint is not None, "look" in str(constraint)) == (mode == "required", False)
            allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "go"}]}
            async with at.http.post("/v1/responses", json=response | {"tool_choice": allowed}) as answer:
                made = await answer.json()
            assert {item["name"] for item in made["output"]} == {"go"}
            assert made["tool_choice"] == allowed
            assert '"look"' not in at.prompt()
        for wrong in (
            {"mode": "auto", "tools": []},
            {"mode": "auto", "tools": [go, nowhere]},
            {"mode": "maybe", "tools": [go]},
            {"mode": "auto", "tools": ["go"]},
            {"mode": "auto", "tools": [go], "more": 1},
            [],
        ):
            for path, body, choice in (
                ("/v1/chat/completions", chat, {"type": "allowed_tools", "allowed_tools": wrong}),
                ("/v1/chat/completions", chat, {"type": "allowed_tools", **dict(wrong)}),
                ("/v1/responses", response, {"type": "allowed_tools", "allowed_tools": wrong}),
                ("/v1/responses", response, {"type": "allowed_tools", **dict(wrong)}),
            ):
                async with at.http.post(path, json=body | {"tool_choice": choice}) as answer:
                    assert (answer.status, (await answer.json())["error"]["param"]) == (400, "tool_choice"), choice


async def test_an_item_that_is_named_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    """So the AI SDK sends what it has had, unless it is told that nothing is stored."""
    async with door(model_with(tmp_path / "model", HERMES)) as at:
        named = {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1"}]}
        async with at.http.post("/v1/responses", json=named) as answer:
            error = (await answer.json())["error"]
    assert error["param"] == "input[1].type"
    assert error["message"].startswith(
        "input[1].type: 'item_reference' is not allowed, since nothing is stored: send the item itself, as clients do that are "
        "told store: false; allowed: "
    )


async def test_the_tokens_of_a_response_are_counted_before_it_is_made(tmp_path: Path) -> None:
    async with door(model_with(tmp_path / "model", HERMES)) as at:
        at.write("Yes.")
        tools: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
        request: dict[str, Any] = {"model": "fake", "instructions": "i", "input": "x", "tools": tools}
        counted = await at.client.responses.input_tokens.count(**request)
        made = await at.client.responses.create(**request)
        assert made.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", made.usage.input_tokens)
        with pytest.raises(openai.NotFoundError):
            await at.client.responses.input_tokens.count(model="gpt", input="x")
        with pytest.raises(openai.BadRequestError, match="input: 1000000 characters cannot fit"):
            await at.client.responses.input_tokens.count(model="fake", input="x" * 1_000_000)


async def test_answers_are_what_the_clients_types_ask_for(tmp_path: Path) -> None:
    any_event: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
    form = {"format": {"type": "json_schema", "name": "Look", "schema": Look.model_json_schema()}}
    async with door(model_with(tmp_path / "model", HERMES + "</think>")) as at:
        tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
        for written, more in (
            ("<think>Hm.</think>Yes." + TWO_CALLS, {"tools": tools}),
            ('{"at": "sun"}', {"text": form}),
        ):
            at.write(written)
            body = {"input": "x", "max_output_tokens": 200} | more
            async with at.http.post("/v1/responses", json=body) as answer:
                whole = openai.types.responses.Response.model_validate(await answer.json())
            assert whole.text is not None
            assert whole.text.to_dict() == more.get("text", {"format": {"type": "text"}})
            async with at.http.post("/v1/responses", json=body | {"stream": True}) as answer:
                events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: ")]
            kinds = [any_event.validate_json(event).type for event in events]
            assert kinds[-1] == "response.completed"


async def test_what_an_answer_has_beside_its_content_may_be_repeated_in_a_part(tmp_path: Path) -> None:
    """So OpenAI's agents for JavaScript send an answer back."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{{ m.reasoning_content }}|{{ m.tool_calls | length }}{% endfor %}"
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    beside = {"role": "assistant", "refusal": None, "tool_calls": [call], "reasoning_content": "Hm."}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "I go.", **beside}], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "gone"},
    ]
    async with door(model_with(tmp_path / "model", template)) as at:
        at.write("Yes.")
        async with at.http.post("/v1/chat/completions", json={"messages": messages}) as answer:
            assert answer.status == 200, await answer.text()
        assert at.prompt() == "<user>x||0<assistant>I go.|Hm.|1<tool>gone||0"


async def test_parsed_answers_go_back_in(tmp_path: Path) -> None:
    async with door(model_with(tmp_path / "model", HERMES)) as at:
        asked: dict[str, Any] = {"role": "user", "content": "x"}
        for written, wanted in (
            (TWO_CALLS, {"tools": [openai.pydantic_function_tool(Look)]}),
            ('{"at": "sun"}', {"response_format": Look}),
        ):
            at.write(written)
            made = await at.client.chat.completions.parse(model="fake", messages=[asked], max_tokens=99, **wanted)
            message = made.choices[0].message
            calls = message.tool_calls or ()
            parsed = [call.function.parsed_arguments for call in calls] or [message.parsed]
            assert parsed == [Look(at="sun")] * len(parsed)
            answers = [{"role": "tool", "tool_call_id": call.id, "content": "round"} for call in calls]
            going_on: Any = [asked, message.to_dict(mode="json", warnings=False), *answers]
            await at.client.chat.completions.create(model="fake", messages=going_on, max_tokens=99)


async def test_one_call_alone_and_the_form_of_a_text_that_a_forced_call_leaves_out(tmp_path: Path) -> None:
    tool: Any = openai.pydantic_function_tool(Look)
    form: Any = {"type": "json_schema", "json_schema": {"name": "other", "schema": {"type": "integer"}}}
    async with door(model_with(tmp_path / "model", HERMES)) as at:
        chat: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 200}
        at.write(TWO_CALLS)
        for parallel in (True, False):
            more: dict[str, Any] = {"tools": [tool], "parallel_tool_calls": parallel}
            made = await at.client.chat.completions.create(**chat, **more)
            assert len(made.choices[0].message.tool_calls or ()) == 1 + parallel
            stream = await at.client.chat.completions.create(**chat, **more, stream=True)
            assert sum([len(chunk.choices[0].delta.tool_calls or ()) async for chunk in stream]) == 1 + parallel
            response = await at.client.responses.create(
                model="fake",
                input="x",
                max_output_tokens=200,
                tools=[{"type": "function", **tool["function"]}],
                parallel_tool_calls=parallel,
            )
            assert len(response.output) == 1 + parallel
        at.write('[{"name": "Look", "parameters": {"at": "sun"}}]')
        made = await at.client.chat.completions.create(
            **chat, tools=[tool], tool_choice="required", response_format=form
        )
        assert [call.function.name for call in made.choices[0].message.tool_calls or ()] == ["Look"]
        with pytest.raises(openai.BadRequestError, match="tool_choice: a call is not allowed together with another"):
            await at.client.chat.completions.create(
                **chat, tools=[tool], tool_choice="required", extra_body={"regex": "a"}
            )


async def test_a_thought_that_the_template_begins_behind_a_users_message_alone(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if messages[-1].role == 'user' %}<think>{% endif %}"
        "{{ '</think>' if x else '' }}"
    )
    async with door(model_with(tmp_path / "model", template)) as at:
        asked = {"role": "user", "content": "x"}
        for messages, written, thought in (
            ([asked], "Hm.</think>Yes.", "Hm."),
            ([asked, {"role": "tool", "content": "y"}], "Yes.", None),
        ):
            at.write(written)
            made = await at.client.chat.completions.create(model="", messages=messages, max_tokens=99)
            assert made.choices[0].message.content == "Yes."
            assert getattr(made.choices[0].message, "reasoning_content", None) == thought


async def test_tokenize_takes_all_that_a_prompt_depends_on(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}{{ messages[0].content }}{{ thinking }}{{ reasoning_effort }}<tool_call>"
    async with door(model_with(tmp_path / "model", template)) as at:
        at.write("Yes.")
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
        for more in (
            {"tools": TOOLS},
            {"tools": TOOLS, "tool_choice": "none"},
            {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "low"},
        ):
            async with at.http.post("/v1/chat/completions", json=chat | more | {"max_tokens": 9}) as answer:
                assert answer.status == 200, await answer.text()
            async with at.http.post("/tokenize", json=chat | more) as answer:
                assert (await answer.json())["tokens"] == at.prompt_ids()
        for wrong, field in (
            ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
            ({"tools": [{"type": "search"}]}, "tools[0].type"),
            ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ):
            async with at.http.post("/tokenize", json=chat | wrong) as answer:
                assert (await answer.json())["error"]["param"] == field
        async with at.http.post("/tokenize", json={"prompt": "x", "tools": TOOLS}) as answer:
            assert (await answer.json())["error"]["param"] == "tools"
