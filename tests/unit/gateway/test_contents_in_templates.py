"""Texts and parts of texts in chats, as templates of models that see pictures want them: as transformers renders parts."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from transformers.models.clip import CLIPImageProcessorPil
from transformers.models.llava import LlavaProcessor
from transformers.utils.chat_template_utils import render_jinja_template

from checkpoints import tokenizer
from headway_gateway.openai.bodies import ChatBody, MessageBody, ResponsesBody, read
from headway_gateway.openai.translation import add_messages
from headway_gateway.requests.prompt_encoding import conversation_of
from headway_gateway.requests.validation import chat_violations
from headway_gateway.statuses import CallRefusedError
from headway_gateway.text.conversation import Conversation
from headway_gateway.text.tokenization import load_text_model
from headway_proto import generation_pb2 as api

LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}<image>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
TEXTS = "{% for m in messages %}{{ m['content'] | trim }}|{% endfor %}"
ODD = "{% for m in messages %}{{ m }}{% endfor %}"
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "text", "text": "type "}]},
    {"role": "assistant", "content": "no"},
    {"role": "user", "content": [{"type": "text", "text": "why"}]},
]


def rendered(directory: Path, template: str) -> str:
    tokenizer().backend_tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    chat = api.Chat()
    add_messages(chat, [read(json.dumps(message).encode(), MessageBody) for message in CHAT])
    assert not list(chat_violations(chat))
    return load_text_model(directory).render_chat(conversation_of(chat))


def theirs(template: str, messages: list[dict[str, Any]]) -> str:
    ((text,), _) = render_jinja_template([messages], chat_template=template, add_generation_prompt=True)
    return text


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}] if isinstance(content, str) else content}


@pytest.mark.parametrize("template", [LLAVA, SMOLVLM, QWEN])
def test_a_template_of_parts_gets_them(tmp_path: Path, template: str) -> None:
    assert rendered(tmp_path, template) == theirs(template, [in_parts(message) for message in CHAT])


def test_a_template_of_texts_gets_parts_in_lines(tmp_path: Path) -> None:
    assert rendered(tmp_path, TEXTS) == "Be brief.|é\ntype|no|why|"


def test_a_template_that_shows_messages_as_they_are_gets_texts(tmp_path: Path) -> None:
    assert rendered(tmp_path, ODD).startswith("{'role': 'system', 'content': 'Be brief.'}")


@pytest.mark.parametrize(
    ("part", "kind"), [({"type": "image", "url": "x"}, "'image'"), ({"type": "input_audio"}, "'input_audio'"), (3, "3")]
)
def test_other_parts_are_refused(part: object, kind: str) -> None:
    more = json.dumps({"content": [{"type": "text", "text": "what?"}, part]})
    chat = ParseDict({"messages": [{"role": "user", "more": more}]}, api.Chat())
    ((field, reason),) = chat_violations(chat)
    assert (field, reason) == (
        "chat.messages[0].more",
        f"content has a part of type {kind}; allowed: parts of type text",
    )


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file", "input_file", "video_url"])
def test_pictures_and_sounds_are_refused_by_the_name_of_their_kind(kind: str) -> None:
    part = {"type": kind, kind: {"url": "x"}}
    for body, field, of_kind in (
        ({"messages": [{"role": "user", "content": [part]}]}, "messages[0].content[0].type", ChatBody),
        ({"input": [{"role": "user", "content": [part]}]}, "input[0].content[0].type", ResponsesBody),
    ):
        with pytest.raises(CallRefusedError) as refused:
            read(json.dumps(body).encode(), of_kind)
        assert f"{field}: '{kind}' is not allowed, since only text is read here; allowed: input_text, " in str(
            refused.value
        )


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json", "chat_template.jinja"])
def test_the_template_of_a_processor_is_the_one_that_transformers_takes(tmp_path: Path, file: str) -> None:
    processor = LlavaProcessor(CLIPImageProcessorPil(), tokenizer(), patch_size=4, chat_template=LLAVA)
    processor.save_pretrained(tmp_path)
    path = tmp_path / "chat_template.jinja"
    if file != path.name:
        path.unlink()
        values = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
        (tmp_path / file).write_text(json.dumps(values | {"chat_template": LLAVA}))
        (tmp_path / "chat_template.jinja").write_text("another")
    ours = load_text_model(tmp_path).render_chat(Conversation((("user", "why"),)))
    wanted = LlavaProcessor.from_pretrained(tmp_path).apply_chat_template(
        [in_parts({"role": "user", "content": "why"})], add_generation_prompt=True, tokenize=False
    )
    assert ours == wanted == "USER: why ASSISTANT:"
