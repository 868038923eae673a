"""One step, from its passes to its answer."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("step")
