"""``headway plan``: how many executors of which role and degrees serve a rate within objectives, on the fewest devices."""
