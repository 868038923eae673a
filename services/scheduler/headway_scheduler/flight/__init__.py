"""The flight recorder: what the core was told and what it decided, on disk, and the same again from there.

``records`` says what is written, ``log`` how, ``recorder`` is told by the engine, ``replay`` does it all again, and
``checkpoint`` lets a replay begin in the middle. The core knows nothing of any of them.
"""
