"""The load for the simulator and the bench. Must not know: what serves it."""
