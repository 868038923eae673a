"""What an executor does before its first step: it checks its host, finds a backend and opens it."""
