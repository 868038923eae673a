"""This process and its host: figures, reports, errors, threads, endings."""
