"""The frame of a picture: the terminal's size and glyphs, and whether the server answers."""

import msgspec

from headway_lab.top.figures import Glyphs

STATE_STYLES = {"serving": "green", "ready": "green", "running": "green", "preempted": "yellow", "waiting": "cyan"}


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """The terminal and the server's reachability.

    ``silent_for`` and ``trouble`` are empty while the server answers.
    """

    width: int
    height: int
    address: str
    glyphs: Glyphs
    silent_for: str = ""
    trouble: str = ""
    hints: str = ""
