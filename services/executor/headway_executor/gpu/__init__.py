"""What the ``triton`` backend is made of: a model's step on a GPU, prepared by the host and never waited for.

``step_columns`` packs a step, ``device_rows`` keeps the rows on the device, ``decoder`` runs the model, ``graphs`` replays
it, ``readback`` brings the results home, ``runtime`` tells a CUDA device from Triton's interpreter on a CPU.
"""
