"""What the ranks of one model share while they compute: memory, messages, meetings."""
