"""Structured output: the tokens that a row may draw next."""
