"""How published checkpoints store quantised weights; see ``scheme``."""
