"""The flight recorder: the calls and decisions of the core on disk, and their replay.

``records`` says what is written, ``log`` how, ``recorder`` when; ``replay`` repeats it, from a ``checkpoint`` or the start.
"""
