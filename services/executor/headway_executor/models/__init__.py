"""Decoder-only transformer models: configuration, positions, attention and the forward pass."""
