"""Child processes: started, watched, restarted and ended in order."""
