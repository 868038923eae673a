"""Tools to study Headway: simulate, bench, replay, explain, timeline, top, doctor. Nothing that serves imports them."""
