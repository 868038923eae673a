"""The events of a stream of choices: a frame that is the same for all, and a choice or the usage in it.

Owns: the bytes of these events, and how a stream ends. Must not know: what a choice holds.
"""

import msgspec

from headway_gateway.openai.http_call import HttpCall
from headway_gateway.openai.outputs import StreamUsage

TEXT = "\0"
"""Stands where the text comes, in a choice for ``around_text``."""

_DONE = b"data: [DONE]\n\n"


class EventFrame:
    """Sends choices. ``frame`` is an event without choices and usage."""

    def __init__(self, call: HttpCall, frame: msgspec.Struct, usage: StreamUsage) -> None:
        self._call = call
        self._frame = frame
        self._usage = usage

    @property
    def is_constant(self) -> bool:
        """Whether events differ by their choice alone."""
        return not self._usage.is_each

    def event(self, choice: msgspec.Struct, **more: object) -> bytes:
        """Return the event of a choice; ``more``: what this one has beside it."""
        return _event_of(msgspec.structs.replace(self._frame, choices=[choice], usage=self._usage.of_event, **more))

    def around_text(self, choice: msgspec.Struct) -> tuple[bytes, bytes]:
        """Return what stands before and behind the text of events like this; most events have text alone."""
        before, behind = self.event(choice).split(msgspec.json.encode(TEXT))
        return before, behind

    async def send_text(self, around: tuple[bytes, bytes], text: str) -> None:
        """Send an event with text alone, if the frame ``is_constant``."""
        before, behind = around
        await self._call.send_event(before + msgspec.json.encode(text) + behind)

    async def send(self, choice: msgspec.Struct) -> None:
        """Send the event of a choice."""
        await self._call.send_event(self.event(choice))

    async def close(self) -> None:
        """Send the last event, with the usage if it is wanted."""
        last = b""
        if self._usage.is_last:
            last = _event_of(msgspec.structs.replace(self._frame, usage=self._usage.tally.usage()))
        await self._call.send_event(last + _DONE)
        await self._call.end_events()


def _event_of(value: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
