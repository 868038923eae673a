"""A request's life in plain words."""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import TypeAlias

from headway.terminal.tables import printable
from headway_lab.flight.life import FlightStep, Life, Wait, counted, few_names
from headway_lab.workload.requests import PRIORITY_NAMES

_STANDS_OUT = 2.5
"""A gap is described if it is this many times the median,"""
_MOST_GAPS = 5
"""and only the longest few of them."""
_LEAST_WAIT_S = 1e-4
_MOST_CHUNKS = 8

OWN_DEVICE = "its own prompt in steps, on the device"
OWN_BESIDE = "around those steps: links, executor, scheduler"
OTHERS = "steps of others that were under way before its own"
NO_STEP = "no step was under way"


_Section: TypeAlias = tuple[float, list[str]]
"""When, and the lines."""


def explanation(life: Life, first_s: float) -> str:
    """Describe one life; the recording begins at ``first_s``."""
    return "".join(f"{printable(line)}\n" for line in _lines(life, first_s))


def _lines(life: Life, first_s: float) -> Iterator[str]:
    owner = f"tenant {life.tenant}, " * bool(life.tenant)
    name = f"Request {life.request_id}" + f", sequence {life.index}" * bool(life.index)
    if not life.priority:
        yield f"{name} ({owner}{life.num_prompt_tokens} tokens) was {life.end}, {life.arrival_s - first_s:.3f} s into it."
        return
    what = f"{life.num_prompt_tokens} prompt tokens, up to {life.max_tokens} of output"
    yield f"{name} ({owner}class {PRIORITY_NAMES.get(life.priority, life.priority)}): {what}."
    yield ""
    yield _at(
        life, life.arrival_s, f"It arrived, {life.arrival_s - first_s:.3f} s into the recording. {_company(life)}"
    )
    sections = [*_choices(life), *_stays(life), *_first_token(life)]
    for _, lines in sorted(sections, key=lambda section: section[0]):
        yield from lines
    yield from _gaps(life)
    if life.end:
        yield _at(life, life.end_s, f"It ended: {life.end}, after {life.num_output_tokens} output tokens.")
    else:
        yield _more("The recording ends before it does.")


def _at(life: Life, when_s: float, text: str) -> str:
    return f"{_ms(when_s - life.arrival_s):>12}  {text}"


def _more(text: str, depth: int = 0) -> str:
    return f"{'':>12}  {'  ' * depth}{text}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _company(life: Life) -> str:
    running = f"{counted(life.num_running, 'request')} ran"
    if not life.num_waiting:
        return f"{running}, none was waiting."
    if life.ahead is None:
        return f"{running}, {life.num_waiting} were waiting."
    if not life.ahead:
        return f"{running}, {life.num_waiting} were waiting, all to be served after it."
    return f"{running}, {life.num_waiting} were waiting, {len(life.ahead)} of them before it: {few_names(life.ahead)}."


def _stays(life: Life) -> Iterator[_Section]:
    pending = list(life.waits)
    for place, admission in enumerate(life.admissions):
        before = [wait for wait in pending if wait.start_s <= admission.at_s]
        pending = pending[len(before) :]
        got_row = _at(life, admission.at_s, _admitted(life, place))
        yield admission.at_s, [*_waited(before), got_row, *_chunks(life, place)]
        if place < len(life.setbacks):
            at_s = life.setbacks[place].at_s
            yield at_s, [_at(life, at_s, _setback_text(life, place))]
    if pending:
        yield pending[0].start_s, list(_waited(pending))


def _waited(waits: list[Wait]) -> Iterator[str]:
    by_reason: dict[str, float] = {}
    texts: dict[str, str] = {}
    for wait in waits:
        by_reason[wait.reason] = by_reason.get(wait.reason, 0.0) + wait.end_s - wait.start_s
        behind = f"behind {counted(wait.num_ahead, 'other')}; " if wait.num_ahead else ""
        texts.setdefault(wait.reason, f"{behind}{wait.text}")
    total = sum(by_reason.values())
    if total < _LEAST_WAIT_S:
        return
    if total == float("inf"):
        yield _more("It was still waiting when the recording ended:")
    else:
        yield _more(f"It waited {_ms(total)}:")
    for reason, seconds in sorted(by_reason.items(), key=lambda entry: -entry[1]):
        lasted = "to the end" if seconds == float("inf") else _ms(seconds)
        yield _more(f"{lasted} because {reason} (at first: {texts[reason]})", 1)


