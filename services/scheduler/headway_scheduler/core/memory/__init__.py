"""One executor's memory: blocks, rows and cached prefixes."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("memory")
