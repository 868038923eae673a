"""The flight recorder: the core's calls and decisions on disk, and their replay."""
