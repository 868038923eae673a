"""The child process that renders chats, in the dialect of transformers' ``apply_chat_template``.

A sandbox cannot stop an endless loop, so ``template_process`` runs this as a process. Frames hold JSON: a ``TemplateSource``, then
each a ``Conversation``; each gets a ``Rendering``.
"""

import datetime as dt
import json
from collections.abc import Callable, Container, Iterable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import msgspec

from headway_gateway.text.bounded_process import limit_this_process, serve
from headway_gateway.text.content_in_templates import ContentInTemplate, with_more_text
from headway_gateway.text.conversation import Conversation
from headway_gateway.text.tools_in_templates import ToolsInTemplate, ToolsNotShownError
from headway_proto.wording import one_line, shown

MAX_MEMORY_BYTES = 1 << 30
MAX_OUTPUT_CHARACTERS = 1 << 25
MAX_MESSAGE_CHARACTERS = 200
_CONTINUED = "headway_goes_on_here "
"""Stands behind the content that a model goes on with, until the text has been cut there."""


class TemplateSource(msgspec.Struct, frozen=True):
    """A template and its special tokens; and another template for chats with tools, if there is one."""

    source: str
    special: dict[str, str]
    for_tools: str | None = None


class Rendering(msgspec.Struct, frozen=True):
    """A text, the template's ``refusal``, or its error's kind. ``part``: of the chat, if that alone is refused."""

    text: str = ""
    refusal: str = ""
    failure: str = ""
    part: str = ""


class _UnreadVariableError(jinja2.TemplateError):
    """A caller gives a variable that the template does not read."""


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Return the dialect of chat templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols], autoescape=False
    )
    made.globals["raise_exception"] = _raise_template_error
    made.globals["strftime_now"] = _strftime_now
    made.globals["namespace"] = _Namespace
    made.filters["tojson"] = _to_json
    return made


class _GenerationBlocks(jinja2.ext.Extension):
    """Only training uses ``{% generation %}``. As in transformers, its variables do not outlive it."""

    tags = {"generation"}  # noqa: RUF012  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Names that begin with an underscore reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # ``self`` is a name that a template may set.
        own = dict(*args[1:], **kwargs)
        for name in own:
            _check_attribute(name)
        jinja2.utils.Namespace.__init__(args[0], own)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot hold {shown(name)}; allowed: names that do not begin with an underscore"
        )


def names_read(parsed: jinja2.nodes.Template) -> set[str]:
    """Return the variables that a template looks for."""
    return jinja2.meta.find_undeclared_variables(parsed) - set(environment().globals)


class _Compiled:
    """One template."""

    def __init__(self, source: str, special: dict[str, str]) -> None:
        dialect = environment()
        parsed = dialect.parse(source)
        self._generate = dialect.from_string(parsed).generate
        self._names = names_read(parsed)
        self._special = special
        self._tools = ToolsInTemplate(source, self._names, ContentInTemplate(self._render_one))

    def chat(self, given: Conversation) -> dict[str, Any]:
        """Return the variables of a chat."""
        tools = json.loads(given.tools) if given.tools else None
        try:
            own = self._tools.variables(given.messages, tools)
            if given.continues:
                last = own["messages"][-1]
                own["messages"][-1] = {**last, "content": with_more_text(last["content"] or "", _CONTINUED)}
            return {**own, "add_generation_prompt": given.asks}
        except ToolsNotShownError:
            read = ", ".join(sorted(self._names))
            raise jinja2.TemplateError(f"it does not show tools; it reads {read or 'none'}") from None

    def text(self, variables: dict[str, Any]) -> str:
        """Return what the template gives. Raises ``OverflowError``: it does not end."""
        parts = []
        num_characters = 0
        for part in self._generate(variables):
            num_characters += len(part)
            if num_characters > MAX_OUTPUT_CHARACTERS:
                raise OverflowError
            parts.append(part)
        return "".join(parts)

    def _render_one(self, message: dict[str, Any]) -> str:
        chat = {"messages": [message], "tools": None, "documents": None, "add_generation_prompt": True}
        return self.text({**self._special, **chat})

    def check_names(self, given: Iterable[str], own: Container[str]) -> None:
        """Refuse variables of a caller that the template does not read: a slip would change nothing and stay unseen."""
        if unread := [name for name in given if name not in self._names]:
            read = ", ".join(sorted(name for name in self._names if name not in own))
            raise _UnreadVariableError(f"it has no variable {shown(unread[0])}; it reads {read or 'none'}")


class Renderer:
    """A compiled template, or two."""

    def __init__(self, template: TemplateSource) -> None:
        self._template = self._for_tools = _Compiled(template.source, template.special)
        if template.for_tools is not None:
            self._for_tools = _Compiled(template.for_tools, template.special)
        self._special = template.special

    def render(self, chat: Conversation) -> str:
        """Return the text."""
        template = self._for_tools if chat.tools else self._template
        own = template.chat(chat)
        given = json.loads(chat.variables) if chat.variables else {}
        template.check_names(given, own)
        text = template.text({"documents": None, **self._special, **given, **own})
        return _up_to_mark(text) if chat.continues else text


def main() -> None:
    """Serve until the pipe closes."""
    limit_this_process(MAX_MEMORY_BYTES)
    renderer: Renderer | None = None

    def answer(body: bytes) -> bytes:
        nonlocal renderer
        try:
            if renderer is None:
                renderer = Renderer(msgspec.json.decode(body, type=TemplateSource))
                return msgspec.json.encode(Rendering())
            return msgspec.json.encode(Rendering(text=renderer.render(msgspec.json.decode(body, type=Conversation))))
        except jinja2.TemplateError as error:
            part = "variables" if isinstance(error, _UnreadVariableError) else ""
            refusal = _encodable(one_line(error, MAX_MESSAGE_CHARACTERS))
            return msgspec.json.encode(Rendering(refusal=refusal, part=part))
        except Exception as error:  # noqa: BLE001  # Whatever a template does, it is the template's failure.
            return msgspec.json.encode(Rendering(failure=type(error).__name__))

    serve(answer)


def _up_to_mark(text: str) -> str:
    before, mark, behind = text.rpartition(_CONTINUED.rstrip())
    if not mark:
        raise jinja2.TemplateError("it does not show the last message's content, so nothing can go on with it")
    # Like transformers: a template that trims contents trims this one as well.
    return before if behind.startswith(" ") else before.rstrip()


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002  # Templates name it.
    return dt.datetime.now().astimezone().replace(tzinfo=None).strftime(format)


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # By position as well.
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


if __name__ == "__main__":
    main()
