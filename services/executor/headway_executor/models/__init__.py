"""Decoder-only transformer models."""
