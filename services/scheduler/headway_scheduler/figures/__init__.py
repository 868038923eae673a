"""What the scheduler counts of itself, over all cells and over time."""
