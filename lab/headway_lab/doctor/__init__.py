"""``headway doctor``: what this host can run, and how fast.

Owns: the question; the order of work is in ``command``. Must not know: how a backend runs a model.

Works with whatever is installed: what is missing is a finding.

- ``host``: what Python and the system tell; ``findings``: everything that was found; ``examination``: finding it, with
  the executor's help where torch is installed.
- ``expectation``: how long a decode step takes by what was measured.
- ``rendering``: the text; ``command``: flags, order, exit codes.
"""
