"""Chat templates are what they are in transformers: the dialect, the variables, and which file is meant."""

# ruff: noqa: RUF001 (marks of DeepSeek have full-width lines)

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from checkpoints import tokenizer
from headway_gateway.text.conversation import Conversation
from headway_gateway.text.tokenization import PromptError, load_text_model
from template_comparison import OWN, differences, outcome, rendered, rendered_by_transformers

CHAT = (("system", "Be brief."), ("user", "é <x>"), ("assistant", "no"), ("user", "why"))
ODD_TEMPLATES = (
    "{% generation %}",
    "{% endgeneration %}",
    "{% generation x %}{% endgeneration %}",
    "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "{% generation %}{% generation %}{{ messages | length }}{% endgeneration %}{% endgeneration %}",
    "{% macro f() %}{% generation %}{{ caller() }}{% endgeneration %}{% endmacro %}{% call f() %}x{% endcall %}",
    "{{ 1 | nope }}",
    "{% if x is nope %}{% endif %}",
    "{% do 1 %}",
    "{% include 'x' %}",
    "{{ messages.append(1) }}",
    "{% set messages[0].role = 'x' %}",
    "{{ raise_exception() }}",
    "{{ raise_exception('a', 'b') }}",
    "{{ {} | tojson(skipkeys=true) }}",
    "{{ undefined_name | tojson }}",
    "{{ messages | tojson(true, 2, (',', ':'), true) }}",
    "{{ strftime_now(format='%Y') }}",
    "{{ strftime_now('%Z%z') }}",
    "{{ tools }} {{ documents }} {{ tools is none }} {{ bos_token }} {{ unk_token is defined }}",
    "{{ namespace(a=1, self=2).self }} {{ namespace({'b': 3}, c=4).b }}",
    "",
)


