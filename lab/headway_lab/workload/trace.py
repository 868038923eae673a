"""Requests from a trace file, whose lines docs/simulation.md describes. Must not know: how requests are served."""

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from headway.flags.named_files import lines_of_file
from headway.flags.settings import ConfigurationError
from headway_lab.workload.requests import (
    MOST_OBJECTIVE_MS,
    NO_OBJECTIVES,
    NO_PREFIX,
    PRIORITIES,
    Objectives,
    PlannedRequest,
)
from headway_proto.wording import one_line, shown

_Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
_Objective = Annotated[int, Meta(ge=0, le=MOST_OBJECTIVE_MS)]


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a trace."""

    arrival_s: Annotated[float, Meta(ge=0, le=1e9)]
    prompt_tokens: _Tokens
    output_tokens: _Tokens
    tenant: str = ""
    priority: Literal["realtime", "high", "normal", "low"] = "normal"
    ttft_slo_ms: _Objective | None = None
    itl_slo_ms: _Objective | None = None
    prefix: str = ""
    prefix_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] = 0


def read_trace(path: str, objectives: Objectives = NO_OBJECTIVES) -> tuple[list[PlannedRequest], list[float]]:
    """Return a trace's requests by arrival, and their arrival times in seconds; ``objectives`` are the default.

    Raises:
        ConfigurationError: the file is unreadable, empty or wrong.
    """
    lines = sorted(_lines(path), key=lambda line: line.arrival_s)
    if not lines:
        raise ConfigurationError(f"--trace: {shown(path)} has no request in it")
    prefixes: dict[str, int] = {}
    requests = []
    for number, line in enumerate(lines):
        has_prefix = bool(line.prefix)
        requests.append(
            PlannedRequest(
                number=number,
                num_prompt_tokens=line.prompt_tokens,
                num_output_tokens=line.output_tokens,
                tenant=line.tenant,
                priority=PRIORITIES[line.priority],
                objectives=Objectives(
                    ttft_slo_ms=objectives.ttft_slo_ms if line.ttft_slo_ms is None else line.ttft_slo_ms,
                    itl_slo_ms=objectives.itl_slo_ms if line.itl_slo_ms is None else line.itl_slo_ms,
                ),
                prefix=prefixes.setdefault(line.prefix, len(prefixes)) if has_prefix else NO_PREFIX,
                num_prefix_tokens=line.prefix_tokens if has_prefix else 0,
            )
        )
    return requests, [line.arrival_s for line in lines]


def _lines(path: str) -> Iterator[TraceLine]:
    for number, text in lines_of_file(path, "--trace"):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=TraceLine)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ConfigurationError(f"--trace: line {number} of {shown(path)}: {one_line(error)}") from None
        if line.prefix_tokens > line.prompt_tokens:
            raise ConfigurationError(
                f"--trace: line {number} of {shown(path)}: prefix_tokens {line.prefix_tokens} is not allowed; "
                f"allowed: at most prompt_tokens, {line.prompt_tokens}"
            )
        if bool(line.prefix) != bool(line.prefix_tokens):
            has, lacks = ("prefix", "prefix_tokens") if line.prefix else ("prefix_tokens", "prefix")
            raise ConfigurationError(
                f"--trace: line {number} of {shown(path)}: {has} without {lacks} is not allowed; allowed: both or neither"
            )
        yield line
