"""Blocks, rows and where tokens are kept: what is free, what is cached, what is moved."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("memory")
