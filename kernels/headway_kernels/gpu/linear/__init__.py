"""Products of inputs with a matrix: few rows, codes, FP8, and the low ranks of adapters."""
