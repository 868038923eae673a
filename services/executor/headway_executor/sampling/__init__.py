"""From logits to tokens: drawing, constraints, speculation, log probabilities, pooled vectors."""
