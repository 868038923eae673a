"""``headway executor`` with a backend that fails on purpose: ``python executor_with.py CLASS [flags of the executor]``.

Owns: replacing the look-up of backends by one of ``faulty_backends``. Backends are found by entry points, which need an
installed package; a fault must not be installable, so it is put in place of the look-up instead, in this process only.
Must not know: what the backend does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import faulty_backends
from headway.__main__ import main
from headway_executor.startup import opening

if __name__ == "__main__":
    backend_class = getattr(faulty_backends, sys.argv[1])
    opening.create_backend = lambda name: backend_class()
    sys.argv[0:2] = ["headway", "executor"]
    sys.exit(main())
