"""The calls that generate, embed and score."""
