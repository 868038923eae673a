"""Admission: which waiting requests start."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("admission")
