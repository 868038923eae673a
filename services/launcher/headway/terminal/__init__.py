"""What long runs and lists print: progress, tables."""
