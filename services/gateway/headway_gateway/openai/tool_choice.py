"""Which tools a request offers, and of which it must have a call. Must not know: templates, calls."""

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from headway_gateway.openai.bodies import (
    AllowedTools,
    ChatBody,
    Function,
    ResponsesBody,
    ResponseTool,
    TokenizeBody,
    Tool,
)
from headway_gateway.requests.validation import MAX_CHAT_PIECES
from headway_gateway.statuses import CallRefusedError, invalid_argument
from headway_proto.wording import shown

_NAME = re.compile(r"""[^\s<>{}()\[\]"'`\\]+""")
"""No form of calls marks these within a name."""

ToolsBody: TypeAlias = ChatBody | TokenizeBody | ResponsesBody


def offered_tools(body: ToolsBody) -> list[Function]:
    """Return the tools that the model may call.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    given = body.tools or ()
    if len(given) > MAX_CHAT_PIECES:
        raise invalid_argument("tools", f"{len(given)} are not allowed; allowed: at most {MAX_CHAT_PIECES}")
    tools = [tool.function for tool in given]
    first: dict[str, Function] = {}
    for place, tool in enumerate(tools):
        field = f"tools[{place}].{'' if isinstance(body, ResponsesBody) else 'function.'}name"
        if not _NAME.fullmatch(tool.name):
            raise invalid_argument(
                field, f"{shown(tool.name)} is not allowed; allowed: a name without space, quotes or brackets"
            )
        if first.setdefault(tool.name, tool) != tool:
            raise invalid_argument(field, f"{shown(tool.name)} is another tool's name; allowed: a name of its own")
    if body.tool_choice == "none":
        return []
    allowed = _allowed_tools(body)
    return tools if allowed is None else _named(tools, [tool.function.name for tool in allowed.tools], body)


def forced_tools(body: ToolsBody) -> list[Function]:
    """Return those of which it must call one; none if it need not.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    tools, choice = offered_tools(body), body.tool_choice
    if choice in (None, "auto", "none"):
        return []
    if not tools:
        raise invalid_argument("tool_choice", f"{shown(choice)} is not allowed without tools; allowed: auto, none")
    if choice == "required":
        return tools
    allowed = _allowed_tools(body)
    if allowed is not None:
        return tools if allowed.mode == "required" else []
    function: Any = choice if isinstance(choice, dict) and choice.get("type") == "function" else {}
    if not isinstance(body, ResponsesBody):
        function = function.get("function")
    return _named(tools, [function.get("name") if isinstance(function, dict) else None], body)


def _allowed_tools(body: ToolsBody) -> AllowedTools[Tool] | AllowedTools[ResponseTool] | None:
    """Return the choice of some tools; None if it is another."""
    choice = body.tool_choice
    if not (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return None
    rest = {key: value for key, value in choice.items() if key != "type"}
    try:
        if isinstance(body, ResponsesBody):
            return msgspec.convert(rest, AllowedTools[ResponseTool])
        return msgspec.convert(rest, dict[Literal["allowed_tools"], AllowedTools[Tool]])["allowed_tools"]
    except (msgspec.ValidationError, KeyError):
        raise _wrong_choice(body) from None


def _named(tools: list[Function], names: Sequence[Any], body: ToolsBody) -> list[Function]:
    wanted = {name for name in names if isinstance(name, str)}
    found = [tool for tool in tools if tool.name in wanted]
    if not found or not all(isinstance(name, str) for name in names) or wanted != {tool.name for tool in found}:
        raise _wrong_choice(body)
    return found


def _wrong_choice(body: ToolsBody) -> CallRefusedError:
    allowed = "auto, none, required, the function of a tool, or allowed_tools"
    return invalid_argument("tool_choice", f"{shown(body.tool_choice)} is not allowed; allowed: {allowed}")
