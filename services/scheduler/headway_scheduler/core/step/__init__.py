"""One step: its plan, and what its answer says."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("step")
