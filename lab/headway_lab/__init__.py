"""Tools to study Headway: simulate, bench, replay, explain, timeline, top, doctor.

May import all of Headway. Nothing that serves imports it.
"""
