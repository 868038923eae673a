"""The policies that settings name, and what they learn. A policy answers questions; no caller asks which one it is."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("policies")
