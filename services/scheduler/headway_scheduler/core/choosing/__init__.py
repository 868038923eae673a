"""What placement asks of each core, and its choice among them: one core's rooms know nothing of it."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("choosing")
