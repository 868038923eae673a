"""``headway doctor``: what this host can run, and how fast."""
