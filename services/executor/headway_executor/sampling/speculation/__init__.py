"""Speculative decoding on the executor: proposing tokens and verifying them.

Owns: proposers, acceptance. Must not know: why a row speculates.

One pass computes the logits of a row's last token and of all proposals behind it. The sampler draws each position as
always, keyed by seed and position. A draw counts only while the proposals before it equal the drawn tokens, so every
token is the model's own draw. This is rejection sampling of a proposal that is certain of its token (Leviathan, Kalman
and Matias, ICML 2023, arXiv:2211.17192; Chen et al., arXiv:2302.01318).
"""
