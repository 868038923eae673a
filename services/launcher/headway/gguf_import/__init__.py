"""``headway gguf``: a checkpoint directory of a GGUF file; see ``command``."""
