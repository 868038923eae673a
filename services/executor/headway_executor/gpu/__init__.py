"""The parts of the ``triton`` backend: a model's step on a GPU, for which the host never waits."""
