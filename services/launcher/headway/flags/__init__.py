"""From flags, environment and files to checked settings."""
