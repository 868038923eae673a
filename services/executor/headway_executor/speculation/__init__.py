"""Speculative decoding on the executor's side: who proposes tokens, and what their verification comes to.

Owns: the proposers and the acceptance of what they propose. Must not know: who decides that a row speculates, or sockets.

The target model computes the logits of a row's last token and of all proposals behind it in one pass, and the sampler
draws the token of each position as it always does, keyed by seed and position (``sampler``). What is drawn behind a
proposal counts only if the proposal is the token that was drawn for its place. So every token that leaves is the target's
own draw, at any temperature and under any sampling parameters. A proposal x is right with probability p(x), as under
rejection sampling of a proposal that is certain of x (Leviathan, Kalman and Matias, "Fast inference from transformers via
speculative decoding", ICML 2023; Chen et al., "Accelerating large language model decoding with speculative sampling",
arXiv:2302.01318), and the distribution of what leaves is the target's. Unlike that scheme, what leaves does not depend
on the proposals either: with logits that are equal to the last bit the text is the same with and without speculation, and
a request that is recovered goes on as it would have. A draft model that draws with the same random numbers is a maximal
coupling's poor relative: it agrees often where the two distributions are close, and always where both are certain.
"""
