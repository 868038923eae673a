"""Tools, calls and roles as a chat template wants them, where published templates differ.

Owns: what a template needs, told by its text. Must not know: how it is compiled and run.
"""

# ruff: noqa: RUF001 (marks of DeepSeek have full-width lines)

import json
import re
from collections.abc import Container, Iterable
from typing import Any, TypeAlias

from headway_gateway.text.content_in_templates import ContentInTemplate, with_text

Message: TypeAlias = dict[str, Any]

_ASKS_FOR_NO_CONTENT = re.compile(r"""content['"]?\]? is none\s*-?%}""")
"""Such a template, of DeepSeek, may show calls only of messages without content. Most templates want an empty one."""

_XML_TOOLS = "xml_tools"
"""SmolLM3's name for tools."""

_DEVELOPER = "developer"
"""OpenAI's newer name of the system. A template without it would drop such a message, or show a role that its model has
never seen.
"""

_PHI_TOOLS = "message['tools']"
_PHI_PREAMBLE = "You are a helpful assistant with some tools."
"""Phi-4-mini has tools in a system's message; its model card has this one."""

_WRITTEN_CALLS = (
    ("<|/tool|>", "<|tool_call|>[", ", ", "]<|/tool_call|>"),
    ("<|tool_call|>", "<|tool_call|>[", ", ", "]"),
    ("<tool_call>", "<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
)
"""What tells a form, and what stands before, between and behind calls, for templates that teach a form and show no calls
(Phi-4-mini, Granite 3, SmolLM3).
"""

_DEEPSEEK_SIGN = "tool['function']['name'] + '<｜tool▁sep｜>'"
_DEEPSEEK_TOOLS = """## Tools
You have access to the following tools:
{tools}
IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>{{additional_tool_calls}}<｜tool▁calls▁end｜>

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
"""
_DEEPSEEK_TOOL = "\n### {name}\nDescription: {description}\n\nParameters: {parameters}\n"
"""The template of DeepSeek V3.1 shows no tools. The model card has these words for the system's message."""


class ToolsNotShownError(Exception):
    """The template has no place for tools."""


class ToolsInTemplate:
    """One template's needs."""

    def __init__(self, source: str, names: Container[str], contents: ContentInTemplate) -> None:
        """``names``: the variables that it reads."""
        self._names = names
        self._contents = contents
        self._asks_for_no_content = _ASKS_FOR_NO_CONTENT.search(source) is not None
        self._knows_developers = _DEVELOPER in source
        self._has_tools_in_message = _PHI_TOOLS in source
        self._is_deepseeks = _DEEPSEEK_SIGN in source
        forms = (form for sign, *form in _WRITTEN_CALLS if sign in source)
        self._written_calls = next(forms, None) if "tool_calls" not in source else None

    def variables(self, messages: Iterable[tuple[str, ...]], tools: list[Any] | None) -> dict[str, Any]:
        """Return the template's variables for messages (see ``Conversation``) and tools.

        Raises:
            ToolsNotShownError: it does not show tools.
        """
        chat = [self._message(*message) for message in messages]
        given = {"messages": chat, "tools": tools}
        if not tools or "tools" in self._names:
            return given
        if _XML_TOOLS in self._names:
            return given | {_XML_TOOLS: tools}
        functions = [tool.get("function", tool) for tool in tools]
        if self._has_tools_in_message:
            first = {"tools": as_json(functions)}
            return given | {"messages": _with_system(chat, _PHI_PREAMBLE, first)}
        if self._is_deepseeks:
            shown = _DEEPSEEK_TOOLS.format(tools="".join(map(_shown, functions)))
            system = chat[0]["content"] if chat and chat[0]["role"] == "system" else ""
            return given | {"messages": _with_system(chat, "", {"content": f"{system}\n\n{shown}".lstrip()})}
        raise ToolsNotShownError

    def _message(self, role: str, text: str, more: str = "") -> Message:
        if role == _DEVELOPER and not self._knows_developers:
            role = "system"
        message = {"role": role, "content": text, **(json.loads(more) if more else {})}
        message["content"] = content = self._contents.shaped(message["content"])
        calls = message.get("tool_calls")
        if not isinstance(calls, list):
            return message
        if self._written_calls is not None:
            before, between, behind = self._written_calls
            shown = before + between.join(as_json(call["function"]) for call in calls) + behind
            message["content"] = with_text(content, shown)
        elif self._asks_for_no_content and not content:
            message["content"] = None
        return {**message, "tool_calls": [_call(one) for one in calls]}


class _Arguments(dict[str, Any]):
    """A call's arguments. Some templates want an object, and others, such as DeepSeek's, the text of it."""

    def __str__(self) -> str:
        return as_json(self)

    def __add__(self, behind: object) -> str:
        return f"{self}{behind}"

    def __radd__(self, before: object) -> str:
        return f"{before}{self}"


def as_json(value: object) -> str:
    """Return JSON as templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": _Arguments(function["arguments"])}}


def _with_system(chat: list[Message], preamble: str, more: Message) -> list[Message]:
    if not chat or chat[0]["role"] != "system":
        chat = [{"role": "system", "content": preamble}, *chat]
    return [{**chat[0], **more}, *chat[1:]]


def _shown(function: Message) -> str:
    parameters = as_json(function.get("parameters", {}))
    return _DEEPSEEK_TOOL.format(
        name=function.get("name"), description=function.get("description", ""), parameters=parameters
    )
