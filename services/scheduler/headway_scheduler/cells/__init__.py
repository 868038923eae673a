"""The executors as the scheduler sees them: each one is a cell, and together they are the fleet."""
