"""The constraint of a request's outputs, in the words of OpenAI and of vLLM. Must not know: how it is followed."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from headway_gateway.openai.bodies import (
    NOTHING,
    ChoicesBody,
    GenerationBody,
    ResponseFormat,
    ResponsesBody,
    StructuredOutputs,
    TextFormat,
)
from headway_gateway.requests.structural_tags import grammar_of_tags
from headway_gateway.statuses import invalid_argument
from headway_proto import generation_pb2 as api
from headway_proto.wording import one_line


class Constraint(NamedTuple):
    """``kind`` is a field of ``SamplingParams``, and ``field`` the caller's."""

    kind: str
    value: str | bool | list[str]
    field: str


def constraint_of(body: GenerationBody) -> Constraint | None:
    """Return the constraint that a request sets, if it sets one.

    Raises:
        CallRefusedError: INVALID_ARGUMENT.
    """
    found = [*_set_in(body, ""), *_of_vllm(body.structured_outputs)]
    if isinstance(body, ChoicesBody):
        found += _of_form(body.response_format, "response_format")
    elif isinstance(body, ResponsesBody) and body.text is not None:
        found += _of_form(body.text.format, "text.format")
    if len(found) > 1:
        problem = f"not allowed together with {found[0].field}; allowed: one of them"
        raise invalid_argument(found[1].field, problem)
    return found[0] if found else None


def constraint_names(body: GenerationBody, *, is_forced: bool = False) -> tuple[tuple[str, str], ...]:
    """Return what the caller calls the constraint, as pairs of our name and its; a forced call is one of its tools.

    A grammar of ours may stand for either, and for the schemas of strict tools.
    """
    constraint = None if is_forced else constraint_of(body)
    kind, field = ("json_schema", "tools") if constraint is None else (constraint.kind, constraint.field)
    return (f"sampling.{kind}", field), ("sampling.grammar", field)


def constrain(sampling: api.SamplingParams, constraint: Constraint) -> None:
    """Set it."""
    if isinstance(constraint.value, list):
        sampling.choice.SetInParent()
        sampling.choice.choices.extend(constraint.value)
    else:
        setattr(sampling, constraint.kind, constraint.value)


def _set_in(given: GenerationBody | StructuredOutputs, place: str) -> Iterator[Constraint]:
    for kind in ("regex", "grammar", "choice"):
        value = getattr(given, kind)
        if value is not None:
            yield Constraint(kind, value, place + kind)


def _of_vllm(given: StructuredOutputs | None) -> Iterator[Constraint]:
    if given is None:
        return
    place = "structured_outputs."
    found = [*_set_in(given, place)]
    if given.json_object:
        found.append(Constraint("json_object", True, place + "json_object"))
    if _is_given(given.json):
        found.append(Constraint("json_schema", _held_in(given.json, place + "json"), place + "json"))
    if _is_given(given.structural_tag):
        field = place + "structural_tag"
        found.append(_tagged(_held_in(given.structural_tag, field), field))
    if not found:
        raise invalid_argument(
            "structured_outputs", "it is empty; allowed: json, regex, choice, grammar, json_object or structural_tag"
        )
    yield from found


def _of_form(form: ResponseFormat | TextFormat | None, field: str) -> Iterator[Constraint]:
    if form is None:
        return
    if isinstance(form, ResponseFormat):
        yield from _tags_of(form, field)
    schemas = {f"{field}.schema": form.schema}
    own = f"{field}.schema"
    if isinstance(form, ResponseFormat):
        nested = f"{field}.json_schema.schema"
        schemas[nested] = NOTHING if form.json_schema is None else form.json_schema.schema
        own = nested if form.type == "json_schema" else own
    for name, schema in schemas.items():
        if _is_given(schema) and (name != own or form.type in ("text", "structural_tag")):
            raise invalid_argument(name, f"it is not allowed with the type {form.type}; allowed: unset")
    if _is_given(schemas[own]):
        yield Constraint("json_schema", _text_of(schemas[own], own), own)
    elif form.type == "json_object":
        yield Constraint("json_object", True, field)
    elif form.type == "json_schema":
        raise invalid_argument(own, "it is missing")


def _tags_of(form: ResponseFormat, field: str) -> Iterator[Constraint]:
    parts = {name: getattr(form, name) for name in ("structures", "triggers", "format")}
    given = {name: value for name, value in parts.items() if _is_given(value)}
    if form.type == "structural_tag":
        yield _tagged(msgspec.json.encode(given).decode(errors="replace"), field)
    elif given:
        raise invalid_argument(f"{field}.{min(given)}", f"it is not allowed with the type {form.type}; allowed: unset")


def _tagged(tags: str, field: str) -> Constraint:
    try:
        return Constraint("grammar", grammar_of_tags(tags), field)
    except ValueError as error:
        raise invalid_argument(field, one_line(error)) from None


def _held_in(given: msgspec.Raw, field: str) -> str:
    """A text may hold the JSON."""
    text = _text_of(given, field)
    return msgspec.json.decode(text, type=str) if text.startswith('"') else text


def _is_given(value: msgspec.Raw) -> bool:
    return bytes(value) != bytes(NOTHING)


def _text_of(schema: msgspec.Raw, field: str) -> str:
    try:
        return bytes(schema).decode()
    except UnicodeDecodeError as error:
        raise invalid_argument(field, f"it is not readable ({error}); allowed: a schema in UTF-8") from None
