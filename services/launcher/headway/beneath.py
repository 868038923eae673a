"""``headway serve`` as a child of a program that is no command: it ends when the program ends, however that ends.

Owns: noticing the program's end. Must not know: what is served.

The kernel's own way, a signal at the parent's death, is about the parent's thread, and a notebook's threads come and go.
So the program holds a pipe, whose end is read here. It holds it alone, unless it forks.
"""

import os
import signal
import sys
from threading import Thread

from headway.__main__ import main


def _end_with_the_pipe() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    Thread(target=_end_with_the_pipe, name="pipe", daemon=True).start()
    sys.exit(main(["serve", *sys.argv[1:]]))
