"""Loading a model directory's tokenizer files, prompts, chat templates."""

import asyncio
import gc
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import grpc
import pytest
from tokenizers import AddedToken, Tokenizer

import headway
from fake_scheduler import MODEL
from headway_gateway.requests.prompt_encoding import PromptEncoder
from headway_gateway.statuses import CallRefusedError
from headway_gateway.text import bounded_process
from headway_gateway.text.conversation import Conversation
from headway_gateway.text.encoding_lanes import EncodingLanes
from headway_gateway.text.template_process import ChatTemplate, TemplateError
from headway_gateway.text.tokenization import PromptError, TextModel, TokenizerFilesError, load_text_model
from headway_proto import generation_pb2 as api
from unit.gateway.test_gateway_detokenization import byte_fallback, demo, metaspace

DEMO = Path(headway.__file__).parent / "demo_model"


@pytest.fixture
def directory(tmp_path):
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    return tmp_path


def write_config(directory: Path, **entries: object) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(entries))


def with_template(directory: Path, template: str, **entries: object):
    write_config(directory, chat_template=template, **entries)
    return load_text_model(directory)


@pytest.mark.parametrize(
    "text", ["", "\u0000", "a\u0000b", "\r\n\t", "🙂" * 100, "e\u0301", "<|endoftext|>x", "\ufffd"]
)
def test_odd_texts_come_back(text):
    model = load_text_model(DEMO)
    detokenizer = model.new_detokenizer()
    ids = model.encode(text)
    assert detokenizer.push(ids) + detokenizer.finish() == model.decode(ids)
    if "<|" not in text:
        assert model.decode(ids) == text


def test_added_tokens_may_be_more_than_the_model_knows(directory):
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    width = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"vocab_size": width}))
    model = load_text_model(directory)
    assert (model.vocab_size, model.encode("a<image>")[-1]) == (width, width)
    for config in ({"vocab_size": 9, "text_config": {"vocab_size": width}}, {"vocab_size": 9, "text_config": {}}):
        (directory / "config.json").write_text(json.dumps(config))
        assert load_text_model(directory).vocab_size == width
    (directory / "config.json").write_text(json.dumps({"vocab_size": width - 1}))
    with pytest.raises(TokenizerFilesError, match=f"{width} token ids; allowed: at most {width - 1}, the logits"):
        load_text_model(directory)


