"""What a request is, and what is counted and told: plain records, which decide nothing."""

from headway_scheduler.compiled_core import search_path

__path__ = search_path("state")
