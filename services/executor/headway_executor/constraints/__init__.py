"""Structured output on the executor: which tokens a row may draw next, known before its logits are.

``rows`` follows the outputs of constrained rows, ``lanes`` are the threads that do so beside the forward pass. What a
constraint means is ``headway_proto.grammars``'s to know.
"""