def listed(content: str, **flags: bool) -> dict[str, object]:
    plain = {"special": False, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {"content": content, **plain, **flags}


@pytest.mark.parametrize(
    ("config", "text", "shown"),
    [
        ({}, "a<|im_stop|>b", "a<|im_stop|>b"),
        ({"eos_token": "<|im_stop|>"}, "a<|im_stop|>b", "ab"),
        ({"pad_token": {"content": "<|im_stop|>", "special": False}}, "a<|im_stop|>b", "ab"),
        ({"eos_token": "<nowhere>"}, "a<nowhere>b", "a<nowhere>b"),
        ({"added_tokens_decoder": {"@0": listed("<|im_stop|>", special=True)}}, "a<|im_stop|>b", "ab"),
        ({"added_tokens_decoder": {"@0": listed("<|im_stop|>", rstrip=True)}}, "a<|im_stop|>  b", "a<|im_stop|>b"),
        ({"added_tokens_decoder": {"@0": listed("<|im_stop|>")}, "eos_token": "<|im_stop|>"}, "a<|im_stop|>b", "ab"),
        ({"added_tokens_decoder": {"0": listed("<|endoftext|>")}}, "a<|endoftext|>b", "ab"),
        ({"added_tokens_decoder": {"@2": listed("<b>"), "@1": listed("<a>", special=True)}}, "x<a>y<b>", "xy<b>"),
        ({"added_tokens_decoder": {"@9": listed("<a>", special=True)}}, "x<a>y", "x<a>y"),
        ({"added_tokens_decoder": {"x": 1, "1": 2, "2": {}, "9" * 5000: listed("<a>"), "@1": listed("<a>", special=3)}},
         "x<a>y", "x<a>y"),
        ({"added_tokens_decoder": [1]}, "x<a>y", "x<a>y"),
    ],
)  # fmt: skip
def test_the_configuration_may_say_more_of_added_tokens(directory, config, text, shown):
    """``@`` stands before an id counted from the first added token. transformers gives the same, except for malformed files."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    first = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken("<|im_stop|>", special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, dict):
        ids = {str(first + int(key[1:])) if key[0] == "@" else key: entry for key, entry in entries.items()}
        config = config | {"added_tokens_decoder": ids}
    write_config(directory, **config)
    model = load_text_model(directory)
    ids = model.encode(text)
    detokenizer = model.new_detokenizer()
    assert detokenizer.push(ids) + detokenizer.finish() == model.decode(ids) == shown


@pytest.mark.parametrize("make", [demo, byte_fallback])
def test_the_bytes_of_tokens_are_those_of_the_text(make):
    model = TextModel(make(), None)
    text = "the gap é日🙂\ufffd the"
    content = b"".join(map(model.bytes_of_token, model.encode(text)))
    assert content.decode().removeprefix(" ") == text, "SentencePiece begins with a space"


@pytest.mark.parametrize("make", [byte_fallback, metaspace])
def test_a_tokens_text_is_that_inside_a_text(make):
    """Indentation is tokens of spaces alone. Some decoders drop one before a first word, or all."""
    model = TextModel(make(), None)
    for token, text in (("▁", " "), ("▁▁", "  "), ("▁gap", " gap"), ("the", "the")):
        token_id = model._tokenizer.token_to_id(token)
        assert model.text_of_token(token_id) == text
        assert model.bytes_of_token(token_id) == text.encode()


def test_a_lone_surrogate_is_refused():
    with pytest.raises(PromptError, match="lone surrogate"):
        load_text_model(DEMO).encode("a\ud800b")


def test_a_text_that_cannot_fit_is_refused_by_its_length():
    model = load_text_model(DEMO)
    model.require_plausible_length(1000, 1023)
    with pytest.raises(PromptError, match=r"10000000 characters cannot fit; allowed: at most 1023 tokens"):
        model.require_plausible_length(10_000_000, 1023)


def test_the_demo_models_chat_template():
    text = load_text_model(DEMO).render_chat(Conversation((("user", "What is a list?"),)))
    assert text == "<|im_start|>user\nWhat is a list?<|im_end|>\n<|im_start|>assistant\n"


def test_template_dialect(directory):
    model = with_template(
        directory,
        "{{ bos_token }}{% for m in messages %}\n"
        "  {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "[{{ m.role }}]{{ {'t': m['content']} | tojson }}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}",
        bos_token={"content": "<B>"},
    )
    text = model.render_chat(Conversation((("user", "<é>"), ("tool", "x"))))
    assert text == '<B>[user]{"t": "<é>"}\n4'


def test_the_template_file_wins_and_named_templates_have_a_default(directory):
    write_config(directory, chat_template=[{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}])
    assert load_text_model(directory).render_chat(Conversation((("user", "x"),))) == "D"
    (directory / "chat_template.jinja").write_text("from the file")
    assert load_text_model(directory).render_chat(Conversation((("user", "x"),))) == "from the file"


def test_a_template_may_refuse_messages(directory):
    model = with_template(directory, "{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(PromptError, match=r"^the chat template refuses these messages: roles must alternate$"):
        model.render_chat(Conversation((("user", "x"),)))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list }}",
        "{{ undefined_thing.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_hostile_or_broken_template_only_refuses(directory, template):
    model = with_template(directory, template)
    with pytest.raises(PromptError, match="chat template"):
        model.render_chat(Conversation((("user", "x"),)))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took too long"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "took too long",
        ),
        ("{% set x = ['a'] %}{% for i in range(40) %}{% set x = x + x %}{% endfor %}{{ 'a' * 10 ** 10 }}", "fails on"),
        ("{{ messages[0].content * 10 ** 10 }}", "fails on these messages: MemoryError"),
        ("{{ 'x'.join(messages[0].content * 10 ** 6) | length }}{{ '%01000000000d' % 1 }}", "fails on"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages: RecursionError"),
        ("{% for a in range(99999) %}{{ messages[0].content * 999 }}{% endfor %}", "fails on these messages: Overflow"),
    ],
)
def test_a_template_that_would_not_end_or_would_fill_the_memory_only_refuses(template, words):
    try:
        hostile = ChatTemplate(template, {}, most_render_s=2.0)
    except TemplateError:
        return  # jinja2 computes constants while it compiles, which is just as bounded.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    with pytest.raises(TemplateError, match=words):
        hostile.render(Conversation((("user", "x" * 100),)))
    assert time.monotonic() - started < 6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    with pytest.raises(TemplateError, match=words):  # And so it does the next time, in a new process where need be.
        hostile.render(Conversation((("user", "x" * 100),)))


def test_a_template_process_that_dies_is_replaced_and_none_is_left():
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(Conversation((("user", "é\u2028"),))) == "é\u2028"
    process = template._renderer.process
    process.kill()
    assert template.render(Conversation((("user", "x"),))) == "x"
    assert template.render(Conversation((("user", "y"),))) == "y"
    process = template._renderer.process
    del template
    gc.collect()
    assert process.returncode is not None


def test_a_template_that_takes_too_long_is_told_as_a_failure_of_this_time_and_not_as_a_verdict(directory, monkeypatch):
    """A machine that stands still while a chat is rendered."""
    model = with_template(directory, "{{ messages[0].content }}")
    encoder = PromptEncoder(model, EncodingLanes(model, 1))
    chat = api.Chat(messages=[api.ChatMessage(role="user", content="x")])
    model._chat_template._most_render_s = 0.3
    os.kill(model._chat_template._renderer.process.pid, signal.SIGSTOP)
    with pytest.raises(CallRefusedError) as caught:
        asyncio.run(encoder.encode(api.GenerateRequest(chat=chat), "chat", MODEL))
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    assert caught.value.message == (
        "chat: the chat template took too long this time: no answer came in time; try again"
    )
    assert caught.value.retry_after_s == 1.0
    model._chat_template._most_render_s = 30.0
    assert asyncio.run(encoder.encode(api.GenerateRequest(chat=chat), "chat", MODEL))


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("tokenizer_config.json", '{"chat_template": 3}', "tokenizer_config.json: chat_template is a int; allowed: a "),
        ("tokenizer_config.json", '{"chat_template": "{{ 1 | nope }}"}', "tokenizer_config.json: it cannot be compiled: No fi"),
        ("tokenizer_config.json", '{"chat_template": [{"name": [], "template": "x"}, 2]}', "no chat template is called default"),
        ("tokenizer_config.json", '{"chat_template": "\\ud800"}', "it cannot render a lone surrogate"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja: cannot be read (not UTF-8)"),
        ("chat_template.jinja", "{% nope %}", "chat_template.jinja: it cannot be compiled: Encountered unknown tag"),
        ("chat_template.jinja", "{{ " + "(" * 5000, "chat_template.jinja: it cannot be compiled: "),
        ("chat_template.jinja", None, "chat_template.jinja: cannot be read (Is a directory)"),
    ],
)  # fmt: skip
def test_a_template_that_cannot_be_used_takes_only_chats_with_it(directory, name, content, fault):
    if content is None:
        (directory / name).mkdir()
    else:
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    model = load_text_model(directory)
    assert fault in model.template_fault
    assert "\n" not in model.template_fault
    assert not model.has_chat_template
    assert model.encode("texts need none")
    for encode in (model.encode_chat, model.encode_chat_prefix):
        with pytest.raises(
            PromptError, match=r"^this model's chat template cannot be used \(.*\); send text or token_"
        ):
            encode(Conversation((("user", "x"),)), max_tokens=10)


def test_a_template_that_is_slow_to_start_once_is_used_by_the_next_chat(monkeypatch):
    with monkeypatch.context() as slow:
        slow.setattr(bounded_process, "_MOST_START_S", 0.0)
        template = ChatTemplate("{{ messages[0].content }}", {})
        with pytest.raises(TemplateError, match="took too long"):
            template.render(Conversation((("user", "x"),)))
    assert template.render(Conversation((("user", "x"),))) == "x"


def test_without_a_template_chats_are_refused(directory):
    model = load_text_model(directory)
    assert not model.has_chat_template
    with pytest.raises(PromptError, match="no chat template"):
        model.encode_chat(Conversation((("user", "x"),)), max_tokens=10)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "cannot be read"),
        ("tokenizer.json", "{", "not a usable tokenizer"),
        ("tokenizer.json", '{"model": {"type": "Unheard"}}', "not a usable tokenizer"),
        ("tokenizer_config.json", "[1]", "holds a list; allowed: a JSON object"),
        ("tokenizer_config.json", "{", "not readable JSON"),
        ("tokenizer_config.json", "", "not readable JSON"),
        ("special_tokens_map.json", "[", "special_tokens_map.json: not readable JSON"),
    ],
)
def test_bad_files_are_told_in_one_line(directory, name, content, message):
    path = directory / name
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(TokenizerFilesError) as refusal:
        load_text_model(directory)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_directory_in_the_place_of_a_file_is_called_one(directory, name):
    (directory / name).unlink(missing_ok=True)
    (directory / name).mkdir()
    with pytest.raises(TokenizerFilesError, match=rf"{name}: cannot be read \(Is a directory\)"):
        load_text_model(directory)


def test_a_missing_directory(tmp_path):
    with pytest.raises(TokenizerFilesError, match="is not a directory"):
        load_text_model(tmp_path / "nowhere")


def test_truncation_and_padding_of_the_file_are_switched_off(directory):
    definition = json.loads((directory / "tokenizer.json").read_text())
    definition["truncation"] = {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    (directory / "tokenizer.json").write_text(json.dumps(definition))
    assert len(load_text_model(directory).encode("one two three four five six seven eight")) > 4
