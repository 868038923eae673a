"""The scenarios, a module for each matter; ``headway_conformance.suite`` puts them in order."""
