"""``headway doctor``: what this host can run, and how fast. A missing package is a finding."""
