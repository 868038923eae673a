"""Plain records of requests, steps, limits and totals."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("state")
