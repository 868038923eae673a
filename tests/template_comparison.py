"""Chat templates rendered by the gateway's dialect and by transformers: the same text, or the same refusal.

``CONVERSATIONS`` are what templates are tried on: with and without a system message, tools, calls, results, documents,
parts of content, and odd text. ``differences(source)`` lists where the two differ for one template. From ``tests/``,
``python template_comparison.py DIRECTORY...`` compares every ``*.jinja`` of some directories, such as those that
published models come with.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from headway_gateway.text.chat_templates import Renderer, TemplateSource, environment, names_read
from headway_gateway.text.conversation import Conversation

OWN = Path(__file__).parent / "chat_templates"

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

_A_CALL = re.compile(r"^\S+\(\) ")
"""What Python names in front of a wrong call: a function of the environment, whose name is its own affair."""
_USUAL = SPECIAL | {"add_generation_prompt": True}
_PLAIN = {"role", "content"}

Message = dict[str, Any]

_SYSTEM: Message = {"role": "system", "content": "  Be brief.\n"}
_ASK: Message = {"role": "user", "content": "What is <b>é😀\u2028</b> & \"that\"? '{{ 1 }}'"}
_ANSWER: Message = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA letter. "}
_MORE: Message = {"role": "user", "content": "And\n\nthen?"}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "weather", "arguments": {"town": "Zürich", "days": 2, "why": None, "exact": True}},
        }
    ],
}
_TWO_CALLS: Message = {
    "role": "assistant",
    "content": "Both.",
    "reasoning_content": "\nwhich one\n",
    "thinking": "\nwhich one\n",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "b", "arguments": {}}},
    ],
}
_RESULT: Message = {"role": "tool", "name": "weather", "tool_call_id": "abcdef123", "content": '{"sky": "clear"}'}
_PARTS: Message = {
    "role": "user",
    "content": [{"type": "text", "text": " Look: "}, {"type": "image"}, {"type": "text", "text": "é?"}],
}

TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather — of a <town>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "town": {"type": "string", "description": "Which?", "enum": ["Zürich", "Rome"]},
                    "days": {"type": ["integer", "null"], "default": 1},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["town"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "b", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
DOCUMENTS: list[Message] = [{"title": "One", "text": "first\ntext"}, {"title": "Zwei", "text": "»é«", "year": 2024}]

_GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}
CONVERSATIONS: dict[str, tuple[list[Message], dict[str, Any]]] = {
    "nothing": ([], {}),
    "ask": ([_ASK], {}),
    "ask, no generation": ([_ASK], {"add_generation_prompt": False}),
    "system": ([_SYSTEM, _ASK], {}),
    "only system": ([_SYSTEM], {}),
    "turns": ([_SYSTEM, _ASK, _ANSWER, _MORE], {}),
    "ends with an answer": ([_ASK, _ANSWER], {"add_generation_prompt": False}),
    "goes on": ([_SYSTEM, _ASK, _ANSWER], _GOES_ON),
    "goes on behind a space": ([_ASK, {"role": "assistant", "content": " The answer \n"}], _GOES_ON),
    "goes on from nothing": ([_ASK, {"role": "assistant", "content": ""}], _GOES_ON),
    "goes on with a question": ([_ASK], _GOES_ON),
    "goes on with what was said before": ([_ASK, _ANSWER, _ASK, _ANSWER], _GOES_ON),
    "two asks": ([_ASK, _MORE], {}),
    "begins with an answer": ([_ANSWER, _ASK], {}),
    "unknown role": ([_ASK, {"role": "oracle", "content": "42"}], {}),
    "no content": ([{"role": "user"}], {}),
    "no role": ([{"content": "x"}], {}),
    "empty content": ([{"role": "user", "content": ""}], {}),
    "parts": ([_SYSTEM, _PARTS], {}),
    "tools": ([_SYSTEM, _ASK], {"tools": TOOLS}),
    "tools, no ask": ([_SYSTEM], {"tools": TOOLS}),
    "call": ([_ASK, _CALL, _RESULT], {"tools": TOOLS}),
    "call, results, answer": ([_ASK, _CALL, _RESULT, _RESULT, _ANSWER, _MORE], {"tools": TOOLS}),
    "two calls": ([_SYSTEM, _ASK, _TWO_CALLS, _RESULT], {"tools": TOOLS}),
    "call without tools": ([_ASK, _CALL, _RESULT], {}),
    "result of an object": ([_ASK, _CALL, _RESULT | {"content": {"content": 1.5, "é": []}}], {"tools": TOOLS}),
    "no tools but a list": ([_ASK], {"tools": []}),
    "documents": ([_SYSTEM, _ASK], {"documents": DOCUMENTS}),
    "settings": ([_ASK], {"enable_thinking": False, "date_string": "1 May 2025", "image_token": "<i>", "plugins": ["python", "x"]}),
}  # fmt: skip


def differences(source: str) -> Iterator[str]:
    """For every conversation where the two are not the same, a line that begins with its name."""
    for name, (messages, more) in CONVERSATIONS.items():
        given = _USUAL | more
        theirs = outcome(rendered_by_transformers, source, messages, given)
        ours = outcome(rendered, source, messages, given)
        # Where a template changes a content, transformers does not go on with it; here the model goes on with what is shown.
        if ours != theirs and not theirs.startswith("ValueError continue_final_message"):
            yield f"{name}: transformers {theirs!r}, here {ours!r}"


def rendered(source: str, messages: list[Message], given: dict[str, Any]) -> str:
    """As the gateway renders what a caller can send it; what it cannot, in the same environment."""
    plain = [(message.get("role"), message.get("content")) for message in messages if message.keys() == _PLAIN]
    settings = {name: value for name, value in given.items() if name not in _USUAL}
    asks, continues = given.get("add_generation_prompt", False), settings.pop("continue_final_message", False)
    if "tools" not in given and len(plain) == len(messages) and all(isinstance(content, str) for _, content in plain):
        renderer, names = Renderer(TemplateSource(source, SPECIAL)), names_read(environment().parse(source))
        # Others are refused here, and change nothing there.
        read = {name: value for name, value in settings.items() if name in names}
        return renderer.render(Conversation(tuple(plain), variables=json.dumps(read), asks=asks, continues=continues))
    variables = {"tools": None, "documents": None} | given
    return environment().from_string(source).render(messages=messages, **variables)


def rendered_by_transformers(source: str, messages: list[Message], given: dict[str, Any]) -> str:
    """As ``apply_chat_template`` renders it."""
    ((text,), _) = render_jinja_template([messages], chat_template=source, **given)
    return str(text)


def outcome(render: Callable[..., str], *arguments: Any, **more: Any) -> str:
    """The text; or the kind of the error and what it says."""
    try:
        return "text " + render(*arguments, **more)
    except Exception as error:  # noqa: BLE001  # Whatever a template raises is what is compared.
        return f"{type(error).__name__} {_A_CALL.sub('', str(error))}"


def main(directories: list[str]) -> int:
    """Compare all templates of ``directories``, a line for each; returns how many differ."""
    num_different = 0
    for path in (path for directory in directories for path in sorted(Path(directory).rglob("*.jinja"))):
        source = path.read_text(encoding="utf-8")
        found = list(differences(source))
        num_different += bool(found)
        lines = (f"{path.name}: {len(CONVERSATIONS)} conversations, {len(found)} different", *found)
        sys.stdout.write("\n  ".join(lines) + "\n")
    return num_different


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:] or [str(OWN)])))
