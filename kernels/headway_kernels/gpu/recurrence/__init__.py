"""Layers with a state instead of keys and values, between their products: kernels for each kind of state.

Owns: the states' own arithmetic. Must not know: products, layers, requests.

Tokens of a row go one after the other, so a result has the same bits however tokens are cut into steps, and whatever else is
in a step. What a kernel leaves for the next one has the model's dtype; within a kernel, and in states, numbers are float32.
"""
