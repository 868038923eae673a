"""The process that renders chats: one template, messages in, text out, and nothing else.

Owns: the dialect of chat templates, their sandbox, and the most memory that the process may use.
Must not know: tokenizers, gRPC, who asks.

A template comes with a checkpoint, so it is a program of somebody else's, run on messages of yet another. The sandbox
keeps it from what it must not touch; it does not keep it from looping for ever or from filling the memory. So it runs here:
``template_process`` starts this module as a process, talks to it over its pipes, and ends it when it takes too long.

Frames hold JSON. The first is a ``TemplateSource``, each later one ``Messages``; each is answered with a ``Rendering``.
"""

import datetime as dt
import json

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from headway_gateway.bounded_process import limit_this_process, serve

MAX_MEMORY_BYTES = 1 << 30
MAX_OUTPUT_CHARACTERS = 1 << 25
MAX_MESSAGE_CHARACTERS = 200


class TemplateSource(msgspec.Struct, frozen=True):
    """A template, and the special tokens that it may name."""

    source: str
    special: dict[str, str]


class Messages(msgspec.Struct, frozen=True):
    """A chat, as (role, content)."""

    messages: tuple[tuple[str, str], ...]


class Rendering(msgspec.Struct, frozen=True):
    """A text; or why there is none: ``refusal`` in the template's own words, ``failure`` the kind of its error."""

    text: str = ""
    refusal: str = ""
    failure: str = ""


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The dialect that chat templates are written in: trimmed blocks, loop controls, and three helpers."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
    )
    made.globals["raise_exception"] = _raise_template_error
    made.globals["strftime_now"] = _strftime_now
    made.filters["tojson"] = _to_json
    return made


class Renderer:
    """One template, compiled."""

    def __init__(self, template: TemplateSource) -> None:
        """Compile it; whatever goes wrong is raised as jinja2 raises it."""
        self._template = environment().from_string(template.source)
        self._special = template.special

    def render(self, chat: Messages) -> str:
        """The text of a chat, with the opening of the assistant's answer at its end."""
        parts = []
        num_characters = 0
        for part in self._template.generate(
            messages=[{"role": role, "content": content} for role, content in chat.messages],
            add_generation_prompt=True,
            **self._special,
        ):
            num_characters += len(part)
            if num_characters > MAX_OUTPUT_CHARACTERS:
                raise OverflowError
            parts.append(part)
        return "".join(parts)


def main() -> None:
    """Serve until the pipe is closed."""
    limit_this_process(MAX_MEMORY_BYTES)
    renderer: Renderer | None = None

    def answer(body: bytes) -> bytes:
        nonlocal renderer
        try:
            if renderer is None:
                renderer = Renderer(msgspec.json.decode(body, type=TemplateSource))
                return msgspec.json.encode(Rendering())
            return msgspec.json.encode(Rendering(text=renderer.render(msgspec.json.decode(body, type=Messages))))
        except jinja2.TemplateError as error:
            return msgspec.json.encode(Rendering(refusal=_one_line(error) or type(error).__name__))
        except Exception as error:  # noqa: BLE001  # Whatever a template does, it is the template's failure.
            return msgspec.json.encode(Rendering(failure=type(error).__name__))

    serve(answer)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().astimezone().strftime(layout)


def _to_json(value: object, indent: int | None = None) -> str:
    # jinja2's own filter escapes for HTML, which would put \u003c into prompts.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:MAX_MESSAGE_CHARACTERS]
    return text.encode("utf-8", "replace").decode("utf-8")


if __name__ == "__main__":
    main()