@pytest.mark.parametrize("path", sorted(OWN.glob("*.jinja")), ids=lambda path: path.stem)
def test_a_template_of_a_familys_kind_is_rendered_as_by_transformers(path: Path) -> None:
    assert list(differences(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("source", ODD_TEMPLATES)
def test_an_odd_template_is_what_it_is_in_transformers(source: str) -> None:
    assert list(differences(source)) == []


@pytest.mark.parametrize("name", ["_x", "__class__", "_Namespace__attrs"])
@pytest.mark.parametrize("source", ["{{ namespace(NAME=1) }}", "{% set n = namespace() %}{% set n.NAME = 1 %}"])
def test_a_namespace_holds_no_name_of_pythons_own_as_in_transformers(name: str, source: str) -> None:
    template = source.replace("NAME", name)
    theirs, ours = (outcome(render, template, [], {}) for render in (rendered_by_transformers, rendered))
    assert theirs.partition(" ")[0] == ours.partition(" ")[0] == "SecurityError"


def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "{{ messages[0].content }}{% if thinking %}{{ documents }}{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    model = load_text_model(tmp_path)
    assert model.render_chat(Conversation((("user", "x"),), variables='{"thinking": 1, "documents": [2]}')) == "x[2]"
    with pytest.raises(PromptError, match="it has no variable 'thinkng'; it reads documents, thinking"):
        model.render_chat(Conversation((("user", "x"),), variables='{"thinkng": 1}'))


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALLED = [
    ("user", "Look."),
    (
        "assistant",
        "",
        json.dumps({"tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}]}),
    ),
    ("tool", "round"),
]
PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none"
    " %}{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{{ '<|assistant|>' }}"
)
OLDER_DEEPSEEK = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{% for tool in message['tool_calls'] %}{{ '<call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments']"
    " + '<end>' }}{% endfor %}{% else %}{{ '<' + message['role'] + '>' + message['content'] }}{% endif %}{% endfor %}"
)
ARGUMENTS = "{% for c in messages[1].tool_calls %}{% set a = c.function.arguments %}{{ c.function }}{{ a }}{{ a ~ '!' }}{{ a | tojson }}{{ a is mapping }}{{ a.at }}{% endfor %}"


def test_calls_are_rendered_by_templates_that_want_their_arguments_as_text(tmp_path: Path) -> None:
    assert (
        rendered_with(tmp_path / "a", OLDER_DEEPSEEK, CALLED) == '<user>Look.<call>look<sep>{"at": "é"}<end><tool>round'
    )
    with pytest.raises(PromptError, match="it does not show tools; it reads messages"):
        rendered_with(tmp_path / "b", OLDER_DEEPSEEK, CALLED, TOOLS)
    text = '{"at": "é"}'
    shown = "{'name': 'look', 'arguments': {'at': 'é'}}"
    assert rendered_with(tmp_path / "c", ARGUMENTS, CALLED) == f"{shown}{text}{text}!{text}Trueé"


def test_tools_and_calls_reach_a_template_that_has_them_in_messages(tmp_path: Path) -> None:
    tools = '<|tool|>[{"name": "look", "parameters": {"type": "object"}}]<|/tool|><|end|>'
    chat = (
        '<|user|>Look.<|end|><|assistant|><|tool_call|>[{"name": "look", "arguments": {"at": "é"}}]<|/tool_call|><|end|>'
        "<|tool|>round<|end|><|assistant|>"
    )
    for place, (before, system) in enumerate(
        (([], "You are a helpful assistant with some tools."), ([("system", "Hi.")], "Hi."))
    ):
        found = rendered_with(tmp_path / f"{place}", PHI, [*before, *CALLED], TOOLS)
        assert found == f"<|system|>{system}{tools}{chat}"
    assert rendered_with(tmp_path / "plain", PHI, [("user", "Hi.")]) == "<|user|>Hi.<|end|><|assistant|>"


WRITTEN = {
    "granite": ("{{ '<|tool_call|>' if tools else '' }}", '<|tool_call|>[{"name": "look", "arguments": {"at": "é"}}]'),
    "smollm3": (
        "{{ '<tool_call>' if xml_tools else '' }}",
        '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>',
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_written_into_the_content_for_a_template_that_shows_none(tmp_path: Path, name: str) -> None:
    taught, written = WRITTEN[name]
    mark = written.partition(">")[0] + ">"
    template = taught + "{% for m in messages %}{{ '|' + m.content }}{% endfor %}"
    assert rendered_with(tmp_path / "a", template, CALLED, TOOLS) == f"{mark}|Look.|{written}|round"
    said = [CALLED[0], ("assistant", "Yes.", CALLED[1][2])]
    assert rendered_with(tmp_path / "b", template, said) == f"|Look.|Yes.{written}"


def test_a_template_that_knows_of_no_content_but_measures_it_gets_an_empty_one(tmp_path: Path) -> None:
    template = (
        "{% set m = messages[1] %}{% if m.content is none or m.content == '' %}{{ m.content | length }}{% endif %}"
        "{{ m.tool_calls | length }}"
    )
    assert rendered_with(tmp_path / "a", template, CALLED) == "01"


def test_a_developer_is_the_system_to_a_template_that_does_not_know_it(tmp_path: Path) -> None:
    messages = [("developer", "Be brief."), ("user", "x")]
    of_any_role = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    of_known_roles = (
        "{% for m in messages %}{% if m.role in ['system', 'user'] %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert rendered_with(tmp_path / "a", of_any_role, messages) == "<system>Be brief.<user>x"
    assert rendered_with(tmp_path / "b", of_known_roles, messages) == "Be brief.x"
    knows = of_any_role + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert rendered_with(tmp_path / "c", knows, messages) == "<developer>Be brief.<user>x!"


def test_tools_of_deepseek_are_in_the_systems_message_as_its_card_says(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<' + m['role'] + '>' + (m['content'] or '') }}{% for tool in m['tool_calls'] %}"
        "{{ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}{% endfor %}{% endfor %}"
    )
    called = '<user>Look.<assistant>look<｜tool▁sep｜>{"at": "é"}<tool>round'
    for place, (before, system) in enumerate((([], "<system>"), ([("system", "Hi.")], "<system>Hi.\n\n"))):
        found = rendered_with(tmp_path / f"{place}", template, [*before, *CALLED], TOOLS)
        assert found.startswith(
            f"{system}## Tools\nYou have access to the following tools:\n\n### look\nDescription: \n\n"
        )
        assert '\n\nParameters: {"type": "object"}\n\nIMPORTANT: ' in found
        assert "tool_call_arguments<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>\n\nWhere:\n" in found
        assert found.endswith("without separators or spaces\n" + called)
    assert rendered_with(tmp_path / "plain", template, CALLED) == called


def rendered_with(
    directory: Path, template: str, chat: list[tuple[str, ...]], tools: list[dict[str, Any]] | None = None
) -> str:
    directory.mkdir()
    tokenizer().backend_tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load_text_model(directory).render_chat(Conversation(tuple(chat), json.dumps(tools) if tools else ""))


BOS = {"__type": "AddedToken", "content": "<B>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}  # fmt: skip
SHOWS_TOKENS = (
    "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ boi }}|{{ sep_token is defined }}|{{ messages | length }}"
)
FILES: dict[str, dict[str, Any]] = {
    "an entry": {"tokenizer_config.json": {"chat_template": "E{{ messages[1].content }}"}},
    "a file": {"chat_template.jinja": "F{{ messages[0].role }}"},
    "a file with line ends of Windows": {"chat_template.jinja": "F\r\n{% if true %}\r\n x\r\n{% endif %}\r\n"},
    "a file beside an entry": {"tokenizer_config.json": {"chat_template": "E"}, "chat_template.jinja": "F"},
    "named entries": {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "T{{ tools }}"}, {"name": "default", "template": "D"}]}},
    "the same name twice": {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "1"}, {"name": "default", "template": "2"}]}},
    "no default entry": {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "T{{ tools }}"}]}},
    "an object of entries": {"tokenizer_config.json": {"chat_template": {"default": "D", "rag": "R"}}},
    "more files": {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "T{{ tools }}"},
    "more files beside an entry": {"tokenizer_config.json": {"chat_template": "E"}, "additional_chat_templates/tool_use.jinja": "T{{ tools }}"},
    "a default among more files": {"chat_template.jinja": "F", "additional_chat_templates/default.jinja": "A"},
    "an empty directory": {"tokenizer_config.json": {"chat_template": "E"}, "additional_chat_templates/readme.txt": "T"},
    "an empty template": {"chat_template.jinja": ""},
    "none": {"tokenizer_config.json": {}},
    "a null": {"tokenizer_config.json": {"chat_template": None}},
    "tokens": {"chat_template.jinja": SHOWS_TOKENS, "tokenizer_config.json": {
        "bos_token": BOS, "eos_token": "<E>", "sep_token": None, "image_token": "<I>", "add_bos_token": True}},
    "named tokens": {"chat_template.jinja": SHOWS_TOKENS, "tokenizer_config.json": {
        "eos_token": "<E>", "extra_special_tokens": {"image_token": "<I>", "boi": "<J>"}}},
    "a list of more tokens": {"chat_template.jinja": SHOWS_TOKENS, "tokenizer_config.json": {
        "additional_special_tokens": ["<X>"], "eos_token": "<E>"}},
    "tokens in the older file": {"chat_template.jinja": SHOWS_TOKENS, "tokenizer_config.json": {"bos_token": "<C>"},
        "special_tokens_map.json": {"bos_token": {"content": "<M>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}, "eos_token": "<E>"}},
    "the older file beside a list of added tokens": {"chat_template.jinja": SHOWS_TOKENS,
        "tokenizer_config.json": {"bos_token": "<C>", "added_tokens_decoder": {}}, "special_tokens_map.json": {"bos_token": "<M>", "eos_token": "<E>"}},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_checkpoints_files_mean_what_they_mean_to_transformers(tmp_path: Path, name: str) -> None:
    tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    files = {"tokenizer_config.json": {}} | FILES[name]
    files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast"} | files["tokenizer_config.json"]
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / file).write_text(text, encoding="utf-8", newline="")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_text_model(tmp_path)
    chat = [{"role": role, "content": content} for role, content in CHAT]
    expected = outcome(theirs.apply_chat_template, chat, add_generation_prompt=True, tokenize=False)
    if expected.startswith("text "):
        assert outcome(ours.render_chat, Conversation(CHAT)) == expected
        tools = [{"type": "function", "function": {"name": "f"}}]
        with_tools = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
        found = outcome(ours.render_chat, Conversation(CHAT, json.dumps(tools)))
        # transformers leaves tools out in silence where the template does not read them.
        assert found == f"text {with_tools}" if with_tools.startswith("T") else "it does not show tools; it re" in found
    else:
        assert not ours.has_chat_template
        assert bool(ours.template_fault) == ("no default specified" in expected)
        with pytest.raises(PromptError, match="send text or token_ids"):
            ours.render_chat(Conversation(CHAT))