def _admitted(life: Life, place: int) -> str:
    admission = life.admissions[place]
    text = f"It got a row in step {admission.step}{_on_executor(life, admission.executor)}"
    before = life.setbacks[place - 1] if place else None
    if admission.num_held_tokens and before is not None and before.num_handed_tokens:
        return f"{text}: {admission.num_held_tokens} of its {admission.num_tokens} tokens came with it."
    if admission.num_held_tokens and before is not None and before.num_swapped_tokens:
        return f"{text}: {admission.num_held_tokens} of its {admission.num_tokens} tokens came back from the host."
    if admission.num_held_tokens:
        return f"{text}: {admission.num_held_tokens} of its {admission.num_tokens} tokens were in the prefix cache."
    return f"{text}, with all of its {admission.num_tokens} tokens to compute."


def _on_executor(life: Life, executor: int) -> str:
    return f" of executor {executor}" if life.choices else ""


def _choices(life: Life) -> Iterator[_Section]:
    before: int | None = None
    for choice in life.choices:
        again = "" if before is None else " again" if before == choice.executor else f" after executor {before}"
        yield choice.at_s, [_at(life, choice.at_s, f"It was given to executor {choice.executor}{again}.")]
        before = choice.executor


def _chunks(life: Life, place: int) -> Iterator[str]:
    chunks = _chunks_of(life, place)
    if not chunks:
        return
    num_chunks = len(chunks)
    yield _more(f"What was to compute ran in {counted(num_chunks, 'chunk')}:")
    for step in chunks[:_MOST_CHUNKS]:
        yield _more(_chunk_text(step), 1)
    if num_chunks > _MOST_CHUNKS:
        rest = chunks[_MOST_CHUNKS:]
        yield _more(f"and {len(rest)} more with {sum(step.num_own_tokens for step in rest)} tokens", 1)


def _chunks_of(life: Life, place: int) -> list[FlightStep]:
    admission = life.admissions[place]
    num_left = admission.num_tokens - admission.num_held_tokens
    until_s = life.setbacks[place].at_s if place < len(life.setbacks) else float("inf")
    chunks = []
    for step in life.own_steps:
        if admission.at_s <= step.sent_s < until_s and num_left > 0:
            chunks.append(step)
            num_left -= step.num_own_tokens
    return chunks


def _chunk_text(step: FlightStep) -> str:
    text = f"step {step.step}: {counted(step.num_own_tokens, 'token')}{_beside(step)}"
    if step.answered_s == float("inf"):
        return f"{text}, never answered"
    return (
        f"{text}, {_ms(step.device_s)} on the device, answered {_ms(step.answered_s - step.sent_s)} after it was sent"
    )


def _beside(step: FlightStep) -> str:
    num_prompt_tokens = sum(count for _, count in step.prompts)
    num_decodes = step.num_tokens - step.num_own_tokens - num_prompt_tokens
    parts = []
    if num_prompt_tokens:
        parts.append(f"{num_prompt_tokens} prompt tokens of {few_names([name for name, _ in step.prompts])}")
    if num_decodes > 0:
        parts.append(counted(num_decodes, "decode"))
    return f" beside {' and '.join(parts)}" if parts else " alone"


def _setback_text(life: Life, place: int) -> str:
    setback = life.setbacks[place]
    text = f"It was preempted: {setback.why}."
    if setback.num_handed_tokens:
        text = f"It was handed off with {setback.num_handed_tokens} computed tokens, for another executor to go on with it."
    if setback.num_swapped_tokens:
        text += f" The host got {setback.num_swapped_tokens} of its {setback.num_computed_tokens} computed tokens."
    if place + 1 >= len(life.admissions):
        return f"{text} It had {setback.num_computed_tokens} tokens computed."
    again = life.admissions[place + 1]
    lost = max(0, setback.num_computed_tokens - again.num_held_tokens)
    gone_s = again.at_s - setback.at_s
    return f"{text} That cost it {_ms(gone_s)} without a row, and {lost} tokens were computed again."


