"""Attention over paged blocks: kernels, their tiles and how these are chosen, and libraries that may stand in."""
