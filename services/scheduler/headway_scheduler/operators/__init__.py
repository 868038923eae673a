"""What operators ask for: the status, why a request waits, and changes while it runs."""
