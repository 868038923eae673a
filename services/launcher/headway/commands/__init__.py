"""The commands that need no room of their own."""
