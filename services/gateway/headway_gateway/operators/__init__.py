"""What operators and their tools ask for."""
