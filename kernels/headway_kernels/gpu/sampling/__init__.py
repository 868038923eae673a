"""From logits to a token: penalties, truncation, the distribution, a draw, and log probabilities."""