# --------------------------------------------------------------------------------------------- to the first token


def time_to_first_token(life: Life) -> dict[str, float]:
    """Return the parts of the TTFT."""
    first_s = life.token_times_s[0]
    parts: defaultdict[str, float] = defaultdict(float)
    for wait in life.waits:
        parts[f"waiting, because {wait.reason}"] += max(0.0, min(wait.end_s, first_s) - wait.start_s)
    covered_to_s = life.arrival_s
    for step in life.steps:
        begins_s, ends_s = max(step.sent_s, covered_to_s), min(step.answered_s, first_s)
        length_s = ends_s - begins_s - _waited_between(life, begins_s, ends_s)
        if ends_s <= begins_s:
            continue
        covered_to_s = ends_s
        if step.num_own_tokens:
            on_device_s = min(step.device_s, length_s)
            parts[OWN_DEVICE] += on_device_s
            parts[OWN_BESIDE] += length_s - on_device_s
        else:
            parts[OTHERS] += length_s
    parts[NO_STEP] += first_s - life.arrival_s - sum(parts.values())
    in_order = sorted(parts.items(), key=lambda part: -part[1])
    return {what: seconds for what, seconds in in_order if seconds > _LEAST_WAIT_S / 10}


def _waited_between(life: Life, start_s: float, end_s: float) -> float:
    return sum(max(0.0, min(wait.end_s, end_s) - max(wait.start_s, start_s)) for wait in life.waits)


def _first_token(life: Life) -> Iterator[_Section]:
    if not life.token_times_s:
        return
    total_s = life.token_times_s[0] - life.arrival_s
    parts = [
        _more(f"{_ms(seconds):>12}  {100 * seconds / total_s:5.1f} %  {what}")
        for what, seconds in time_to_first_token(life).items()
    ]
    when_s = life.token_times_s[0]
    yield when_s, [_at(life, when_s, f"Its first token. Where these {_ms(total_s)} went:"), *parts]


# --------------------------------------------------------------------------------------------------- between tokens


def _gaps(life: Life) -> Iterator[str]:
    times = life.token_times_s
    gaps = [(after - before, place + 1) for place, (before, after) in enumerate(pairwise(times))]
    if not gaps:
        return
    median_s = statistics.median(gap for gap, _ in gaps)
    longest_s = max(gap for gap, _ in gaps)
    yield _more(f"{len(gaps)} gaps between tokens: median {_ms(median_s)}, longest {_ms(longest_s)}.")
    standing_out = [entry for entry in gaps if entry[0] > _STANDS_OUT * median_s]
    for gap_s, place in sorted(sorted(standing_out, reverse=True)[:_MOST_GAPS], key=lambda entry: entry[1]):
        yield _more(f"{_ms(gap_s)} before token {place + 1}: {_gap_cause(life, times[place - 1], times[place])}", 1)


def _gap_cause(life: Life, start_s: float, end_s: float) -> str:
    setbacks = [setback for setback in life.setbacks if start_s <= setback.at_s <= end_s]
    if setbacks:
        return "it was handed off" if all(setback.num_handed_tokens for setback in setbacks) else "it was preempted"
    steps = [step for step in life.steps if start_s < step.answered_s <= end_s]
    names = list(dict.fromkeys(name for step in steps for name, _ in step.prompts))
    num_prompt_tokens = sum(count for step in steps for _, count in step.prompts)
    sat_out = sum(not step.num_own_tokens for step in steps)
    text = f"{counted(len(steps), 'step')} of {sum(step.num_tokens for step in steps)} tokens"
    if num_prompt_tokens:
        text += f", {num_prompt_tokens} of them of the prompts of {few_names(names)}"
    if sat_out:
        text += f"; it sat out {sat_out}"
    device_s = sum(step.device_s for step in steps)
    return f"{text}; {_ms(device_s)} on the device"
