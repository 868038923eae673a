"""The parts of the ``triton`` backend."""
