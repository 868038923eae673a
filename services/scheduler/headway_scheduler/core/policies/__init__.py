"""The policies that settings name, and what they learn. A policy answers questions, so no caller checks its name."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("policies")
