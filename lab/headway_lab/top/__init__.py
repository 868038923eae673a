"""``headway top``: a live view of a running server in a terminal, and keys that steer it.

Looks become a ``History``; that and the state of the ``Controls`` become a picture; keys become ``Order``s, which the
``server`` module carries out over the Admin service. Only ``live`` knows of time, and only ``keyboard`` of terminals.
"""
