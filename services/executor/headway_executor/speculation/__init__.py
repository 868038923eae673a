"""Speculative decoding on the executor: proposing tokens and verifying them.

Owns: the proposers and the acceptance of proposals. Must not know: which rows speculate and why, or sockets.

The model computes the logits of a row's last token and of all proposals behind it in one pass. The sampler draws each
position as always, keyed by seed and position. A draw behind a proposal counts only if the proposal equals the token
that was drawn for its place, so every token is the model's own draw. This is rejection sampling of a proposal that is
certain of its token (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML
2023; Chen et al., "Accelerating large language model decoding with speculative sampling", arXiv:2302.01318).
"""
