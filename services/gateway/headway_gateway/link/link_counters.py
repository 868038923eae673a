"""What the gateway counts of its link with the scheduler. Must not know: who counts, who reads."""

import msgspec


class LinkCounters(msgspec.Struct):
    """Faults seen, and links opened."""

    links_opened: int = 0
    damaged_frames: int = 0
    sequence_gaps: int = 0
    token_gaps: int = 0
    duplicate_frames: int = 0
    duplicate_tokens: int = 0
    stale_frames: int = 0
    silences: int = 0
