"""Products of pairs of a token and an expert."""
