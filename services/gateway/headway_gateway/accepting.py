"""How many connections the system keeps waiting, and how many are accepted in a row. Must not know: servers."""

BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
"""asyncio takes so many in a row, and without a file descriptor left it fails, and complains, as often. It also lets no more
wait, so who starts a server listens again with ``BACKLOG``.
"""
