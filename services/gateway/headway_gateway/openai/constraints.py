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
from headway_gateway.statuses import invalid_argument
from headway_proto import generation_pb2 as api


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
        text = _text_of(given.json, place + "json")
        # A text may hold the schema.
        schema = msgspec.json.decode(text, type=str) if text.startswith('"') else text
        found.append(Constraint("json_schema", schema, place + "json"))
    if not found:
        raise invalid_argument(
            "structured_outputs", "it is empty; allowed: json, regex, choice, grammar or json_object"
        )
    yield from found


def _of_form(form: ResponseFormat | TextFormat | None, field: str) -> Iterator[Constraint]:
    if form is None:
        return
    schemas = {f"{field}.schema": form.schema}
    own = f"{field}.schema"
    if isinstance(form, ResponseFormat):
        nested = f"{field}.json_schema.schema"
        schemas[nested] = NOTHING if form.json_schema is None else form.json_schema.schema
        own = nested if form.type == "json_schema" else own
    for name, schema in schemas.items():
        if _is_given(schema) and (name != own or form.type == "text"):
            raise invalid_argument(name, f"it is not allowed with the type {form.type}; allowed: unset")
    if _is_given(schemas[own]):
        yield Constraint("json_schema", _text_of(schemas[own], own), own)
    elif form.type == "json_object":
        yield Constraint("json_object", True, field)
    elif form.type == "json_schema":
        raise invalid_argument(own, "it is missing")


def _is_given(value: msgspec.Raw) -> bool:
    return bytes(value) != bytes(NOTHING)


def _text_of(schema: msgspec.Raw, field: str) -> str:
    try:
        return bytes(schema).decode()
    except UnicodeDecodeError as error:
        raise invalid_argument(field, f"it is not readable ({error}); allowed: a schema in UTF-8") from None
