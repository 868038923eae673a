"""Who may come in, who waits, and who is next."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("admission")
