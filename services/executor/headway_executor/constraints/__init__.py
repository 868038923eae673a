"""Structured output on the executor: the tokens that a row may draw next, known before its logits are."""
