"""The pure scheduler: events and the time in, decisions out.

Owns: queues, rows, block tables, budgets. Must not know: sockets, clocks, processes, randomness.
The same events give byte-identical decisions, so production, simulation and replay run this very code.
"""
