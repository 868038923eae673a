"""Python's collector of cycles in a process that must not pause. Must not know: what the process does."""

import gc

_THRESHOLDS = (50_000, 20, 20)


def pause_collector() -> None:
    """Collect nothing while a process starts: what it makes stays, and a pass over all modules takes as long as many."""
    gc.disable()


def relax_collector() -> None:
    """Collect cycles rarely, and never among what is there now: a pass over everything takes as long as a step."""
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()
