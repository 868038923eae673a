"""Chat templates are what they are in transformers: the dialect, the variables, and which file is meant."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from checkpoints import tokenizer
from headway_gateway.text.tokenization import PromptError, load_text_model
from template_comparison import OWN, differences, outcome, rendered, rendered_by_transformers

CHAT = [("system", "Be brief."), ("user", "é <x>"), ("assistant", "no"), ("user", "why")]
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
    assert model.render_chat([("user", "x")], variables='{"thinking": 1, "documents": [2]}') == "x[2]"
    with pytest.raises(PromptError, match="it has no variable 'thinkng'; it reads documents, thinking"):
        model.render_chat([("user", "x")], variables='{"thinkng": 1}')


BOS = {"__type": "AddedToken", "content": "<B>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}  # fmt: skip
SHOWS_TOKENS = (
    "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ boi }}|{{ sep_token is defined }}|{{ messages | length }}"
)
FILES: dict[str, dict[str, Any]] = {
    "an entry": {"tokenizer_config.json": {"chat_template": "E{{ messages[1].content }}"}},
    "a file": {"chat_template.jinja": "F{{ messages[0].role }}"},
    "a file with line ends of Windows": {"chat_template.jinja": "F\r\n{% if true %}\r\n x\r\n{% endif %}\r\n"},
    "a file beside an entry": {"tokenizer_config.json": {"chat_template": "E"}, "chat_template.jinja": "F"},
    "named entries": {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}},
    "the same name twice": {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "1"}, {"name": "default", "template": "2"}]}},
    "no default entry": {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "T"}]}},
    "an object of entries": {"tokenizer_config.json": {"chat_template": {"default": "D", "rag": "R"}}},
    "more files": {"chat_template.jinja": "F", "additional_chat_templates/tool_use.jinja": "T"},
    "more files beside an entry": {"tokenizer_config.json": {"chat_template": "E"}, "additional_chat_templates/tool_use.jinja": "T"},
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
        assert outcome(ours.render_chat, CHAT) == expected
        tools = [{"type": "function", "function": {"name": "f"}}]
        with_tools = theirs.apply_chat_template(chat, tools=tools, add_generation_prompt=True, tokenize=False)
        assert ours.render_chat(CHAT, json.dumps(tools)) == with_tools
    else:
        assert not ours.has_chat_template
        assert bool(ours.template_fault) == ("no default specified" in expected)
        with pytest.raises(PromptError, match="send text or token_ids"):
            ours.render_chat(CHAT)
