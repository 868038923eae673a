"""The parts of the ``triton`` backend, whose host never waits for the GPU."""
