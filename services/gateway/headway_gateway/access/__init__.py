"""Who may call, and how often something about it is logged."""
