"""The executor knows rows and tensors, and runs what the scheduler decides.

``process`` runs it: ``startup`` opens a backend, ``step`` runs one step after the other. A backend (``backend.py`` is its
interface, ``backends`` has the built-in ones) computes with ``models`` and ``sampling``. Rooms stand on floors, as
``pyproject.toml`` says: each imports only from those below it.
"""
