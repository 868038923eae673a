"""The parts of the simulated backend."""
