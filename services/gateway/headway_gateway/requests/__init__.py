"""Requests before they run: their checks, and the token ids of their prompts."""
