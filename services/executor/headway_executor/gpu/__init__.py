"""What the ``triton`` backend is made of: a model's step on a GPU, prepared by the host and never waited for.

``step_columns`` packs a step, ``device_rows`` keeps the rows on the device, ``decoder`` runs the model with the products of
``linear``, ``graphs`` replays it, ``device_sampler`` draws, ``block_mover`` holds the pool and moves its blocks, ``readback``
brings the results home, ``step_log`` writes down how long steps took, ``runtime`` tells a CUDA device from Triton's
interpreter on a CPU.
"""
