"""``headway top``: a live view of a running server in a terminal, with keys to steer it.

``History`` collects answers of the server, and ``view`` draws it. ``Controls`` turns keys into orders, which ``server``
sends. Only ``live`` uses time, and only ``keyboard`` uses the terminal.
"""
